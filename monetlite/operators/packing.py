"""Yes-or-no tensors as one bit an element, in the order of their storage.

Eight bytes that are 0 or 1, taken as one 64-bit integer and multiplied by 0x0102040810204080, have all eight
bits in the top byte of the product; 256 entries of a table lead back. All of it goes piece by piece, so that
the unpacked mask is never whole in memory. On a GPU with Triton, kernels of our own do the same in one pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from monetlite.core.graph import Call
from monetlite.operators import packing_triton
from monetlite.operators.registry import function
from monetlite.operators.triton_launch import usable

_GATHER_BITS = 0x0102040810204080
_PIECE = {"cpu": 2**18, "cuda": 2**26}
"""Elements at a time: on a CPU what stays in its cache, on a GPU enough to fill it."""


def packed_bytes(elements: int) -> int:
    """Bytes that the packed bits of so many elements take."""
    return (elements + 7) // 8


def piece_elements(device: torch.device) -> int:
    return _PIECE.get(device.type, _PIECE["cpu"])


def workspace_bytes(call: Call) -> int:
    """What working piece by piece on a GPU holds: a byte an element of a piece, and as much again to unpack."""
    largest = max((_elements(ref.spec.shape) for ref in call.tensors()), default=0)
    return 2 * min(largest, _PIECE["cuda"])


@dataclass(frozen=True)
class Outside:
    """Which elements are at most `low`, or at least `high` where there is one. NaN is neither."""

    low: float
    high: float | None = None

    def __call__(self, piece: torch.Tensor) -> torch.Tensor:
        below = piece <= self.low
        return below if self.high is None else below.logical_or_(piece >= self.high)


def pack(source: torch.Tensor, strides: Sequence[int], predicate: Outside | None = None) -> torch.Tensor:
    """Pack a predicate of a tensor's elements, of any shape, into ⌈elements / 8⌉ bytes (uint8).

    The bits are in the order of a dense storage with these strides. Without a predicate, the tensor is of booleans.
    """
    flat = in_order(source, strides)
    packed = flat.new_empty(packed_bytes(flat.numel()), dtype=torch.uint8)
    if usable(flat):
        if predicate is None:
            packing_triton.pack_true(flat, packed)
        else:
            # Bounds as the tensor's own type has them, which torch compares with.
            high = math.nan if predicate.high is None else predicate.high
            low, high = torch.tensor((predicate.low, high), dtype=flat.dtype).tolist()
            packing_triton.pack_outside(flat, packed, low, high)
        return packed
    for start, piece in _pieces(flat):
        holds = piece.clone() if predicate is None else predicate(piece)
        if holds.numel() % 8:
            holds = torch.nn.functional.pad(holds, (0, -holds.numel() % 8))
        words = holds.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56)
        packed[start // 8 : start // 8 + words.numel()].copy_(words)
        del holds, words  # before the next ones are made
    return packed


def unpacked(packed: torch.Tensor, elements: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Pieces of a packed mask: (where in the storage, booleans of shape (n,)), in order."""
    table = _table(packed.device)
    step = piece_elements(packed.device)
    for start in range(0, elements, step):
        count = min(step, elements - start)
        words = packed[start // 8 : start // 8 + packed_bytes(count)]
        yield slice(start, start + count), table.index_select(0, words.int()).view(torch.bool)[:count]


def in_order(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A tensor's elements in the order of a dense storage with these strides, of shape (elements,).

    A view where the tensor is laid out so. That is what was captured, but some kernels give fake tensors another
    layout than real ones (`hardtanh_backward`, `hardswish_backward`, `native_dropout_backward`), and then a copy.
    """
    if not _is_laid_out(tensor, strides):
        tensor = tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
    return tensor.permute(_outermost_first(tensor.shape, strides)).view(-1)


def out_of_order(flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A view of what `in_order` returns, as the tensor of this shape and these strides that it was."""
    order = _outermost_first(shape, strides)
    places = [order.index(dimension) for dimension in range(len(shape))]
    return flat.view([shape[dimension] for dimension in order]).permute(places)


def _outermost_first(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions of a dense storage from the outermost to the innermost, after those of one element."""
    return sorted(range(len(shape)), key=lambda dimension: (shape[dimension] != 1, -strides[dimension]))


def over_in_order(
    tensor: torch.Tensor, strides: Sequence[int], write: Callable[[torch.Tensor], object]
) -> torch.Tensor:
    """Let a function overwrite a tensor's elements in the order of `in_order`; returns the tensor."""
    flat = in_order(tensor, strides)
    write(flat)
    if not _is_laid_out(tensor, strides):
        tensor.copy_(out_of_order(flat, tensor.shape, strides))
    return tensor


def _is_laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    return all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def from_packed(
    gradient: torch.Tensor,
    strides: Sequence[int],
    fused: Callable[[torch.Tensor, torch.Tensor], object],
    over: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A gradient that a packed mask changes, as a new tensor.

    By `fused`, a kernel from one flat tensor to another, where Triton can run it; else by `over`, which overwrites
    a copy of the gradient.
    """
    if not _is_laid_out(gradient, strides) or not usable(gradient):
        return over(gradient.clone(memory_format=torch.preserve_format))
    result = torch.empty_like(gradient, memory_format=torch.preserve_format)
    fused(in_order(gradient, strides), in_order(result, strides))
    return result


@function("masked_gradient", passes=1.3, workspace_bytes=workspace_bytes)
def masked_gradient(gradient: torch.Tensor, blocked: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A gradient with zeros where a mask has ones, packed in the order of these strides."""
    return from_packed(
        gradient,
        strides,
        fused=lambda flat, result: packing_triton.cleared(flat, blocked, result),
        over=lambda copy: masked_gradient_(copy, blocked, strides),
    )


@function("masked_gradient_", passes=1.3, workspace_bytes=workspace_bytes)
def masked_gradient_(gradient: torch.Tensor, blocked: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """The same, over the gradient."""

    def write(flat: torch.Tensor) -> None:
        if usable(flat):
            packing_triton.clear(flat, blocked)
            return
        for where, mask in unpacked(blocked, flat.numel()):
            flat[where].masked_fill_(mask, 0)

    return over_in_order(gradient, strides, write)


def _pieces(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    step = piece_elements(flat.device)
    for start in range(0, flat.numel(), step):
        yield start, flat[start : start + step]


@cache
def _table(device: torch.device) -> torch.Tensor:
    """For each byte, the eight booleans that it packs, as one 64-bit integer."""
    # Kept for later calls, so it has to be a real tensor even where a program is being traced.
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        every = torch.cartesian_prod(*[torch.tensor([False, True])] * 8).contiguous()
        words = every.view(torch.int64).flatten()
        table = torch.empty(256, dtype=torch.int64)
        table[words.mul(_GATHER_BITS).bitwise_right_shift(56).to(torch.uint8).long()] = words
        return table.to(device)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
