"""The functions that calls of cuDNN's plans name: convolutions and their gradients, given plain data."""

import warnings
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from monetlite.core.graph import Argument, Call, TensorRef, TensorSpec
from monetlite.operators.cudnn.execution import ALIGNMENT_BYTES, run
from monetlite.operators.cudnn.work import ConvolutionWork, Layout
from monetlite.operators.implementations import function


def described(work: ConvolutionWork) -> tuple[Argument, ...]:
    """Work as arguments of a call: its fields in order."""
    return tuple(getattr(work, item.name) for item in fields(work))


def work_of(description: Sequence[Any]) -> ConvolutionWork:
    """The reverse of `described`, also of arguments that have become lists on the way."""
    values: dict[str, Any] = {
        item.name: tuple(value) if isinstance(value, list) else value
        for item, value in zip(fields(ConvolutionWork), description, strict=True)
    }
    return ConvolutionWork(**values)


def _like(call: Call) -> Call:
    """The convolution of PyTorch's own that does the same."""
    _, first, second, third, *description = call.args
    work = work_of(description)
    geometry = (work.stride, work.padding, work.dilation)
    args: tuple[Argument, ...]
    if work.role == "forward":
        args = (first, second, third, *geometry, False, (0,) * len(work.stride), work.groups)
        return Call(target="aten.convolution.default", args=args, outputs=call.outputs)
    if work.role == "input_gradient":
        # A transposed convolution, which needs no image.
        args = (first, second, None, *geometry, True, work.beyond, work.groups)
        return Call(target="aten.convolution.default", args=args, outputs=call.outputs[:1])
    shape, stride = work.weight
    weight = TensorRef(node="weight", value=None, spec=TensorSpec(shape=shape, stride=stride, dtype=work.dtype))
    mask = (False, True, bool(third))
    args = (second, first, weight, None, *geometry, False, (0,) * len(work.stride), work.groups, mask)
    return Call(target="aten.convolution_backward.default", args=args, outputs=call.outputs)


@function("cudnn_convolution", like=_like)
def cudnn_convolution(
    plan_name: str, first: Tensor, second: Tensor, third: Tensor | bool | None, *description: Any
) -> tuple[Tensor | None, ...]:
    """Do a convolution, or one of its gradients, by a plan.

    `first` and `second` are as for `run`; `third` is the bias or None (forward), None (input_gradient), or whether
    the bias's gradient is wanted (weight_gradient). The results are those of PyTorch's own operator, by position:
    of `convolution` one, of `convolution_backward` three, with None for those that this is not about.

    Raises:
        ConvolutionError, DeviceError, CudnnMissing, CudnnError: as `run` does.
    """
    work = work_of(description)
    operands = (_laid_out(tensor, layout) for tensor, layout in zip((first, second), work.operands, strict=True))
    made = run(work, plan_name, *operands)
    if work.role == "forward":
        if isinstance(third, Tensor):
            made.add_(third.view(-1, *[1] * len(work.stride)))
        return (made,)
    if work.role == "input_gradient":
        return made, None, None
    return None, made, second.sum((0, *range(2, second.dim()))) if third else None


@function("convolution_backward_unread")
def convolution_backward_unread(
    gradient: Tensor, image: Tensor | Layout, weight: Tensor | Layout, *rest: Any
) -> tuple[Tensor | None, ...]:
    """`convolution_backward` where the image or the weight is given by its shape and strides alone.

    The gradient for one of the two needs no more of it; memory of that size is allocated meanwhile.
    """
    operands = [item if isinstance(item, Tensor) else gradient.new_empty_strided(*item) for item in (image, weight)]
    results: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward.default(gradient, *operands, *rest)
    return results


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor as a plan needs it: itself, or a copy where capture described it otherwise than it turns out to be.

    Torch's fake tensors have other strides than real ones after a few kernels, and a person's input may be part of
    a larger tensor.
    """
    shape, stride = layout
    there = all(
        size == 1 or step == wanted for size, step, wanted in zip(shape, tensor.stride(), stride, strict=False)
    )
    if tuple(tensor.shape) != shape or (there and tensor.data_ptr() % ALIGNMENT_BYTES == 0):
        return tensor
    warnings.warn(
        f"an operand of a cuDNN plan, of shape {shape}, has strides {tensor.stride()} and starts "
        f"{tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of {ALIGNMENT_BYTES}; planned were strides "
        f"{stride} and aligned memory. It is copied at every step, which adds its size to the workspace",
        stacklevel=2,
    )
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
