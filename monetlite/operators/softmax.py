"""Softmax and its gradient in place, along the last dimension.

Both go row by row: what a row's result needs of all of the row (its maximum, its sum) is known before the first
element of the result is written, and each element then depends on the same element of the operands.
"""

from collections.abc import Iterator

from monetlite.graph import Implementation, TensorRef
from monetlite.operators.kernel import Kernel
from monetlite.operators.registry import alternatives_for

_OUT = {
    "aten._softmax.default": "aten._softmax.out",
    "aten._log_softmax.default": "aten._log_softmax.out",
    "aten._softmax_backward_data.default": "aten._softmax_backward_data.out",
    "aten._log_softmax_backward_data.default": "aten._log_softmax_backward_data.out",
}
_KEYWORD = {"aten._softmax_backward_data.default": "grad_input"}
_DIM = {"aten._softmax_backward_data.default": 2, "aten._log_softmax_backward_data.default": 2}


@alternatives_for(*_OUT)
def in_place(kernel: Kernel) -> Iterator[Implementation]:
    """The result over the first operand: the input, or the gradient that comes in."""
    target, operand = kernel.call.target, kernel.call.args[0] if kernel.call.args else None
    overwrites = kernel.over(operand)
    if not isinstance(operand, TensorRef) or not overwrites:
        return
    dim = kernel.call.args[_DIM.get(target, 1)]
    dimensions = len(operand.spec.shape)
    if isinstance(dim, int) and dimensions and dim % dimensions == dimensions - 1:
        yield kernel.implement(
            "inplace",
            target=_OUT[target],
            kwargs=(*kernel.call.kwargs, (_KEYWORD.get(target, "out"), operand)),
            overwrites=overwrites,
        )
