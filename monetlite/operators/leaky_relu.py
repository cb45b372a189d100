"""Leaky ReLU: its gradient from the output.

For a positive slope the output has the sign of the input (or is a zero of it), and the kernel only asks whether
its operand is above zero: the gradient has the same bits from either.
"""

from collections.abc import Iterator

from monetlite.core.graph import Implementation
from monetlite.operators.elementwise import with_in_place
from monetlite.operators.implementations import TracedKernel, alternatives_for


@alternatives_for("aten.leaky_relu_backward.default")
def backward_from_output(kernel: TracedKernel) -> Iterator[Implementation]:
    """`leaky_relu_backward` with the output in place of the input."""
    gradient, source, slope, _ = kernel.args
    found = kernel.reader(source, "aten.leaky_relu.default")
    if found is None or slope <= 0:
        return
    forward, output = found
    is_result = True
    if (forward.args[1] if len(forward.args) > 1 else 0.01) == slope:
        args = (gradient, output, slope, is_result)
        yield from with_in_place(kernel, kernel.implement("from_output", args=args))
