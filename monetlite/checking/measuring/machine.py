"""How much memory this machine has, and keeping a process within it, so that too large a batch is an exception."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]  # a module, where there is one

from monetlite.profiling.memory import status_bytes

_SPARE = 0.97
"""Of the available memory, what may be taken: at the last byte the system ends processes, and not only this one."""


def total_bytes() -> int | None:
    """The memory of the machine, or what its container may take; None where Linux won't say."""
    limit, machine = _number(Path("/sys/fs/cgroup/memory.max")), _meminfo("MemTotal")
    return machine if limit is None or machine is None else min(limit, machine)


def available_bytes() -> int | None:
    """What this process could take beyond what it has, without others giving way; None where Linux won't say."""
    available = _meminfo("MemAvailable")
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if available is not None and limit is not None and used is not None:
        available = min(available, max(0, limit - used + (_entry(group / "memory.stat", "file") or 0)))
    return available


@contextlib.contextmanager
def within(size_bytes: int | None) -> Iterator[None]:
    """Have allocations fail, rather than the system end this process, once it takes so much more than it has.

    Does nothing where the size is None or the system has no such limit.
    """
    has = status_bytes("VmData")
    if resource is None or has is None or size_bytes is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [
        has + int(size_bytes * _SPARE),
        *(limit for limit in (before, hard) if limit != resource.RLIM_INFINITY),
    ]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _meminfo(field: str) -> int | None:
    kilobytes = _entry(Path("/proc/meminfo"), f"{field}:")
    return None if kilobytes is None else kilobytes * 1024


def _entry(path: Path, name: str) -> int | None:
    """The number beside a name in a file of such lines."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    return None


def _number(path: Path) -> int | None:
    """The number that a file holds; None where it says `max`, or isn't there."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


__all__ = ["available_bytes", "total_bytes", "within"]
