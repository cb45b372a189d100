"""Softmax and its gradient in place, along the last dimension.

Both go row by row. The maximum and the sum of a row are known before the first element of its result is written,
and each element then depends on the same element of the operands. Torch's kernels
that write into a given tensor take it for contiguous, whatever its strides (2.13), so no other is given to them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from monetlite.core.graph import Call, Implementation
from monetlite.operators.implementations import TracedKernel, alternatives_for, function
from monetlite.operators.strides import is_contiguous

_KERNELS = (
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten._softmax_backward_data.default",
    "aten._log_softmax_backward_data.default",
)
_KEYWORD = {"aten._softmax_backward_data.default": "grad_input"}
_DIM = {"aten._softmax_backward_data.default": 2, "aten._log_softmax_backward_data.default": 2}


@alternatives_for(*_KERNELS)
def in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The result over the first operand: the input, or the gradient that comes in."""
    target, operand = kernel.call.target, kernel.args[0]
    overwrites = kernel.over(operand)
    if not overwrites or not is_contiguous(operand.spec):
        return
    dim, dimensions = kernel.args[_DIM.get(target, 1)], len(operand.spec.shape)
    if dimensions and dim % dimensions == dimensions - 1:
        yield kernel.implement("inplace", softmax_, args=(target, *kernel.call.args), overwrites=overwrites)


def _whole_call(call: Call) -> Call:
    target, *args = call.args
    assert isinstance(target, str)
    return replace(call, target=target, args=tuple(args))


@function("softmax_", like=_whole_call)
def softmax_(kernel: str, operand: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A softmax, its logarithm, or the gradient of either, over its first operand; `kernel` is torch's for it."""
    namespace, name, _ = kernel.split(".")
    run = getattr(getattr(torch.ops, namespace), name)
    if not operand.is_contiguous():
        return operand.copy_(run.default(operand, *rest))
    run.out(operand, *rest, **{_KEYWORD.get(kernel, "out"): operand})
    return operand
