"""Leaky ReLU: its gradient from the output.

For a positive slope the output has the sign of the input (or is a zero of it), and the kernel only asks whether
its operand is above zero: the gradient has the same bits from either.
"""

from collections.abc import Iterator
from dataclasses import replace

from monetlite.core.graph import Implementation, TensorRef
from monetlite.operators.elementwise import in_place
from monetlite.operators.kernel import Kernel
from monetlite.operators.registry import alternatives_for


@alternatives_for("aten.leaky_relu_backward.default")
def backward_from_output(kernel: Kernel) -> Iterator[Implementation]:
    """`leaky_relu_backward` with the output in place of the input."""
    gradient, source, slope, _ = kernel.call.args
    if not isinstance(source, TensorRef) or not isinstance(slope, (int, float)) or slope <= 0:
        return
    forward = kernel.reader(source, "aten.leaky_relu.default")
    output = None if forward is None else kernel.reference(forward.outputs[0])
    if forward is None or output is None or (forward.args[1] if len(forward.args) > 1 else 0.01) != slope:
        return
    is_result = True
    from_output = kernel.implement("from_output", args=(gradient, output, slope, is_result))
    yield from_output
    assert from_output.call is not None
    for implementation in in_place(replace(kernel, call=from_output.call)):
        yield replace(implementation, name="from_output_inplace")
