"""Max pooling's one-byte offsets on a GPU, by Triton kernels that read and write everything once.

With torch's operators (`pooling.py`) each place is several 64-bit integers on the way. A program takes a block of
one or several planes of a contiguous tensor.
"""

from typing import TYPE_CHECKING

import torch

from monetlite.operators.triton_launch import launch, tl, triton, usable

if TYPE_CHECKING:
    from monetlite.operators.pooling import Window

_BLOCK = 1024
"""Elements that a program takes at most."""
_MOST_BLOCKS = 65535
"""Programs in the second dimension of a grid."""


def serves(window: "Window", *tensors: torch.Tensor) -> bool:
    """Whether the kernels take these tensors, and windows that no row of the input is narrower than.

    Where one is, two places of a window can have the same index, and torch's operators find one that serves.
    """
    contiguous = all(tensor.is_contiguous() and tensor.numel() for tensor in tensors)
    distinct = (window.size[1] - 1) * window.dilation[1] < window.dilation[0] * window.width
    blocks = max(tensor.shape[-1] * tensor.shape[-2] for tensor in tensors) // _BLOCK
    return contiguous and distinct and blocks < _MOST_BLOCKS and usable(*tensors)


def offsets(indices: torch.Tensor, window: "Window", result: torch.Tensor) -> None:
    """Write the place in its window of each index, row by row, to a uint8 tensor of the same shape."""
    _over_planes(
        _offsets,
        result,
        (indices, result, window.width, *result.shape[-2:]),
        WINDOW_COLUMNS=window.size[1],
        PLACES=window.places,
        **_constants(window),
    )


def gradient_from(gradient: torch.Tensor, offsets: torch.Tensor, window: "Window", result: torch.Tensor) -> None:
    """Write the gradient of max pooling with respect to its input.

    Each element of the input adds up what comes in from the windows that it is the maximum of, in float32 and from
    the first window to the last, as ATen's kernel does.
    """
    _over_planes(
        _gradient,
        result,
        (gradient, offsets, result, *result.shape[-2:], *offsets.shape[-2:]),
        WINDOW_ROWS=window.size[0],
        WINDOW_COLUMNS=window.size[1],
        **_constants(window),
    )


def _constants(window: "Window") -> dict[str, int]:
    return {
        "STRIDE_ROWS": window.stride[0],
        "STRIDE_COLUMNS": window.stride[1],
        "PADDING_ROWS": window.padding[0],
        "PADDING_COLUMNS": window.padding[1],
        "DILATION_ROWS": window.dilation[0],
        "DILATION_COLUMNS": window.dilation[1],
    }


def _over_planes(kernel: object, result: torch.Tensor, arguments: tuple[object, ...], **constants: int) -> None:
    """Run a kernel for every element of the planes of a contiguous tensor: its last two dimensions."""
    size = result.shape[-1] * result.shape[-2]
    planes = result.numel() // size
    block = min(_BLOCK, triton.next_power_of_2(size))
    together = _BLOCK // block
    grid = (triton.cdiv(planes, together), triton.cdiv(size, block))
    launch(kernel, result, grid, *arguments, planes, PLANES=together, BLOCK=block, **constants)


if triton is not None:

    @triton.jit
    def _elements(planes, rows, columns, PLANES: tl.constexpr, BLOCK: tl.constexpr):
        """Planes (PLANES, 1), and of places in a plane (1, BLOCK) the number, the row and the column."""
        plane = tl.program_id(0).to(tl.int64) * PLANES + tl.arange(0, PLANES)[:, None]
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        there = (plane < planes) & (place < rows * columns)
        return plane, place, place // columns, place % columns, there

    @triton.jit
    def _offsets(
        indices,
        result,
        width,
        rows,
        columns,
        planes,
        WINDOW_COLUMNS: tl.constexpr,
        PLACES: tl.constexpr,
        STRIDE_ROWS: tl.constexpr,
        STRIDE_COLUMNS: tl.constexpr,
        PADDING_ROWS: tl.constexpr,
        PADDING_COLUMNS: tl.constexpr,
        DILATION_ROWS: tl.constexpr,
        DILATION_COLUMNS: tl.constexpr,
        PLANES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        plane, place, row, column, there = _elements(planes, rows, columns, PLANES, BLOCK)
        at = plane * (rows * columns) + place
        first = (row * STRIDE_ROWS - PADDING_ROWS) * width + column * STRIDE_COLUMNS - PADDING_COLUMNS
        step = tl.load(indices + at, mask=there, other=0).to(tl.int32) - first
        down = step // (DILATION_ROWS * width)
        across = (step - down * (DILATION_ROWS * width)) // DILATION_COLUMNS
        # Indices made up to measure with may lie outside of their windows.
        offset = tl.minimum(tl.maximum(down * WINDOW_COLUMNS + across, 0), PLACES - 1)
        tl.store(result + at, offset.to(tl.uint8), mask=there)

    @triton.jit
    def _gradient(
        gradient,
        offsets,
        result,
        rows,
        columns,
        window_rows,
        window_columns,
        planes,
        WINDOW_ROWS: tl.constexpr,
        WINDOW_COLUMNS: tl.constexpr,
        STRIDE_ROWS: tl.constexpr,
        STRIDE_COLUMNS: tl.constexpr,
        PADDING_ROWS: tl.constexpr,
        PADDING_COLUMNS: tl.constexpr,
        DILATION_ROWS: tl.constexpr,
        DILATION_COLUMNS: tl.constexpr,
        PLANES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        REACH_ROWS: tl.constexpr = (WINDOW_ROWS - 1) * DILATION_ROWS
        REACH_COLUMNS: tl.constexpr = (WINDOW_COLUMNS - 1) * DILATION_COLUMNS
        plane, place, row, column, there = _elements(planes, rows, columns, PLANES, BLOCK)
        row += PADDING_ROWS
        column += PADDING_COLUMNS
        # From the first window that may reach the element to the last one that begins at or before it.
        first_row = row // STRIDE_ROWS - REACH_ROWS // STRIDE_ROWS
        first_column = column // STRIDE_COLUMNS - REACH_COLUMNS // STRIDE_COLUMNS
        total = tl.zeros((PLANES, BLOCK), tl.float32)
        for below in range(REACH_ROWS // STRIDE_ROWS + 1):
            window_row = first_row + below
            down = row - window_row * STRIDE_ROWS
            in_row = (window_row >= 0) & (window_row < window_rows) & (down <= REACH_ROWS)
            in_row = in_row & (down % DILATION_ROWS == 0)
            for right in range(REACH_COLUMNS // STRIDE_COLUMNS + 1):
                window_column = first_column + right
                across = column - window_column * STRIDE_COLUMNS
                covers = in_row & (window_column >= 0) & (window_column < window_columns)
                covers = covers & (across <= REACH_COLUMNS) & (across % DILATION_COLUMNS == 0) & there
                at = plane * (window_rows * window_columns) + window_row * window_columns + window_column
                offset = tl.load(offsets + at, mask=covers, other=0).to(tl.int32)
                number = down // DILATION_ROWS * WINDOW_COLUMNS + across // DILATION_COLUMNS
                value = tl.load(gradient + at, mask=covers & (offset == number), other=0)
                total += value.to(tl.float32)
        at = plane * (rows * columns) + place
        tl.store(result + at, total.to(result.dtype.element_ty), mask=there)
