"""How much memory a function takes: allocation events of the CPU, or the CUDA allocator's statistics.

The CPU profiler records every allocation that goes through torch's allocator, whatever thread's operator
asked for it; libraries' own allocations (an OpenMP worker's scratch space) are missing from it, so a CPU
measurement can be checked against the process's high-water mark, which misses nothing but is coarse.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_SELF = Path("/proc/self")


def peak_growth_bytes(function: Callable[[], Any], device: str = "cpu") -> int:
    """The most that allocated memory grows, while a function runs, over what it was before, in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return max(running_totals(function), default=0)


def running_totals(function: Callable[[], Any]) -> list[int]:
    """Bytes allocated on the CPU since the start, after each allocation or free that a function makes.

    The profiler does not see the free of what was allocated before it started: that much is overestimated.
    """
    profiler: Any = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
    with _without_stderr():
        profiler.__enter__()
    try:
        function()
    finally:
        with _without_stderr():
            profiler.__exit__(None, None, None)
    total, totals = 0, []
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU:
            total += event.nbytes()
            totals.append(total)
    return totals


def high_water_growth_bytes(function: Callable[[], Any]) -> int | None:
    """Growth of the process's resident set at its highest while a function runs; None where Linux won't say."""
    try:
        (_SELF / "clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        function()
        return _status_bytes("VmHWM") - before
    except (OSError, KeyError, ValueError):
        return None


def _status_bytes(field: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise KeyError(field)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Keep the profiler library's own log lines, written to the descriptor itself, off the terminal."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
