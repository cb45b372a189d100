"""Growth of allocated memory between two moments, whatever runs there, on whichever thread.

Torch's profiler can't do this: it has to end on the thread that began it, and a person may be using it.
"""

import ctypes
import threading
import time
from functools import cache
from typing import Any

import torch

SAMPLING_SECONDS, MAX_SECONDS = 0.0005, 60.0
"""Between two looks at the memory in use on a CPU, and for how long they go on."""


class AllocatedGrowth:
    """Growth of allocated memory from here on.

    On CUDA the allocator counts it. On a CPU glibc is asked every half millisecond. With another C library, there
    are no figures. Of two records at a time on CUDA, only the later one is right.

    Attributes:
        before_bytes: allocated at the beginning, by the whole process.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._ended = threading.Event()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self.before_bytes = self._most_bytes = self._in_use() or 0
        if not self._cuda and self.before_bytes:
            threading.Thread(target=self._sample, daemon=True).start()

    def _in_use(self) -> int | None:
        if self._cuda:
            stats = torch.cuda.memory_stats()
            self._most_bytes = stats["requested_bytes.all.peak"]
            return int(stats["requested_bytes.all.current"])
        return allocated_bytes()

    def _sample(self) -> None:
        until = time.monotonic() + MAX_SECONDS
        while not self._ended.wait(SAMPLING_SECONDS) and time.monotonic() < until:
            self._most_bytes = max(self._most_bytes, self._in_use() or 0)

    def end(self) -> tuple[int, int] | None:
        """The growth in bytes until now, and the largest; None where it isn't known, or has been told."""
        if self._ended.is_set():
            return None
        now = self._in_use()
        self._ended.set()
        if not now or not self.before_bytes:
            return None
        return now - self.before_bytes, max(now, self._most_bytes) - self.before_bytes


_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO.split())


@cache
def _mallinfo() -> Any:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


def allocated_bytes() -> int | None:
    """Bytes that this process has allocated and not freed; None where the C library doesn't say (glibc does)."""
    asked = _mallinfo()
    if asked is None:
        return None
    told = asked()
    return int(told.uordblks + told.hblkhd)
