"""ReLU: its gradient from the output, or from the input.

`threshold_backward` passes the gradient on where its second operand is above zero. relu(x) > 0 exactly where
x > 0, and a NaN stays a NaN, so the mask is the same from either, bit for bit. Which of the two is in memory
at that point is for the solver to choose.
"""

from collections.abc import Iterator
from dataclasses import replace

from monetlite.graph import Implementation, TensorRef
from monetlite.operators.elementwise import in_place
from monetlite.operators.kernel import Kernel


def backward_from_input(kernel: Kernel) -> Iterator[Implementation]:
    """`threshold_backward` with the input of the ReLU in place of its output."""
    if kernel.call.target != "aten.threshold_backward.default" or kernel.call.args[2] != 0:
        return
    gradient, output = kernel.call.args[0], kernel.call.args[1]
    if not isinstance(output, TensorRef) or output.value is None:
        return
    forward = kernel.writer_call(output.value)
    if forward is None or forward.target != "aten.relu.default":
        return
    source = forward.args[0]
    if not isinstance(source, TensorRef) or source.value is None or source.spec.shape != output.spec.shape:
        return
    from_input = kernel.implement("from_input", args=(gradient, source, *kernel.call.args[2:]))
    yield from_input
    assert from_input.call is not None
    for implementation in in_place(replace(kernel, call=from_input.call)):
        yield replace(implementation, name="from_input_inplace")
