"""Max pooling: its gradient needs the places of the maxima, and nothing of the input.

ATen keeps each maximum's place as a 64-bit index into the plane. Within its window one byte says as much: the
window has at most 256 places, and where it lies follows from the place of the result. On a GPU with Triton, kernels
of our own find it and follow it in one pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from monetlite.core.graph import Call, Implementation
from monetlite.fx.call_encoding import spec_of
from monetlite.operators import triton_kernels
from monetlite.operators.implementations import (
    Intermediate,
    TracedKernel,
    alternatives_for,
    function,
    intermediates_for,
    slices,
)
from monetlite.operators.strides import is_contiguous, is_dense
from monetlite.operators.triton_kernels import MAX_PLANE_PROGRAMS, PLANE_ELEMENTS, launch_over_planes, usable

_TARGET = "aten.max_pool2d_with_indices_backward.default"
MAX_OFFSETS = 256
CHUNK_ELEMENTS = {"cpu": 2**17, "cuda": 2**20}
"""Indices at a time: as many as a CPU's cache holds, or as keep a GPU busy. Each takes some bytes of workspace."""


@alternatives_for(_TARGET)
def backward_without_input(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient from the indices and the input's shape."""
    gradient, source, *rest = kernel.args
    if source.value is not None and is_contiguous(source.spec):
        args = (gradient, source.spec.shape, *rest)
        yield kernel.implement("from_indices", max_pool2d_backward_from_indices, args=args)


@intermediates_for(_TARGET)
def offsets(_: fx.Node, source: fx.Node, *rest: Any) -> Iterator[Intermediate]:
    """The place of each maximum in its window, as one byte."""
    *geometry, _, indices = rest
    image, places = spec_of(source.meta["val"]), spec_of(indices.meta["val"])
    window = PoolingWindow.of(image.shape, *geometry)
    if window.places <= MAX_OFFSETS and is_dense(places) and is_contiguous(image):
        yield Intermediate(
            name="offsets",
            function=pooling_offsets,
            ways=(("default", (indices, list(image.shape), *geometry)),),
            shape=places.shape,
            dtype="uint8",
        )


@alternatives_for(_TARGET)
def backward_from_offsets(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient from the one-byte offsets."""
    if "offsets" in kernel.intermediates:
        gradient, source, *rest, _ = kernel.args
        args = (gradient, source.spec.shape, *rest, kernel.intermediates["offsets"])
        yield kernel.implement("from_offsets", max_pool2d_backward_from_offsets, args=args)


def _plane(call: Call) -> int:
    shape: Any = call.args[1]
    return int(shape[-2] * shape[-1])


def _places(call: Call) -> int:
    return math.prod(_pair(call.args[2]))


def _bytes_a_place(each: int) -> Callable[[Call], int]:
    """The memory that a GPU holds for so many bytes a place of the result, piece by piece."""

    def held(call: Call) -> int:
        places = [ref.spec.shape for ref in call.tensors() if ref.spec.dtype in ("int64", "uint8")]
        return each * min(CHUNK_ELEMENTS["cuda"], max(map(math.prod, places), default=0))

    return held


@function("max_pool2d_backward_from_indices", limit="scatter", integers=_plane)
def max_pool2d_backward_from_indices(gradient: Tensor, input_shape: list[int], *rest: object) -> Tensor:
    """Gradient of `max_pool2d` with respect to its input, of shape `input_shape`."""
    return _backward_into(gradient.new_empty(input_shape), gradient, *rest)


def _backward_into(result: Tensor, gradient: Tensor, *rest: object) -> Tensor:
    """Write the gradient of `max_pool2d` with respect to its input.

    ATen's kernel takes the input for its shape and layout only, but on a GPU copies one that is not contiguous: the
    result stands for it.
    """
    made: Tensor = torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
        gradient, result, *rest, grad_input=result
    )
    return made


@function("pooling_offsets", integers=_plane, workspace_bytes=_bytes_a_place(9))
def pooling_offsets(indices: Tensor, input_shape: list[int], *geometry: Any) -> Tensor:
    """The place in its window of each maximum that `max_pool2d_with_indices` found, row by row: a uint8 tensor.

    `geometry` is kernel size, stride, padding and dilation.
    """
    window = PoolingWindow.of(input_shape, *geometry)
    offsets = torch.empty_like(indices, dtype=torch.uint8)
    if fits_triton(window, indices):
        launch_over_planes(
            triton_kernels.pooling_offsets,
            offsets,
            *(indices, offsets, window.width, *offsets.shape[-2:]),
            **window.constants,
        )
        return offsets
    first = window.first(indices)
    steps = window.steps(indices.device)
    number = steps.new_zeros(window.furthest + 1, dtype=torch.uint8)
    number[steps] = torch.arange(len(steps), dtype=torch.uint8, device=indices.device)
    for rows in _chunks(indices):
        # Indices made up to measure with may lie outside of their windows.
        offsets[rows] = number[(indices[rows] - first).clamp_(0, len(number) - 1)]
    return offsets


@function("max_pool2d_backward_from_offsets", limit="scatter", integers=_places, workspace_bytes=_bytes_a_place(20))
def max_pool2d_backward_from_offsets(gradient: Tensor, input_shape: list[int], *rest: Any) -> Tensor:
    """Gradient of `max_pool2d` with respect to its input, from `pooling_offsets`.

    `rest` is kernel size, stride, padding, dilation, `ceil_mode`, and the offsets.
    """
    *geometry, offsets = rest
    window = PoolingWindow.of(input_shape, *geometry[:4])
    result, plane = gradient.new_empty(input_shape), input_shape[-2] * input_shape[-1]
    if fits_triton(window, gradient, offsets, result):
        # In float32 and from the first window to the last, as ATen's kernel adds up.
        launch_over_planes(
            triton_kernels.pooling_gradient,
            result,
            *(gradient, offsets, result, *input_shape[-2:], *offsets.shape[-2:]),
            **window.constants,
        )
        return result
    first, steps = window.first(offsets), window.steps(offsets.device)
    for rows in _chunks(offsets):
        # Indices outside of the plane could only come of offsets that were never found; they must not be written.
        indices = steps[offsets[rows].int()].add_(first).clamp_(0, plane - 1)
        _backward_into(result[rows], gradient[rows], *geometry, indices)
        del indices  # before the next ones are made
    return result


@dataclass(frozen=True, kw_only=True)
class PoolingWindow:
    """The windows of a pooling: where they lie, in indices into a plane of the input. Pairs are (rows, columns)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    width: int
    """Of the input."""

    @classmethod
    def of(cls, input_shape: Sequence[int], size: Any, stride: Any, padding: Any, dilation: Any) -> "PoolingWindow":
        """From the arguments of ATen's kernel, in which one number stands for two and no stride for the size."""
        size, stride, padding, dilation = map(_pair, (size, stride or size, padding, dilation))
        return cls(size=size, stride=stride, padding=padding, dilation=dilation, width=input_shape[-1])

    @property
    def places(self) -> int:
        return self.size[0] * self.size[1]

    @property
    def constants(self) -> dict[str, tuple[int, int]]:
        """Constants of Triton's kernels."""
        return {"WINDOW": self.size, "STRIDE": self.stride, "PADDING": self.padding, "DILATION": self.dilation}

    @property
    def furthest(self) -> int:
        """Distance of the index of a window's last place from its first one's."""
        rows, columns = self.size
        return (rows - 1) * self.dilation[0] * self.width + (columns - 1) * self.dilation[1]

    def first(self, results: Tensor) -> Tensor:
        """For each place of the result, the index of its window's first element; shape (rows, columns), int64."""
        rows, columns = (torch.arange(count, device=results.device) for count in results.shape[-2:])
        down = rows.mul_(self.stride[0]).sub_(self.padding[0]).mul_(self.width)
        return down[:, None] + columns.mul_(self.stride[1]).sub_(self.padding[1])

    def steps(self, device: torch.device) -> Tensor:
        """For each place of a window, the distance of its index from the first one's; shape (places,), int64."""
        rows, columns = (torch.arange(count, device=device) for count in self.size)
        return (rows.mul_(self.dilation[0] * self.width)[:, None] + columns.mul_(self.dilation[1])).flatten()


def fits_triton(window: PoolingWindow, *tensors: Tensor) -> bool:
    """Tell whether Triton's kernels take these tensors, and windows that no row of the input is narrower than.

    In a narrower row, two places of a window can have the same index, and torch's operators find one that serves.
    """
    contiguous = all(tensor.is_contiguous() and tensor.numel() for tensor in tensors)
    distinct = (window.size[1] - 1) * window.dilation[1] < window.dilation[0] * window.width
    programs = max(tensor.shape[-1] * tensor.shape[-2] for tensor in tensors) // PLANE_ELEMENTS
    return contiguous and distinct and programs < MAX_PLANE_PROGRAMS and usable(*tensors)


def _pair(sizes: Any) -> tuple[int, int]:
    items = [int(size) for size in (sizes if isinstance(sizes, (list, tuple)) else [sizes])]
    return items[0], items[-1]


def _chunks(results: Tensor) -> Iterator[slice]:
    """Slices of the first dimension."""
    count = results.shape[0]
    elements = CHUNK_ELEMENTS.get(results.device.type, results.numel())
    return slices(count, elements * count // max(1, results.numel()))
