"""Packing on a GPU, by Triton kernels that read and write everything once.

With torch's operators (`packing.py`) a mask is a byte an element on the way, and the pieces of it pass through
memory several times; here the bits never leave registers. Used for CUDA tensors where Triton is installed, which
torch for CUDA brings. The bits are the same: bit i of a byte is element i of its eight.

In Triton's interpreter (`TRITON_INTERPRET=1`) the same kernels run on CPU tensors, which is how they are tested
without a GPU.
"""

import os
import warnings
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = None

_BYTES = 512
"""Bytes of a mask that one program of a kernel packs or unpacks: 4,096 elements."""


def usable(tensor: torch.Tensor) -> bool:
    """Whether the kernels can run on a tensor: one with memory, on a device that they are compiled for here.

    Bounds are float32, so float64 is left to torch.
    """
    on_device = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    traced = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0
    if triton is None or not on_device or traced or tensor.dtype is torch.float64:
        return False
    return works(tensor.device)


@cache
def works(device: torch.device) -> bool:
    """Whether a kernel can be compiled and run on a device, which takes a C compiler; a warning where it can't."""
    try:
        packed = torch.empty(1, dtype=torch.uint8, device=device)
        pack_true(torch.ones(8, dtype=torch.bool, device=device), packed)
        return packed.item() == 0xFF
    except Exception as error:  # whatever compilers, linkers and drivers raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"Triton can't make a kernel for {device} here ({reason}); masks are packed by torch's operators, "
            "which take longer",
            stacklevel=2,
        )
        return False


def pack_outside(flat: torch.Tensor, packed: torch.Tensor, low: float, high: float) -> None:
    """Pack `x ≤ low or x ≥ high` of a flat tensor's elements; with NaN for a bound, that side has none."""
    _launch(_pack_outside, packed, flat, packed, flat.numel(), float(low), float(high))


def pack_true(flat: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack a flat tensor of booleans."""
    _launch(_pack_true, packed, flat.view(torch.uint8), packed, flat.numel())


def clear(flat: torch.Tensor, packed: torch.Tensor) -> None:
    """Write zeros over a flat tensor where a packed mask has ones."""
    _launch(_clear, packed, flat, packed, flat.numel())


def _launch(kernel: Any, packed: torch.Tensor, *arguments: Any) -> None:
    if not packed.numel():
        return
    with torch.cuda.device_of(packed):  # type: ignore[no-untyped-call]  # torch has no types for it
        kernel[(triton.cdiv(packed.numel(), _BYTES),)](*arguments, BYTES=_BYTES)


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
        byte = tl.load(packed + number, mask=number * 8 < count, other=0).to(tl.int32)
        blocked = ((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0
        tl.store(gradient + at, tl.zeros(at.shape, gradient.dtype.element_ty), mask=there & blocked)
