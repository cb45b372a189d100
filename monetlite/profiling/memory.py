"""How much memory a function takes: allocation events of the CPU, or the CUDA allocator's statistics.

The CPU profiler records every allocation that goes through torch's allocator, whatever thread's operator
asked for it; libraries' own allocations (an OpenMP worker's scratch space) are missing from it, so a CPU
measurement can be checked against the process's high-water mark, which misses nothing but is coarse.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType

_SELF = Path("/proc/self")
_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "bad allocation",
    "status_alloc_failed",
    "storage size calculation overflowed",
)
"""How torch's CPU allocator, the C++ library, cuBLAS and cuDNN say so, none of which has an exception for it."""
_NO_ENGINE = "unable to find an engine to execute"
"""How torch says that none of cuDNN's plans ran, whether for lack of memory or because there is none at all."""


def peak_growth_bytes(function: Callable[[], Any], device: str = "cpu", *, counted: str = "allocated") -> int:
    """The most that allocated memory grows, while a function runs, over what it was before, in bytes.

    On CUDA `counted` may be `"requested"`: what was asked for, where a block of the caching allocator, which
    `"allocated"` counts whole, may be up to a megabyte larger.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before: int = torch.cuda.memory_stats()[f"{counted}_bytes.all.current"]
        function()
        torch.cuda.synchronize()
        most: int = torch.cuda.memory_stats()[f"{counted}_bytes.all.peak"]
        return most - before
    return max(running_totals(function), default=0)


def release_workspaces(device: str) -> None:
    """On CUDA, give back the workspaces that cuBLAS keeps for threads that called it, to see them taken again."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, or was raised because of one that does."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if any(phrase in text for phrase in _NO_MEMORY) or (_NO_ENGINE in text and refusals() > 0):
            return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def refusals() -> int:
    """How many requests for memory the CUDA allocator has refused in this process, caught by libraries or not."""
    return _counted("num_ooms")


def releases() -> int:
    """How often the CUDA allocator has given back what was free in its cache, to have what was asked for."""
    return _counted("num_alloc_retries")


def _counted(name: str) -> int:
    return int(torch.cuda.memory_stats().get(name, 0)) if torch.cuda.is_available() else 0


def running_totals(function: Callable[[], Any]) -> list[int]:
    """Bytes allocated on the CPU since the start, after each allocation or free that a function makes.

    What was allocated before the start is left out when it is freed: that much is overestimated. Torch keeps the
    sizes of blocks it has seen for good, and may report the free of another block at such an address, so frees are
    counted by what was allocated there since the start.
    """
    profiler: Any = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)
    with _without_stderr():
        profiler.__enter__()
    try:
        function()
    finally:
        with _without_stderr():
            profiler.__exit__(None, None, None)
    sizes: dict[int, int] = {}
    total, totals = 0, []
    for address, size in _allocations(profiler.kineto_results.experimental_event_tree()):
        if size >= 0:
            sizes[address] = size
            total += size
        else:
            total -= sizes.pop(address, 0)
        totals.append(total)
    return totals


def _allocations(roots: list[Any]) -> list[tuple[int, int]]:
    """Address and size of what was allocated on the CPU and, with a size below zero, freed, in order."""
    found, rest = [], roots[::-1]
    while rest:
        event = rest.pop()
        rest.extend(reversed(event.children))
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=itemgetter(0))
    return [(address, size) for _, address, size in found]


def high_water_growth_bytes(function: Callable[[], Any]) -> int | None:
    """Growth of the process's resident set at its highest while a function runs; None where Linux won't say."""
    before = process_bytes()
    highest = high_water_bytes(function)
    return None if before is None or highest is None else highest - before


def high_water_bytes(function: Callable[[], Any]) -> int | None:
    """The process's resident set at its highest while a function runs; None, and nothing is run, where Linux
    won't say."""
    try:
        (_SELF / "clear_refs").write_text("5")
    except OSError:
        return None
    function()
    return status_bytes("VmHWM")


def process_bytes() -> int | None:
    """The process's resident set; None where Linux won't say."""
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int | None:
    """A field of Linux's account of this process, such as `VmRSS`; None where there is none."""
    try:
        for line in (_SELF / "status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == field:
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return None


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
