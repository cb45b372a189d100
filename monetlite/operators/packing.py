"""Yes-or-no tensors as one bit an element, in the order of their storage.

Eight bytes that are 0 or 1, taken as one 64-bit integer and multiplied by 0x0102040810204080, have all eight
bits in the top byte of the product; 256 entries of a table lead back. All of it goes piece by piece, so that
the unpacked mask is never whole in memory. On a GPU with Triton, kernels of our own do the same in one pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from monetlite.core.graph import Call
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.torch_internals.torch_dispatch import without_modes, without_transforms
from monetlite.operators import triton_kernels
from monetlite.operators.implementations import Intermediate, elements, function_pair
from monetlite.operators.strides import is_dense, same_layout, same_places
from monetlite.operators.triton_kernels import launch_over_mask, usable

_GATHER_BITS = 0x0102040810204080
PIECE_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
"""Elements at a time: on a CPU what stays in its cache, on a GPU enough to fill it."""


def packed_bytes(count: int) -> int:
    """The size of so many packed bits."""
    return (count + 7) // 8


def piece_elements(device: torch.device) -> int:
    return PIECE_ELEMENTS.get(device.type, PIECE_ELEMENTS["cpu"])


def workspace_bytes(call: Call) -> int:
    """Memory that working piece by piece on a GPU holds: a byte an element, and as much again to unpack."""
    return 2 * min(max(map(elements, call.tensors()), default=0), PIECE_ELEMENTS["cuda"])


def mask_of(
    gradient: fx.Node, run: Callable[..., Tensor], *bounds: object, **sources: fx.Node | None
) -> Iterator[Intermediate]:
    """A packed mask for a gradient, if the tensors that it can be computed from are laid out like the gradient.

    Args:
        gradient: node of the gradient that comes in.
        run: takes (source, strides, *bounds) and returns the mask.
        bounds: further arguments of `run`.
        sources: by name of the implementation, the node that it reads; the first is the default.
    """
    first: Any = next(iter(sources.values()))
    layout = spec_of(first.meta["val"])
    if not is_dense(layout) or not same_layout(layout, spec_of(gradient.meta["val"])):
        return
    ways = tuple(
        (name, (source, list(layout.stride), *bounds))
        for name, source in sources.items()
        if source is not None and same_layout(spec_of(source.meta["val"]), layout)
    )
    shape = (packed_bytes(first.meta["val"].numel()),)
    yield Intermediate(name="mask", function=run, ways=ways, shape=shape, dtype="uint8")


def pack(source: Tensor, strides: Sequence[int], *bounds: float) -> Tensor:
    """Pack booleans, or which numbers are out of bounds, of any shape, into ⌈elements / 8⌉ bytes (uint8).

    The bits are in the order of a dense storage with these strides. Out of bounds is what is at most the first, or
    at least the second if there is one. NaN is neither.
    """
    stored = as_stored(source, strides)
    packed = torch.empty(packed_bytes(stored.numel()), dtype=torch.uint8, device=stored.device)
    if usable(stored):
        if bounds:
            low_and_high = _rounded(bounds, stored.dtype)
            launch_over_mask(triton_kernels.pack_outside, packed, stored, packed, stored.numel(), *low_and_high)
        else:
            launch_over_mask(triton_kernels.pack_true, packed, stored.view(torch.uint8), packed, stored.numel())
        return packed
    flat = in_order(stored, strides)
    step = piece_elements(flat.device)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        holds = _out_of_bounds(piece, *bounds) if bounds else piece.clone()
        if holds.numel() % 8:
            holds = torch.nn.functional.pad(holds, (0, -holds.numel() % 8))
        words = holds.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56)
        packed[start // 8 : start // 8 + words.numel()].copy_(words)
        del holds, words  # before the next ones are made
    return packed


def _out_of_bounds(piece: Tensor, low: float, high: float | None = None) -> Tensor:
    below = piece <= low
    return below if high is None else below.logical_or_(piece >= high)


@cache
def _rounded(bounds: tuple[float, ...], dtype: torch.dtype) -> tuple[float, float]:
    """Bounds as a type has them, which torch compares with; NaN for one that there isn't."""
    with without_modes(), without_transforms():
        low, high, *_ = torch.tensor((*bounds, math.nan), dtype=dtype).tolist()
    return low, high


