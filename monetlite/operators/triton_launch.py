"""Whether kernels of ours can run on a tensor, and how they are launched.

They are written in Triton, for CUDA tensors where it is installed, which torch for CUDA brings on Linux. In its
interpreter (`TRITON_INTERPRET=1`) the same kernels run on CPU tensors, which is how they are tested without a GPU;
that they compile is tested without one, too.
"""

import os
import warnings
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = tl = None

__all__ = ["launch", "tl", "triton", "usable", "works"]


def usable(*tensors: torch.Tensor) -> bool:
    """Whether kernels can run on tensors: with memory, on a device that they are compiled for here.

    What they compute with is float32, so float64 is left to torch.
    """
    on_device = all(tensor.is_cuda for tensor in tensors) or os.environ.get("TRITON_INTERPRET") == "1"
    if triton is None or not on_device:
        return False
    traced = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0
    if traced or any(isinstance(item, FakeTensor) or item.dtype is torch.float64 for item in tensors):
        return False
    return works(tensors[0].device)


@cache
def works(device: torch.device) -> bool:
    """Whether a kernel can be compiled and run on a device, which takes a C compiler; a warning where it can't."""
    try:
        made = torch.zeros(1, dtype=torch.uint8, device=device)
        launch(_write_one, made, (1,), made)
        return made.item() == 1
    except Exception as error:  # whatever compilers, linkers and drivers raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        warnings.warn(
            f"Triton can't make a kernel for {device} here ({reason}); masks and offsets are packed by torch's "
            "operators, which take longer",
            stacklevel=2,
        )
        return False


def launch(kernel: Any, on: torch.Tensor, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
    """Run a kernel on the device of a tensor, over a grid of programs; nothing where the grid is empty."""
    if not all(grid):
        return
    with torch.cuda.device_of(on):  # type: ignore[no-untyped-call]  # torch has no types for it
        kernel[grid](*arguments, **constants)


if triton is not None:

    @triton.jit
    def _write_one(result):
        tl.store(result, tl.full((), 1, tl.uint8))
