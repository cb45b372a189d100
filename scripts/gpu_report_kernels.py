"""Where a step's time goes on a GPU: in kernels, or between them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
"""Steps in a row that are recorded."""
LONGEST = 3
"""Number of gaps that are named."""


def kernel_times(kernels: Iterable[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """The time in kernels and between them, for each of some steps.

    Args:
        kernels: begin and duration of each, in ms, and its name.
        steps: number of steps that ran them.

    Returns:
        `kernels`: their number; `kernels_ms`: time in which at least one ran; `idle_ms`: time between the first and
        the last in which none did; `gaps`: the longest such times, in ms, and the kernels before and after.
    """
    ordered = sorted(kernels)
    gaps: list[tuple[float, str, str]] = []
    busy_ms, end_ms, before = 0.0, ordered[0][0], ""
    for begin_ms, taken_ms, name in ordered:
        if begin_ms > end_ms:
            gaps.append((begin_ms - end_ms, before, name))
        busy_ms += max(0.0, begin_ms + taken_ms - max(begin_ms, end_ms))
        if begin_ms + taken_ms >= end_ms:
            end_ms, before = begin_ms + taken_ms, name
    return {
        "kernels": len(ordered) / steps,
        "kernels_ms": busy_ms / steps,
        "idle_ms": sum(gap_ms for gap_ms, _, _ in gaps) / steps,
        "gaps": sorted(gaps, reverse=True)[:LONGEST],
    }


def recorded_kernels(step: Callable[[], object]) -> dict[str, Any]:
    """`kernel_times` of some steps in a row, on the GPU."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.start_ns() / 1e6, event.duration_ns() / 1e6, event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # not declared
    ]
    return kernel_times(kernels, STEPS) if kernels else {}