def unpacked(packed: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of a packed mask of so many elements: (where in the storage, booleans of shape (n,)), in order."""
    table = _table(packed.device)
    step = piece_elements(packed.device)
    for start in range(0, count, step):
        size = min(step, count - start)
        words = packed[start // 8 : start // 8 + packed_bytes(size)]
        yield slice(start, start + size), table.index_select(0, words.int()).view(torch.bool)[:size]


def in_order(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A tensor's elements in the order of a dense storage with these strides, of shape (elements,).

    A view if the tensor is laid out so. That is what was captured, but some kernels give fake tensors another
    layout than real ones (`hardtanh_backward`, `hardswish_backward`, `native_dropout_backward`), and then a copy.
    """
    return as_stored(tensor, strides).permute(outermost_first(tensor.shape, strides)).view(-1)


def as_stored(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """A tensor, or a copy of it, whose elements lie as these strides have them."""
    if same_places(tensor.shape, tensor.stride(), strides):
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def out_of_order(flat: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A view of the result of `in_order`, as the tensor of this shape and these strides that it was."""
    order = outermost_first(shape, strides)
    places = [order.index(dimension) for dimension in range(len(shape))]
    return flat.view([shape[dimension] for dimension in order]).permute(places)


def outermost_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions of a dense storage from the outermost to the innermost, after those of one element."""
    return sorted(range(len(shape)), key=lambda dimension: (shape[dimension] != 1, -strides[dimension]))


def over_in_order(tensor: Tensor, strides: Sequence[int], write: Callable[[Tensor], object]) -> Tensor:
    """Let a function overwrite a tensor's elements in the order of `in_order`; returns the tensor."""
    flat = in_order(tensor, strides)
    write(flat)
    if not same_places(tensor.shape, tensor.stride(), strides):
        tensor.copy_(out_of_order(flat, tensor.shape, strides))
    return tensor


def by_mask(
    result: Tensor,
    gradient: Tensor,
    mask: Tensor,
    strides: Sequence[int],
    fused: Callable[[Tensor, Tensor], object],
    write_piece: Callable[[Tensor, Tensor], object],
) -> Tensor:
    """Write a gradient that a packed mask changes.

    Args:
        result: the gradient itself, or a tensor like it.
        gradient: of any shape.
        mask: packed in the order of `strides`.
        strides: of the dense tensor that the mask was made for.
        fused: Triton's way, from one dense tensor to another of the same layout, which may be the same one.
        write_piece: torch's way, over a flat piece of the gradient, given its booleans.
    """
    if usable(gradient) and same_places(gradient.shape, gradient.stride(), strides):
        fused(gradient, result)  # a kernel takes elements in the order of the storage
        return result
    if result is not gradient:
        result.copy_(gradient)

    def write(flat: Tensor) -> None:
        if usable(flat):
            fused(flat, flat)
            return
        for where, bits in unpacked(mask, flat.numel()):
            write_piece(flat[where], bits)
            del bits  # before the next ones are made

    return over_in_order(result, strides, write)


def _masked(result: Tensor, gradient: Tensor, blocked: Tensor, strides: list[int]) -> Tensor:
    """A gradient with zeros where a mask has ones, packed in the order of these strides."""

    def fused(gradient: Tensor, result: Tensor) -> None:
        # Also in place all of it is written: to write some of the bytes that go to memory together takes longer.
        launch_over_mask(triton_kernels.cleared, blocked, gradient, blocked, result, gradient.numel())

    def write_piece(piece: Tensor, bits: Tensor) -> None:
        piece.masked_fill_(bits, 0)

    return by_mask(result, gradient, blocked, strides, fused, write_piece)


masked_gradient, masked_gradient_ = function_pair(
    _masked, "masked_gradient", passes=1.3, workspace_bytes=workspace_bytes
)


@cache
def _table(device: torch.device) -> Tensor:
    """For each byte, the eight booleans that it packs, as one 64-bit integer."""
    # Kept for later calls, so it has to be a real tensor even where a program is being traced.
    with without_modes(), without_transforms():
        every = torch.cartesian_prod(*[torch.tensor([False, True])] * 8).contiguous()
        words = every.view(torch.int64).flatten()
        table = torch.empty(256, dtype=torch.int64)
        table[words.mul(_GATHER_BITS).bitwise_right_shift(56).to(torch.uint8).long()] = words
        return table.to(device)
