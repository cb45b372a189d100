"""Allocator, workspaces and streams of a GPU."""

import torch


def set_allocator_settings(settings: str) -> None:
    """Replace the settings of the CUDA allocator, written as in `PYTORCH_ALLOC_CONF`.

    Budgets of reserved memory need expandable segments, which have no public switch after torch is imported. If
    this stops working, `nvidia-smi` shows more than the budget.
    """
    torch._C._accelerator_setAllocatorSettings(settings)


def clear_cublas_workspaces() -> None:
    """Give back the workspaces that cuBLAS keeps for each thread and stream.

    If this stops working, a measured workspace of a matrix product lacks cuBLAS's own.
    """
    torch._C._cuda_clearCublasWorkspaces()


def occupy_gpu(cycles: int) -> None:
    """Keep the current stream busy for a number of clock cycles (`torch.cuda._sleep`).

    Kernels that are launched meanwhile then run one after another. If this stops working, measured latencies of
    small kernels include the time of their launches.
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types for it
