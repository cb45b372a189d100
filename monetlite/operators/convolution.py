"""Convolution: its backward pass as two operators, and other ways to run each part on a CPU.

The weight gradient reads the input; the input gradient reads the weight. Apart, each can be scheduled and
implemented on its own, and the input is dropped before the input gradient is made.

On a CPU, contiguous images are copied into the library's blocked layout and back, which takes as much again as
the images themselves. Other ways to run the same sums:

- `channels_last`: images converted, then run in the layout that the library needs no copies for;
- `chunks2`, `chunks4`: a part of the batch at a time into a result that is there already;
- `matmul`: a 1×1 convolution is a matrix product for each image, without any copy;
- `unfold`: for large weights on small images, a matrix product with the image's patches (im2col, Chellapilla et
  al., 2006), so that no copy of the weight is made.

They add the same terms in another order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monetlite.core.graph import Argument, Call, Implementation, TensorRef, TensorSpec
from monetlite.fx.call_encoding import each_dimension
from monetlite.operators.convolution_kernels import (
    BACKWARD,
    FORWARD,
    convolve_channels_last,
    convolve_chunks,
    convolve_unfolded,
    input_gradient_unfolded,
    multiply,
    multiply_transposed,
    output_padding,
    weight_gradient_channels_last,
    weight_gradient_chunks,
    weight_gradient_multiplied,
    weight_gradient_unfolded,
)
from monetlite.operators.implementations import TracedKernel, alternatives_for, returns_tuple
from monetlite.operators.strides import is_channels_last, is_contiguous, suggests_channels_last

TOLERANCE = 1e-5
"""Of sums in float32 in another order, as a fraction of the largest sum of the terms' magnitudes."""

Pair = tuple[int, int]


def split_backward(call: Call) -> Iterator[tuple[str, Call]]:
    """The weight (and bias) gradient, then the input gradient, as far as each is needed."""
    if call.target != BACKWARD:
        yield "", call
        return
    names = call.outputs
    for suffix, wanted in (("_weight", (False, True, True)), ("_input", (True, False, False))):
        mask = tuple(want and name is not None for want, name in zip(wanted, names, strict=True))
        if any(mask):
            outputs = tuple(name if want else None for want, name in zip(mask, names, strict=True))
            yield suffix, replace(call, args=(*call.args[:-1], mask), outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class _Shapes:
    """The sizes of a two-dimensional convolution, by which its other ways apply or don't."""

    image: TensorSpec
    weight: TensorSpec
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def pointwise(self) -> bool:
        """Each result is of one point of the image alone, and of all of its channels."""
        return self.weight.shape[2:] == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0) and self.whole

    @property
    def whole(self) -> bool:
        return self.groups == 1

    @property
    def weight_is_large(self) -> bool:
        """A copy of the weight takes more than the patches of one image."""
        patches = math.prod(self.weight.shape[1:]) * math.prod(self.image.shape[2:]) // math.prod(self.stride)
        return math.prod(self.weight.shape) > patches


@alternatives_for(FORWARD)
def forward(kernel: TracedKernel) -> Iterator[Implementation]:
    """Other ways to run a convolution on a CPU."""
    image, weight, bias, *geometry = kernel.call.args
    geometry = _spread(image, geometry)
    shapes, result = _shapes(image, weight, geometry), kernel.results[0]
    if shapes is None or result is None or not is_contiguous(result):
        return
    args: tuple[Argument, ...] = (image, weight, bias, *geometry)
    yield from _offered(kernel, convolve_channels_last, convolve_chunks, args, shapes)
    if shapes.pointwise:
        yield _way(kernel, "matmul", multiply, (image, weight, bias))
    elif shapes.whole and shapes.weight_is_large:
        yield _way(kernel, "unfold", convolve_unfolded, (image, weight, bias, *geometry[:3]))


