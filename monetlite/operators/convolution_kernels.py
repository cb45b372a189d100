"""Calls of convolutions, and functions of other ways to run them on a CPU; `convolution` says which apply where.

The functions take contiguous images of two dimensions, (batch, channels, height, width), and contiguous weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import sub
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import fold, unfold

from monetlite.core.graph import Argument, Call, TensorRef
from monetlite.fx.call_encoding import each_dimension
from monetlite.operators.implementations import function, slices
from monetlite.operators.strides import is_contiguous

FORWARD = "aten.convolution.default"
BACKWARD = "aten.convolution_backward.default"

_Columns: TypeAlias = Callable[[Tensor], Tensor]
"""Makes a matrix of an image, which stands only as long as it is multiplied."""


class ConvolutionCall(NamedTuple):
    """A call of torch's convolution or of its gradients: its arguments in their order, by name.

    Attributes:
        gradient: of the result; None for the convolution itself.
        image, weight: the operands of the convolution.
        bias: of the convolution; of gradients, its size.
        stride, padding, dilation: a number for each dimension of space.
        transposed, output_padding, groups: as torch takes them.
        wanted: the gradients to compute, of (image, weight, bias).
    """

    gradient: TensorRef | None
    image: TensorRef
    weight: TensorRef
    bias: Argument
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: Argument
    groups: int
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, call: Call) -> "ConvolutionCall":
        """Read a call of `FORWARD` or `BACKWARD`."""
        args: Any = (None, *call.args, ()) if call.target == FORWARD else call.args
        gradient, image, weight, bias, *sizes, transposed, output_padding, groups, wanted = args
        stride, padding, dilation = (each_dimension(item, len(image.spec.shape) - 2) for item in sizes)
        rest = (transposed, output_padding, groups, wanted)
        return cls(gradient, image, weight, bias, stride, padding, dilation, *rest)

    @property
    def geometry(self) -> tuple[Argument, ...]:
        """The arguments after the bias, without the gradients to compute."""
        return self[4:10]

    @property
    def result_size(self) -> tuple[int, ...]:
        """Points of the convolution's result along each dimension of space."""
        image, window = self.image.spec.shape[2:], self.weight.spec.shape[2:]
        if not self.transposed:
            return result_size(image, window, *self.geometry[:3])
        extra = each_dimension(self.output_padding, len(image))
        return tuple(map(sum, zip(transposed_size(image, window, *self.geometry[:3]), extra, strict=True)))

    @property
    def contiguous_float32(self) -> bool:
        """Tell whether it is of contiguous two-dimensional images in float32, and not transposed."""
        image = self.image.spec
        plain = not self.transposed and len(image.shape) == 4 and image.dtype == "float32"
        return plain and 0 not in image.shape and is_contiguous(image) and is_contiguous(self.weight.spec)

    @property
    def pointwise(self) -> bool:
        """Each result is of one point of the image alone, and of all of its channels."""
        kernel = self.weight.spec.shape[2:]
        return kernel == self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1

    @property
    def weight_is_large(self) -> bool:
        """A copy of the weight takes more than the patches of one image."""
        weight, image = self.weight.spec.shape, self.image.spec.shape
        return math.prod(weight) > math.prod(weight[1:]) * math.prod(image[2:]) // math.prod(self.stride)


def _default(call: Call) -> Call:
    """The call that this one stands for: without the number of chunks."""
    is_forward = len(call.outputs) == 1
    return replace(call, target=FORWARD if is_forward else BACKWARD, args=call.args[: 9 if is_forward else 11])


