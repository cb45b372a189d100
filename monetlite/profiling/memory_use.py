"""Memory of this process, of the machine and of libraries on a GPU, as the system and torch report it."""

import contextlib
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from monetlite.fx.torch_internals.torch_cuda import clear_cublas_workspaces

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]  # a module, where there is one

_PROCESS, _CGROUP = Path("/proc/self"), Path("/sys/fs/cgroup")
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
"""Messages of torch's CPU allocator, the C++ library, cuBLAS and cuDNN, which have no exception of their own."""
_NO_ENGINE = "unable to find an engine to execute"
"""Torch's message when none of cuDNN's plans ran, for lack of memory or for another reason."""
_USABLE_FRACTION = 0.97
"""Fraction of the available memory that a process may take: at the last byte Linux ends processes."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEEP_BYTES, _MAP_BYTES = 2**31 - 1, 2**30
_USUAL_TRIM_BYTES, _USUAL_MAP_BYTES = 2**26, 2**25
"""Thresholds that glibc reaches by itself in a process that frees large blocks."""


def release_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each thread, so that they are allocated anew."""
    torch.cuda.synchronize()
    clear_cublas_workspaces()


def kept_bytes(*functions: Callable[[], Any]) -> int:
    """Bytes on the GPU that are kept after some functions, cuBLAS's workspaces among them."""
    release_workspaces()
    before_bytes = torch.cuda.memory_allocated()
    for function in functions:
        function()
    torch.cuda.synchronize()
    return max(0, torch.cuda.memory_allocated() - before_bytes)


def workspaces_bytes(device: str) -> int:
    """Bytes that cuBLAS keeps for the threads of a training step's two parts, which then are there; 0 on a CPU.

    Each thread has one for products and, of cuBLASLt, one for products with a vector added.
    """
    if device != "cuda":
        return 0

    def multiply(_: torch.Tensor | None = None) -> None:
        factor = torch.zeros(16, 16, device=device)  # of a single row or column, torch calls another function
        torch.nn.functional.linear(factor @ factor, factor, factor[0])

    def multiply_in_both_parts() -> None:
        multiply()
        with torch.enable_grad():
            result = torch.zeros((), device=device, requires_grad=True) * 1.0
        # It runs in the thread of the backward part.
        result.register_hook(multiply)  # type: ignore[no-untyped-call]  # torch has no types for it
        result.backward()  # type: ignore[no-untyped-call]  # torch has no types for it

    return kept_bytes(multiply_in_both_parts)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error, or one of its causes, says that memory did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if any(phrase in text for phrase in _NO_MEMORY) or (_NO_ENGINE in text and refusals() > 0):
            return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def refusals() -> int:
    """Requests that the CUDA allocator has refused, those that libraries recovered from included."""
    return _allocator_count("num_ooms")


def releases() -> int:
    """Number of times that the CUDA allocator gave back its free blocks in order to serve a request."""
    return _allocator_count("num_alloc_retries")


def _allocator_count(name: str) -> int:
    return int(torch.cuda.memory_stats().get(name, 0)) if torch.cuda.is_available() else 0


def gpu_in_use_bytes() -> int | None:
    """Memory in use on the current GPU by nvidia-smi, even before CUDA is started; None if it does not say."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    reported = nvidia_smi("memory.used", f"--id=GPU-{uuid}")
    return int(reported) * 2**20 if reported.isdecimal() else None


def nvidia_smi(field: str, *options: str) -> str:
    """A field that nvidia-smi reports; empty where it reports none."""
    command = ["nvidia-smi", *options, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def high_water_growth_bytes(function: Callable[[], Any]) -> int | None:
    """Largest growth of the process's resident set while a function runs; None where Linux does not say."""
    before = process_bytes()
    highest = high_water_bytes(function)
    return None if before is None or highest is None else highest - before


def high_water_bytes(function: Callable[[], Any]) -> int | None:
    """Largest resident set of the process while a function runs; None where Linux does not say."""
    cleared = False
    with contextlib.suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")
        cleared = True
    function()
    return _status_bytes("VmHWM") if cleared else None


def process_bytes() -> int | None:
    """Resident set of this process; None where Linux does not say."""
    return _status_bytes("VmRSS")


def machine_bytes() -> int | None:
    """Memory of the machine, or of its container; None where Linux does not say."""
    limit, machine = _number(_CGROUP / "memory.max"), _entry(Path("/proc/meminfo"), "MemTotal:")
    return machine if limit is None or machine is None else min(limit, machine)


def available_bytes() -> int | None:
    """Memory that this process can still take; None where Linux does not say."""
    available = _entry(Path("/proc/meminfo"), "MemAvailable:")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if available is not None and limit is not None and used is not None:
        available = min(available, max(0, limit - used + (_entry(_CGROUP / "memory.stat", "file") or 0)))
    return available


@contextlib.contextmanager
def memory_limited(size_bytes: int | None) -> Iterator[None]:
    """Make allocations of the CPU fail that exceed a size, before Linux ends the process.

    Does nothing where the size is None or the system has no such limit.
    """
    used = _status_bytes("VmData")
    if resource is None or used is None or size_bytes is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    known = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([used + int(size_bytes * _USABLE_FRACTION), *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def page_faults() -> int:
    """Pages that this process has taken from the system; 0 where that is not counted."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def steady_heap() -> Iterator[None]:
    """Make the C library keep freed memory while CPU code is timed; afterwards, give it back.

    Otherwise glibc returns large blocks to the system and takes them again for the next call. Those page faults can
    cost more than the operator, and vary with the machine's load. Does nothing without glibc.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_TRIM_THRESHOLD, _KEEP_BYTES)
    library.mallopt(_MMAP_THRESHOLD, _MAP_BYTES)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _USUAL_MAP_BYTES)
        library.malloc_trim(0)


def trim_heap() -> None:
    """Return freed memory to the system. Does nothing without glibc."""
    if library := _glibc():
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _status_bytes(name: str) -> int | None:
    return _entry(_PROCESS / "status", f"{name}:")


def _entry(path: Path, name: str) -> int | None:
    """The number of bytes beside a name in one of Linux's files."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None where it says `max` or is missing."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
