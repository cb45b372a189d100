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

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from monetlite.core.graph import Argument, Call, Implementation, Operator, OperatorGraph, TensorSpec
from monetlite.operators.convolution_kernels import (
    BACKWARD,
    FORWARD,
    ConvolutionCall,
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
TF32_TOLERANCE = 2e-3
"""With TF32: either of two algorithms may round both factors of every product to 10 bits."""


def in_tf32(graph: OperatorGraph) -> OperatorGraph:
    """A step on a GPU that convolves in TF32, where another algorithm may round otherwise than the default."""

    def rounded(operator: Operator) -> Operator:
        call = operator.implementations[0].call
        if call is None or call.target not in (FORWARD, BACKWARD):
            return operator
        if ConvolutionCall.of(call).image.spec.dtype != "float32":
            return operator
        ways = (
            replace(item, tolerance=max(item.tolerance, TF32_TOLERANCE)) if item.tolerance else item
            for item in operator.implementations
        )
        return replace(operator, implementations=tuple(ways))

    return replace(graph, operators=tuple(map(rounded, graph.operators)))


def split_backward(call: Call) -> Iterator[tuple[str, Call]]:
    """The weight (and bias) gradient, then the input gradient, where needed: (suffix of the name, call)."""
    if call.target != BACKWARD:
        yield "", call
        return
    names = call.outputs
    for suffix, wanted in (("_weight", (False, True, True)), ("_input", (True, False, False))):
        mask = tuple(want and name is not None for want, name in zip(wanted, names, strict=True))
        if any(mask):
            outputs = tuple(name if want else None for want, name in zip(mask, names, strict=True))
            yield suffix, replace(call, args=(*call.args[:-1], mask), outputs=outputs)


@alternatives_for(FORWARD)
def forward(kernel: TracedKernel) -> Iterator[Implementation]:
    """Other ways to run a convolution on a CPU."""
    call, result = ConvolutionCall.of(kernel.call), kernel.results[0]
    if result is None or not is_contiguous(result):
        return
    args = (call.image, call.weight, call.bias)
    runs = (convolve_channels_last, convolve_chunks, multiply, convolve_unfolded)
    yield from _ways(kernel, call, runs, (*args, *call.geometry), args, (*args, *call.geometry[:3]))


@alternatives_for(BACKWARD)
def input_gradient(kernel: TracedKernel) -> Iterator[Implementation]:
    """The input gradient as a transposed convolution, which does not read the input; and other ways on a CPU.

    It is the same sum. Without groups cuDNN runs it by the same kernel; on a CPU, oneDNN mostly does, but for small
    batches and few channels not always. With groups, and in float64, nothing is promised, except for depthwise
    convolutions of contiguous images on a CPU.
    """
    call, result = ConvolutionCall.of(kernel.call), kernel.results[0]
    if call.wanted != (True, False, False) or call.transposed or result is None or call.gradient is None:
        return
    gradient, image, weight = call.gradient.spec, call.image.spec, call.weight.spec
    if not same_order(gradient, image, result) or not is_contiguous(weight) or 0 in gradient.shape:
        return
    stride, padding, dilation, *_ = call.geometry
    extra = output_padding(image.shape[2:], weight.shape[2:], stride, padding, dilation, gradient.shape[2:])
    args = (call.gradient, call.weight, None, stride, padding, dilation, True, extra, call.groups)
    depthwise = is_contiguous(image) and weight.shape[1] == 1
    ways: tuple[tuple[str, float, tuple[str, ...]], ...] = (("transposed", TOLERANCE, ()),)
    if gradient.dtype != "float64" and call.groups == 1:
        ways = (("transposed", 0.0, ("cuda",)), ("transposed_reordered", TOLERANCE, ("cpu",)))
    elif gradient.dtype != "float64" and depthwise:
        ways = (("transposed", 0.0, ("cpu",)),)
    outputs = kernel.call.outputs[:1]
    for name, tolerance, devices in ways:
        if tolerance == 0.0 or gradient.dtype in ("float32", "float64"):
            promises = {"tolerance": tolerance, "devices": devices}
            yield kernel.implement(name, FORWARD, args=args, outputs=outputs, **promises)
    if is_contiguous(gradient):
        runs = (convolve_channels_last, convolve_chunks, multiply_transposed, input_gradient_unfolded)
        unfolded = (call.gradient, call.weight, image.shape, stride, padding, dilation)
        yield from _ways(kernel, call, runs, args, args[:2], unfolded)


@alternatives_for(BACKWARD)
def weight_gradient(kernel: TracedKernel) -> Iterator[Implementation]:
    """Other ways to run the gradients for weight and bias on a CPU."""
    call = ConvolutionCall.of(kernel.call)
    if call.wanted[0] or call.gradient is None or not is_contiguous(call.gradient.spec):
        return
    rest = (call.gradient, call.image, call.weight.spec.shape, call.wanted)
    runs = (
        weight_gradient_channels_last,
        weight_gradient_chunks,
        weight_gradient_multiplied,
        weight_gradient_unfolded,
    )
    yield from _ways(kernel, call, runs, kernel.call.args, rest, (*rest, *call.geometry[:3]))


def same_order(*images: TensorSpec) -> bool:
    """Tell whether dense images all are row by row, or all channels-last, also as torch's kernels take them."""
    if not any(all(map(order, images)) for order in (is_contiguous, is_channels_last)):
        return False
    return len({suggests_channels_last(image.shape, image.stride) for image in images}) == 1


def _ways(
    kernel: TracedKernel,
    convolution: ConvolutionCall,
    runs: tuple[Callable[..., Any], ...],
    args: tuple[Argument, ...],
    of_product: tuple[Argument, ...],
    of_patches: tuple[Argument, ...],
) -> Iterator[Implementation]:
    """The ways of a two-dimensional convolution of contiguous images.

    Args:
        kernel: to implement.
        convolution: its call.
        runs: functions for channels-last, for parts of the batch, for a product, and for products of patches.
        args: of the first two, without the number of parts.
        of_product, of_patches: arguments of the others.
    """
    if not convolution.contiguous_float32:
        return

    def way(
        name: str, run: Callable[..., Any], args: tuple[Argument, ...], devices: tuple[str, ...] = ("cpu",)
    ) -> Implementation:
        outputs = kernel.call.outputs if returns_tuple(run) else tuple(filter(None, kernel.call.outputs))
        promises = {"tolerance": TOLERANCE, "devices": devices}
        return kernel.implement(name, run, args=args, kwargs=(), outputs=outputs, **promises)

    channels_last, chunks, product, patches = runs
    yield way("channels_last", channels_last, args)
    for count in (2, 4):
        if convolution.image.spec.shape[0] >= 2 * count:
            yield way(f"chunks{count}", chunks, (*args, count), devices=())
    if convolution.pointwise:
        yield way("matmul", product, of_product)
    elif convolution.groups == 1 and convolution.weight_is_large:
        yield way("unfold", patches, of_patches)
