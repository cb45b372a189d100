"""Functions of the other ways to run a convolution on a CPU; `convolution` says which of them apply where.

All take contiguous images of two dimensions, (batch, channels, height, width), and contiguous weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import fold, unfold

from monetlite.core.graph import Call
from monetlite.operators.implementations import function

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"


def _default(call: Call) -> Call:
    """The call that this one stands for: without the number of chunks."""
    is_forward = len(call.outputs) == 1
    return replace(call, target=FORWARD if is_forward else BACKWARD, args=call.args[: 9 if is_forward else 11])


@function("convolve_channels_last", like=_default)
def convolve_channels_last(image: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A convolution in channels-last, of contiguous images and with a contiguous result."""
    result: torch.Tensor = torch.ops.aten.convolution.default(_last(image), _last(weight), *rest).contiguous()
    return result


def _count(call: Call) -> int:
    """The number of chunks."""
    count = call.args[-1]
    assert isinstance(count, int)
    return count


@function("convolve_chunks", like=_default, parts=_count)
def convolve_chunks(image: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A convolution of part of the batch at a time; the last argument is the number of parts."""
    *geometry, count = rest
    result: torch.Tensor | None = None
    for part in _parts(len(image), count):
        made = torch.ops.aten.convolution.default(image[part], weight, *geometry)
        if result is None:
            result = made.new_empty(len(image), *made.shape[1:])
        result[part] = made
        del made
    assert result is not None
    return result


@function("convolve_pointwise", like=lambda call: replace(call, target="aten.bmm.default"))
def multiply(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A 1×1 convolution as a matrix product for each image."""
    result = image.new_empty(len(image), len(weight), *image.shape[2:])
    return _products(image.flatten(2), weight, bias, result)


@function("convolve_unfolded")
def convolve_unfolded(
    image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, dilation: Any
) -> torch.Tensor:
    """A convolution as a matrix product with the patches of one image at a time."""
    size = result_size(image.shape[2:], weight.shape[2:], stride, padding, dilation)
    patches = (unfold(item, weight.shape[2:], dilation, padding, stride) for item in image)
    return _products(patches, weight, bias, image.new_empty(len(image), len(weight), *size))


def _products(
    columns: Iterable[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor
) -> torch.Tensor:
    """Write the products of a weight with a matrix for each image."""
    matrix = weight.flatten(1)
    for source, target in zip(columns, result.flatten(2), strict=True):
        if bias is None:
            torch.mm(matrix, source, out=target)
        else:
            torch.addmm(bias[:, None], matrix, source, out=target)
    return result


@function("weight_gradient_channels_last", like=_default)
def weight_gradient_channels_last(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gradients for weight and bias in channels-last, from contiguous tensors."""
    made = torch.ops.aten.convolution_backward.default(_last(gradient), _last(image), _last(weight), *rest)
    return tuple(item.contiguous() if wanted else None for item, wanted in zip(made, rest[-1], strict=True))


@function("weight_gradient_chunks", like=_default, parts=_count)
def weight_gradient_chunks(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients for weight and bias, summed over parts of the batch; the last argument is their number."""
    *geometry, count = rest
    for_weight = for_bias = None
    for part in _parts(len(image), count):
        _, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
            gradient[part], image[part], weight, *geometry
        )
        for_weight = of_weight if for_weight is None else for_weight.add_(of_weight)
        for_bias = of_bias if for_bias is None or of_bias is None else for_bias.add_(of_bias)
    return None, for_weight, for_bias


@function("convolve_pointwise_transposed", like=lambda call: replace(call, target="aten.bmm.default"))
def multiply_transposed(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a 1×1 convolution for its image."""
    result = gradient.new_empty(len(gradient), weight.shape[1], *gradient.shape[2:])
    matrix = weight.flatten(1).t()
    for source, target in zip(gradient.flatten(2), result.flatten(2), strict=True):
        torch.mm(matrix, source, out=target)
    return result


@function("input_gradient_unfolded")
def input_gradient_unfolded(
    gradient: torch.Tensor, weight: torch.Tensor, shape: list[int], stride: Any, padding: Any, dilation: Any
) -> torch.Tensor:
    """The gradient of a convolution for an image of some shape, one image at a time."""
    result = gradient.new_empty(shape)
    matrix = weight.flatten(1).t()
    for number in range(len(gradient)):
        patches = torch.mm(matrix, gradient[number].flatten(1))
        result[number] = fold(patches, (shape[2], shape[3]), weight.shape[2:], dilation, padding, stride)
    return result


@function("weight_gradient_pointwise")
def weight_gradient_multiplied(
    gradient: torch.Tensor, image: torch.Tensor, shape: list[int], mask: list[bool]
) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a 1×1 convolution for weight and bias, summed image by image."""
    return _summed_products(image.flatten(2), gradient, shape, mask)


@function("weight_gradient_unfolded")
def weight_gradient_unfolded(
    gradient: torch.Tensor, image: torch.Tensor, shape: list[int], mask: list[bool], *geometry: Any
) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a convolution for weight and bias, from the patches of one image at a time."""
    stride, padding, dilation = geometry
    patches = (unfold(item, (shape[2], shape[3]), dilation, padding, stride) for item in image)
    return _summed_products(patches, gradient, shape, mask)


def _summed_products(
    columns: Iterable[torch.Tensor], gradient: torch.Tensor, shape: list[int], mask: list[bool]
) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients for a weight of some shape, summed over a matrix for each image, and for the bias."""
    total = gradient.new_zeros(shape[0], shape[1] * shape[2] * shape[3])
    for of_result, source in zip(gradient.flatten(2), columns, strict=True):
        total.addmm_(of_result, source.t())
    return None, total.view(shape) if mask[1] else None, gradient.sum((0, 2, 3)) if mask[2] else None


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _parts(size: int, count: int) -> Iterator[slice]:
    step = -(-size // count)
    for start in range(0, size, step):
        yield slice(start, start + step)


def result_size(
    image: Sequence[int], window: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...]:
    """Points of a convolution's result along each dimension of space."""
    return tuple(
        (size + 2 * pad - dilate * (points - 1) - 1) // step + 1
        for size, points, step, pad, dilate in zip(image, window, stride, padding, dilation, strict=True)
    )


def output_padding(
    image: Sequence[int], window: Sequence[int], stride: Any, padding: Any, dilation: Any, result: Sequence[int]
) -> tuple[int, ...]:
    """Points that a transposed convolution of the results has to add to reach the size of the image."""
    return tuple(
        size - ((points - 1) * step - 2 * pad + dilate * (width - 1) + 1)
        for size, width, step, pad, dilate, points in zip(
            image, window, stride, padding, dilation, result, strict=True
        )
    )
