"""Kernels in Triton for packed masks and pooling offsets, which read and write everything once.

They serve CUDA tensors where Triton is installed, which torch for CUDA brings on Linux. With torch's operators a
mask is a byte an element on the way, an offset several 64-bit integers; here the bits never leave registers, and
are the same. In Triton's interpreter (`TRITON_INTERPRET=1`) the kernels run on CPU tensors, which is how they are
tested without a GPU; that they compile is tested without one, too.
"""

import contextlib
import os
from functools import cache
from typing import Any

import torch

from monetlite.core.announcing import warn
from monetlite.core.errors import first_line
from monetlite.fx.torch_internals.torch_dispatch import FakeTensor, is_traced

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = tl = None

MASK_BYTES = 512
"""Bytes of a mask that one program of a kernel packs or unpacks: 4,096 elements."""
PLANE_ELEMENTS = 1024
"""Elements of planes that one program takes at most."""
MAX_PLANE_PROGRAMS = 65535
"""Programs in the second dimension of a grid."""


def usable(*tensors: torch.Tensor) -> bool:
    """Tell whether kernels can run on tensors: with memory, on a device that they are compiled for here.

    They compute in float32, so float64 is left to torch.
    """
    on_device = all(tensor.is_cuda for tensor in tensors) or os.environ.get("TRITON_INTERPRET") == "1"
    if triton is None or not on_device:
        return False
    if is_traced() or any(isinstance(item, FakeTensor) or item.dtype is torch.float64 for item in tensors):
        return False
    return works(tensors[0].device)


@cache
def works(device: torch.device) -> bool:
    """Tell whether a kernel can be compiled and run on a device, which takes a C compiler; warn if it can't."""
    try:
        made = torch.zeros(1, dtype=torch.uint8, device=device)
        launch(write_one, made, (1,), made)
        return made.item() == 1
    except Exception as error:  # whatever compilers, linkers and drivers raise
        warn(
            f"Triton can't make a kernel for {device} here ({first_line(error)}); masks and offsets are packed by "
            "torch's operators, which take longer"
        )
        return False