@alternatives_for(BACKWARD)
def input_gradient(kernel: TracedKernel) -> Iterator[Implementation]:
    """The input gradient as a transposed convolution, which does not read the input; and other ways on a CPU.

    It is the same sum. Without groups cuDNN runs it by the same kernel; on a CPU, oneDNN mostly does, but for small
    batches and few channels not always. With groups, and in float64, nothing is promised, except for depthwise
    convolutions of contiguous images on a CPU.
    """
    gradient, image, weight, _, *geometry, mask = kernel.call.args
    geometry = _spread(image, geometry)
    result = kernel.results[0]
    if mask != (True, False, False) or geometry[3] is not False or result is None:
        return
    assert isinstance(gradient, TensorRef)
    assert isinstance(image, TensorRef)
    assert isinstance(weight, TensorRef)
    if not same_order(gradient.spec, image.spec, result) or not is_contiguous(weight.spec):
        return
    if 0 in gradient.spec.shape:
        return
    stride, padding, dilation, _, _, groups = geometry
    extra = output_padding(
        image.spec.shape[2:], weight.spec.shape[2:], stride, padding, dilation, gradient.spec.shape[2:]
    )
    args = (gradient, weight, None, stride, padding, dilation, True, extra, groups)
    depthwise = is_contiguous(image.spec) and weight.spec.shape[1] == 1
    dtype = gradient.spec.dtype
    ways: tuple[tuple[str, float, tuple[str, ...]], ...] = (("transposed", TOLERANCE, ()),)
    if dtype != "float64" and groups == 1:
        ways = (("transposed", 0.0, ("cuda",)), ("transposed_reordered", TOLERANCE, ("cpu",)))
    elif dtype != "float64" and depthwise:
        ways = (("transposed", 0.0, ("cpu",)),)
    for name, tolerance, devices in ways:
        if tolerance == 0.0 or dtype in ("float32", "float64"):
            yield kernel.implement(
                name,
                FORWARD,
                args=args,
                outputs=kernel.call.outputs[:1],
                tolerance=tolerance,
                devices=devices,
            )
    shapes = _shapes(image, weight, geometry)
    if shapes is None or not is_contiguous(gradient.spec):
        return
    yield from _offered(kernel, convolve_channels_last, convolve_chunks, args, shapes)
    if shapes.pointwise:
        yield _way(kernel, "matmul", multiply_transposed, (gradient, weight))
    elif shapes.whole and shapes.weight_is_large:
        shape = image.spec.shape
        yield _way(kernel, "unfold", input_gradient_unfolded, (gradient, weight, shape, stride, padding, dilation))


@alternatives_for(BACKWARD)
def weight_gradient(kernel: TracedKernel) -> Iterator[Implementation]:
    """Other ways to run the gradients for weight and bias on a CPU."""
    gradient, image, weight, _, *geometry, mask = kernel.call.args
    geometry = _spread(image, geometry)
    shapes = _shapes(image, weight, geometry)
    if shapes is None or not isinstance(mask, tuple) or mask[0] or not isinstance(gradient, TensorRef):
        return
    if not is_contiguous(gradient.spec):
        return
    yield from _offered(kernel, weight_gradient_channels_last, weight_gradient_chunks, kernel.call.args, shapes)
    rest = (gradient, image, shapes.weight.shape, mask)
    if shapes.pointwise:
        yield _way(kernel, "matmul", weight_gradient_multiplied, rest)
    elif shapes.whole and shapes.weight_is_large:
        yield _way(kernel, "unfold", weight_gradient_unfolded, (*rest, *geometry[:3]))


def _spread(image: Argument, geometry: Sequence[Argument]) -> list[Argument]:
    """The arguments with a stride, padding and dilation for each dimension, where one stands for all of them."""
    assert isinstance(image, TensorRef)
    dimensions = len(image.spec.shape) - 2
    return [each_dimension(item, dimensions) if at < 3 else item for at, item in enumerate(geometry)]


def same_order(*images: TensorSpec) -> bool:
    """Tell whether dense images all are row by row, or all channels-last, also as torch's kernels take them."""
    if not any(all(map(order, images)) for order in (is_contiguous, is_channels_last)):
        return False
    return len({suggests_channels_last(image.shape, image.stride) for image in images}) == 1


def _offered(
    kernel: TracedKernel,
    channels_last: Callable[..., Any],
    chunks: Callable[..., Any],
    args: tuple[Argument, ...],
    shapes: _Shapes,
) -> Iterator[Implementation]:
    yield _way(kernel, "channels_last", channels_last, args)
    for count in (2, 4):
        if shapes.image.shape[0] >= 2 * count:
            yield _way(kernel, f"chunks{count}", chunks, (*args, count), devices=())


def _way(
    kernel: TracedKernel,
    name: str,
    run: Callable[..., Any],
    args: tuple[Argument, ...],
    devices: tuple[str, ...] = ("cpu",),
) -> Implementation:
    outputs = kernel.call.outputs if returns_tuple(run) else tuple(filter(None, kernel.call.outputs))
    return kernel.implement(name, run, args=args, kwargs=(), outputs=outputs, tolerance=TOLERANCE, devices=devices)


def _shapes(image: Argument, weight: Argument, geometry: list[Argument]) -> _Shapes | None:
    """The shapes of a two-dimensional convolution of contiguous images; None for any other."""
    stride, padding, dilation, transposed, _, groups = geometry
    if transposed is not False or not isinstance(image, TensorRef) or not isinstance(weight, TensorRef):
        return None
    if len(image.spec.shape) != 4 or image.spec.dtype != "float32" or not is_contiguous(image.spec):
        return None
    assert isinstance(groups, int)
    if not is_contiguous(weight.spec) or 0 in image.spec.shape:
        return None
    return _Shapes(
        image=image.spec,
        weight=weight.spec,
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        groups=groups,
    )


def _pair(sizes: Any) -> Pair:
    return int(sizes[0]), int(sizes[-1])