@function("convolve_channels_last", like=_default)
def convolve_channels_last(image: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """A convolution in channels-last, of contiguous images and with a contiguous result."""
    result: Tensor = torch.ops.aten.convolution.default(_last(image), _last(weight), *rest).contiguous()
    return result


def _count(call: Call) -> Any:
    """The number of chunks."""
    return call.args[-1]


@function("convolve_chunks", like=_default, parts=_count)
def convolve_chunks(image: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """A convolution of part of the batch at a time; the last argument is the number of parts."""
    *geometry, count = rest
    result: Tensor | None = None
    for part in slices(len(image), -(-len(image) // count)):
        made = torch.ops.aten.convolution.default(image[part], weight, *geometry)
        if result is None:
            result = made.new_empty(len(image), *made.shape[1:])
        result[part] = made
        del made
    assert result is not None
    return result


@function("convolve_pointwise", like=lambda call: replace(call, target="aten.bmm.default"))
def multiply(image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1×1 convolution as a matrix product for each image."""
    result = image.new_empty(len(image), len(weight), *image.shape[2:])
    return _products(image, _points, weight.flatten(1), bias, result)


@function("convolve_unfolded")
def convolve_unfolded(
    image: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """A convolution as a matrix product with the patches of one image at a time."""
    size = result_size(image.shape[2:], weight.shape[2:], stride, padding, dilation)
    result = image.new_empty(len(image), len(weight), *size)
    return _products(image, _patches(weight.shape, stride, padding, dilation), weight.flatten(1), bias, result)


def _points(image: Tensor) -> Tensor:
    """The points of an image of shape (channels, height, width) as columns."""
    return image.flatten(1)


def _patches(weight: Sequence[int], stride: Any, padding: Any, dilation: Any) -> _Columns:
    """A function that makes the patches of an image columns, for a weight of some shape."""
    return lambda image: unfold(image, (weight[2], weight[3]), dilation, padding, stride)


def _products(images: Tensor, columns: _Columns, matrix: Tensor, bias: Tensor | None, result: Tensor) -> Tensor:
    """Write the products of the weight's matrix with the columns of each image."""
    for image, target in zip(images, result.flatten(2), strict=True):
        if bias is None:
            torch.mm(matrix, columns(image), out=target)
        else:
            torch.addmm(bias[:, None], matrix, columns(image), out=target)
    return result


@function("weight_gradient_channels_last", like=_default)
def weight_gradient_channels_last(
    gradient: Tensor, image: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """The gradients for weight and bias in channels-last, from contiguous tensors."""
    made = torch.ops.aten.convolution_backward.default(_last(gradient), _last(image), _last(weight), *rest)
    return tuple(item.contiguous() if wanted else None for item, wanted in zip(made, rest[-1], strict=True))


@function("weight_gradient_chunks", like=_default, parts=_count)
def weight_gradient_chunks(
    gradient: Tensor, image: Tensor, weight: Tensor, *rest: Any
) -> tuple[None, Tensor | None, Tensor | None]:
    """The gradients for weight and bias, summed over parts of the batch; the last argument is their number."""
    *geometry, count = rest
    for_weight = for_bias = None
    for part in slices(len(image), -(-len(image) // count)):
        _, of_weight, of_bias = torch.ops.aten.convolution_backward.default(
            gradient[part], image[part], weight, *geometry
        )
        for_weight = of_weight if for_weight is None else for_weight.add_(of_weight)
        for_bias = of_bias if for_bias is None or of_bias is None else for_bias.add_(of_bias)
        del of_weight, of_bias  # before the next ones are made
    return None, for_weight, for_bias


@function("convolve_pointwise_transposed", like=lambda call: replace(call, target="aten.bmm.default"))
def multiply_transposed(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a 1×1 convolution for its image."""
    result = gradient.new_empty(len(gradient), weight.shape[1], *gradient.shape[2:])
    return _products(gradient, _points, weight.flatten(1).t(), None, result)


@function("input_gradient_unfolded")
def input_gradient_unfolded(
    gradient: Tensor, weight: Tensor, shape: list[int], stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """The gradient of a convolution for an image of some shape, one image at a time."""
    result = gradient.new_empty(shape)
    matrix = weight.flatten(1).t()
    for number in range(len(gradient)):
        patches = torch.mm(matrix, gradient[number].flatten(1))
        result[number] = fold(patches, (shape[2], shape[3]), weight.shape[2:], dilation, padding, stride)
    return result


@function("weight_gradient_pointwise")
def weight_gradient_multiplied(
    gradient: Tensor, image: Tensor, shape: list[int], mask: list[bool]
) -> tuple[None, Tensor | None, Tensor | None]:
    """The gradients of a 1×1 convolution for weight and bias, summed image by image."""
    return _summed_products(image, _points, gradient, shape, mask)


@function("weight_gradient_unfolded")
def weight_gradient_unfolded(
    gradient: Tensor, image: Tensor, shape: list[int], mask: list[bool], *geometry: Any
) -> tuple[None, Tensor | None, Tensor | None]:
    """The gradients of a convolution for weight and bias, from the patches of one image at a time."""
    stride, padding, dilation = geometry
    return _summed_products(image, _patches(shape, stride, padding, dilation), gradient, shape, mask)


def _summed_products(
    images: Tensor, columns: _Columns, gradient: Tensor, shape: list[int], mask: list[bool]
) -> tuple[None, Tensor | None, Tensor | None]:
    """The gradients for a weight of some shape, summed over the columns of each image, and for the bias."""
    total = gradient.new_zeros(shape[0], shape[1] * shape[2] * shape[3])
    for image, of_result in zip(images, gradient.flatten(2), strict=True):
        total.addmm_(of_result, columns(image).t())
    return None, total.view(shape) if mask[1] else None, gradient.sum((0, 2, 3)) if mask[2] else None


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def result_size(
    image: Sequence[int], window: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...]:
    """Points of a convolution's result along each dimension of space."""
    return tuple(
        (size + 2 * pad - dilate * (points - 1) - 1) // step + 1
        for size, points, step, pad, dilate in zip(image, window, stride, padding, dilation, strict=True)
    )


def transposed_size(
    image: Sequence[int], window: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> tuple[int, ...]:
    """Points of a transposed convolution's result along each dimension of space, without output padding."""
    return tuple(
        (size - 1) * step - 2 * pad + dilate * (points - 1) + 1
        for size, points, step, pad, dilate in zip(image, window, stride, padding, dilation, strict=True)
    )


def output_padding(image: Sequence[int], window: Sequence[int], *geometry: Any) -> tuple[int, ...]:
    """Points that a transposed convolution of the results has to add to reach the size of the image.

    `geometry` is stride, padding, dilation, and the size of the results.
    """
    *sizes, result = geometry
    return tuple(map(sub, image, transposed_size(result, window, *sizes)))