def launch(kernel: Any, on: torch.Tensor, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of a tensor, over a grid of programs; nothing where the grid is empty."""
    if not all(grid):
        return
    with torch.cuda.device_of(on) if _several_gpus() else contextlib.nullcontext():  # type: ignore[no-untyped-call]  # torch has no types for it
        kernel[grid](*arguments, **constants)


@cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def launch_over_mask(kernel: Any, packed: torch.Tensor, *arguments: Any) -> None:
    """Run a kernel over the bytes of a packed mask."""
    launch(kernel, packed, (-(-packed.numel() // MASK_BYTES),), *arguments, BYTES=MASK_BYTES)


def launch_over_planes(kernel: Any, result: torch.Tensor, *arguments: Any, **constants: tuple[int, int]) -> None:
    """Run a kernel for every element of the planes of a contiguous tensor: its last two dimensions."""
    size = result.shape[-1] * result.shape[-2]
    planes = result.numel() // size
    block = min(PLANE_ELEMENTS, triton.next_power_of_2(size))
    together = PLANE_ELEMENTS // block
    grid = (triton.cdiv(planes, together), triton.cdiv(size, block))
    launch(kernel, result, grid, *arguments, planes, PLANES=together, BLOCK=block, **constants)


if triton is not None:

    @triton.jit
    def write_one(result):
        tl.store(result, tl.full((), 1, tl.uint8))

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
    def pack_outside(source, packed, count, low, high, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        value = tl.load(source + at, mask=there, other=0).to(tl.float32)
        outside = ((value <= low) | (value >= high)) & there
        _store(outside, packed, number, count, BYTES)

    @triton.jit
    def pack_true(source, packed, count, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        _store(tl.load(source + at, mask=there, other=0) != 0, packed, number, count, BYTES)

    @triton.jit
    def cleared(gradient, packed, result, count, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        value = tl.load(gradient + at, mask=there, other=0)
        blocked = _bits(packed, number, count) != 0
        tl.store(result + at, tl.where(blocked, 0.0, value).to(value.dtype), mask=there)

    @triton.jit
    def scaled(gradient, packed, result, count, scale, BYTES: tl.constexpr):
        number, at, there = _elements(count, BYTES)
        value = tl.load(gradient + at, mask=there, other=0).to(tl.float32)
        value = _bits(packed, number, count).to(tl.float32) * value * scale
        tl.store(result + at, value.to(result.dtype.element_ty), mask=there)

    @triton.jit
    def _plane_elements(planes, rows, columns, PLANES: tl.constexpr, BLOCK: tl.constexpr):
        """Planes (PLANES, 1), and of places in a plane (1, BLOCK) the number, the row and the column."""
        plane = tl.program_id(0).to(tl.int64) * PLANES + tl.arange(0, PLANES)[:, None]
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        there = (plane < planes) & (place < rows * columns)
        return plane, place, place // columns, place % columns, there

    @triton.jit
    def pooling_offsets(
        indices,
        result,
        width,
        rows,
        columns,
        planes,
        WINDOW: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        DILATION: tl.constexpr,
        PLANES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        plane, place, row, column, there = _plane_elements(planes, rows, columns, PLANES, BLOCK)
        at = plane * (rows * columns) + place
        first = (row * STRIDE[0] - PADDING[0]) * width + column * STRIDE[1] - PADDING[1]
        step = tl.load(indices + at, mask=there, other=0).to(tl.int32) - first
        down = step // (DILATION[0] * width)
        across = (step - down * (DILATION[0] * width)) // DILATION[1]
        # Indices made up to measure with may lie outside of their windows.
        offset = tl.minimum(tl.maximum(down * WINDOW[1] + across, 0), WINDOW[0] * WINDOW[1] - 1)
        tl.store(result + at, offset.to(tl.uint8), mask=there)

    @triton.jit
    def pooling_gradient(
        gradient,
        offsets,
        result,
        rows,
        columns,
        window_rows,
        window_columns,
        planes,
        WINDOW: tl.constexpr,
        STRIDE: tl.constexpr,
        PADDING: tl.constexpr,
        DILATION: tl.constexpr,
        PLANES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        REACH_ROWS: tl.constexpr = (WINDOW[0] - 1) * DILATION[0]
        REACH_COLUMNS: tl.constexpr = (WINDOW[1] - 1) * DILATION[1]
        plane, place, row, column, there = _plane_elements(planes, rows, columns, PLANES, BLOCK)
        row += PADDING[0]
        column += PADDING[1]
        # From the first window that may reach the element to the last one that begins at or before it.
        first_row = row // STRIDE[0] - REACH_ROWS // STRIDE[0]
        first_column = column // STRIDE[1] - REACH_COLUMNS // STRIDE[1]
        total = tl.zeros((PLANES, BLOCK), tl.float32)
        for below in range(REACH_ROWS // STRIDE[0] + 1):
            window_row = first_row + below
            down = row - window_row * STRIDE[0]
            in_row = (window_row >= 0) & (window_row < window_rows) & (down <= REACH_ROWS)
            in_row = in_row & (down % DILATION[0] == 0)
            for right in range(REACH_COLUMNS // STRIDE[1] + 1):
                window_column = first_column + right
                across = column - window_column * STRIDE[1]
                covers = in_row & (window_column >= 0) & (window_column < window_columns)
                covers = covers & (across <= REACH_COLUMNS) & (across % DILATION[1] == 0) & there
                at = plane * (window_rows * window_columns) + window_row * window_columns + window_column
                offset = tl.load(offsets + at, mask=covers, other=0).to(tl.int32)
                number = down // DILATION[0] * WINDOW[1] + across // DILATION[1]
                value = tl.load(gradient + at, mask=covers & (offset == number), other=0)
                total += value.to(tl.float32)
        at = plane * (rows * columns) + place
        tl.store(result + at, total.to(result.dtype.element_ty), mask=there)
