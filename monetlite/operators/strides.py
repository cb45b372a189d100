"""Layouts of tensors in memory, from their shapes and strides."""

import math
from collections.abc import Sequence

import torch

from monetlite.core.graph import TensorRef, TensorSpec, Value
from monetlite.fx.torch_internals.torch_dispatch import suggest_memory_format


def item_bytes(dtype: str) -> int:
    """Bytes of an element, by torch's name of its dtype."""
    return int(getattr(torch, dtype).itemsize)


def is_whole(values: Sequence[Value], ref: TensorRef) -> bool:
    """Tell whether a tensor is all of its storage, and so begins where the allocator put it, which is aligned."""
    if not is_dense(ref.spec):
        return False
    if ref.value is None:
        # AOTAutograd's name for parameters and inputs; their views have other names.
        return ref.node.startswith("primals")
    return math.prod(ref.spec.shape) * item_bytes(ref.spec.dtype) == values[ref.value].size_bytes


def is_dense(spec: TensorSpec) -> bool:
    """Tell whether a tensor's elements fill its storage without gaps or overlaps, in whatever order."""
    return _fills(sorted((stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True)))


def is_contiguous(spec: TensorSpec) -> bool:
    """Tell whether a tensor is laid out row by row."""
    return _fills(list(zip(reversed(spec.stride), reversed(spec.shape), strict=True)))


def is_channels_last(spec: TensorSpec) -> bool:
    """Tell whether an image of shape (batch, channels, rows, columns) is laid out with its channels innermost."""
    return len(spec.shape) == 4 and _fills([(spec.stride[at], spec.shape[at]) for at in (1, 3, 2, 0)])


def _fills(innermost_first: Sequence[tuple[int, int]]) -> bool:
    """Tell whether dimensions, as (stride, size), lie within one another without gaps."""
    expected = 1
    for stride, size in innermost_first:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def same_layout(one: TensorSpec, other: TensorSpec) -> bool:
    """Tell whether two tensors have their elements in the same places of their storages."""
    return one.shape == other.shape and same_places(one.shape, one.stride, other.stride)


def same_places(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Tell whether two strides mean the same for a shape: that of a dimension of one element means nothing."""
    same = tuple(one) == tuple(other)
    return same or all(size == 1 or mine == theirs for size, mine, theirs in zip(shape, one, other, strict=True))


def suggests_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether torch's kernels take an image's strides for channels-last.

    An image of one channel, or of one pixel, lies in both layouts; its strides say which one it is taken for.
    """
    image = torch.empty_strided(shape, stride, device="meta")
    return suggest_memory_format(image) is not torch.contiguous_format
