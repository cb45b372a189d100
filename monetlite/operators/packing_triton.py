"""Packing on a GPU, and gradients from what is packed, by Triton kernels that read and write everything once.

With torch's operators (`packing.py`) a mask is a byte an element on the way, and the pieces of it pass through
memory several times; here the bits never leave registers. The bits are the same: bit i of a byte is element i of
its eight.
"""

import torch

from monetlite.operators.triton_launch import launch, tl, triton

_BYTES = 512
"""Bytes of a mask that one program of a kernel packs or unpacks: 4,096 elements."""


def pack_outside(flat: torch.Tensor, packed: torch.Tensor, low: float, high: float) -> None:
    """Pack `x ≤ low or x ≥ high` of a flat tensor's elements; with NaN for a bound, that side has none."""
    launch(_pack_outside, packed, _grid(packed), flat, packed, flat.numel(), float(low), float(high), BYTES=_BYTES)


def pack_true(flat: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack a flat tensor of booleans."""
    launch(_pack_true, packed, _grid(packed), flat.view(torch.uint8), packed, flat.numel(), BYTES=_BYTES)


def clear(flat: torch.Tensor, packed: torch.Tensor) -> None:
    """Write zeros over a flat tensor where a packed mask has ones."""
    launch(_clear, packed, _grid(packed), flat, packed, flat.numel(), BYTES=_BYTES)


def cleared(flat: torch.Tensor, packed: torch.Tensor, result: torch.Tensor) -> None:
    """Write a flat tensor's elements to another one, and zeros where a packed mask has ones."""
    launch(_cleared, packed, _grid(packed), flat, packed, result, flat.numel(), BYTES=_BYTES)


def scaled(flat: torch.Tensor, packed: torch.Tensor, scale: float, result: torch.Tensor) -> None:
    """Write element · bit · scale to a flat tensor, which may be the same one.

    Multiplied in float32 in this order, as torch's `native_dropout_backward` does on a GPU, and rounded once.
    """
    launch(_scaled, packed, _grid(packed), flat, packed, result, flat.numel(), float(scale), BYTES=_BYTES)


def _grid(packed: torch.Tensor) -> tuple[int]:
    return (-(-packed.numel() // _BYTES),)


if triton is not None:

    @triton.jit
    def _elements(count, BYTES: tl.constexpr):
        number = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
        at = number[:, None] * 8 + tl.arange(0, 8)[None, :]
        return number, at, at < count

    @triton.jit
    def _store(bits, packed, number, count, BYTES: tl.constexpr):
        byte = tl.sum(bits.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
        tl.store(packed + number, byte.to(tl.uint8), mask=number * 8 < count)

    @triton.jit
    def _bits(packed, number, count):
        byte = tl.load(packed + number, mask=number * 8 < count, other=0).to(tl.int32)
        return (byte[:, None] >> tl.arange(0, 8)[None, :]) & 1

    @triton.jit
    def _pack_outside(source, packed, count, low, high, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        value = tl.load(source + at, mask=there, other=0).to(tl.float32)
        outside = ((value <= low) | (value >= high)) & there
        _store(outside, packed, number, count, BYTES)

    @triton.jit
    def _pack_true(source, packed, count, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        _store(tl.load(source + at, mask=there, other=0) != 0, packed, number, count, BYTES)

    @triton.jit
    def _clear(gradient, packed, count, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        blocked = _bits(packed, number, count) != 0
        tl.store(gradient + at, tl.zeros(at.shape, gradient.dtype.element_ty), mask=there & blocked)

    @triton.jit
    def _cleared(gradient, packed, result, count, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        value = tl.load(gradient + at, mask=there, other=0)
        blocked = _bits(packed, number, count) != 0
        tl.store(result + at, tl.where(blocked, 0.0, value).to(value.dtype), mask=there)

    @triton.jit
    def _scaled(gradient, packed, result, count, scale, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        value = tl.load(gradient + at, mask=there, other=0).to(tl.float32)
        value = _bits(packed, number, count).to(tl.float32) * value * scale
        tl.store(result + at, value.to(result.dtype.element_ty), mask=there)
