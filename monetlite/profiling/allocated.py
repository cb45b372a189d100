"""Growth of allocated memory between two moments, whatever runs there, on whichever thread.

Torch's profiler can't do this: it has to end on the thread that began it, and a person may be using it.
"""

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

from monetlite.profiling.gpu_peak import GpuPeak

SAMPLING_SECONDS, SAMPLING_SHARE, REST = 0.0005, 0.001, 4
"""Time between two looks at the memory in use on a CPU: so much, such a part of all until then, or so many times
what a look takes (longer where much is allocated), whichever is most. What nobody ends takes less and less."""
MAX_GAP_SECONDS, MAX_GAP_SHARE, MAX_LOOK_SECONDS = 0.002, 0.03, 0.0005
"""Time without a look after which looks were late: so much, or such a part of all, whichever is more. So they were
where one took longer than the last: glibc goes through all free pieces of memory."""
MAX_LATE = 10
"""Steps that are looked at, one after the other, where looks are late. The largest figures count: looks on a busy
machine may miss every second peak."""


class AllocatedGrowth:
    """Growth of allocated memory from here on, until it is told or nobody wants it any more.

    On CUDA the allocator counts it. On a CPU glibc is asked, every half millisecond at first. With another C
    library, there are no figures.

    Attributes:
        before_bytes: allocated at the beginning, by the whole process.
        was_late: True after the end if looks were too few, as the machine was busy, or memory in many pieces: more
            may have been in use.
    """

    def __init__(self, device: str) -> None:
        _open.add(self)
        self._samples: _Samples | None = None
        self._peak = GpuPeak() if device == "cuda" and not _nothing else None
        self.was_late = self._told = False
        self.before_bytes = 0
        if _nothing:
            return
        if self._peak is not None:
            self.before_bytes, _ = self._peak.look()
            return
        self.before_bytes = allocated_bytes() or 0
        if self.before_bytes:
            self._samples = _Samples(self.before_bytes)
            weakref.finalize(self, self._samples.ended.set).atexit = False
            threading.Thread(target=self._samples.take, daemon=True).start()

    def end(self) -> tuple[int, int] | None:
        """The growth in bytes until now, and the largest; None where it isn't known, or has been told."""
        told, self._told = self._told, True
        if told or not self.before_bytes:
            return None
        if self._peak is not None:
            now, most = self._peak.look()
            return now - self.before_bytes, most - self.before_bytes
        assert self._samples is not None
        now = self._samples.look()
        self._samples.ended.set()
        self.was_late = self._samples.were_late
        return now - self.before_bytes, self._samples.most_bytes - self.before_bytes


_open: "weakref.WeakSet[AllocatedGrowth]" = weakref.WeakSet()


_nothing: list[None] = []
"""An item for each `measuring_nothing` that is open."""


@contextlib.contextmanager
def measuring_nothing() -> Iterator[None]:
    """Measure no growth that begins within: looks take time, and what runs here is timed."""
    _nothing.append(None)
    try:
        yield
    finally:
        _nothing.pop()


def forget_growths() -> None:
    """Have none told that began before: what is allocated from here on is not for what they are of."""
    for growth in list(_open):
        growth.end()
        _open.discard(growth)


class _Samples:
    """Looks at the memory in use, by a thread of their own."""

    def __init__(self, before_bytes: int) -> None:
        self.ended = threading.Event()
        self.most_bytes = before_bytes
        self._began = self._last = time.monotonic()
        self._gap_seconds = self._look_seconds = 0.0

    def take(self) -> None:
        """Look again and again, until the end."""
        pause_seconds = SAMPLING_SECONDS
        while not self.ended.wait(pause_seconds):
            began = time.thread_time()
            self.look()
            look_seconds = time.thread_time() - began
            self._look_seconds = max(self._look_seconds, look_seconds)
            pause_seconds = max(SAMPLING_SECONDS, SAMPLING_SHARE * (self._last - self._began), REST * look_seconds)

    def look(self) -> int:
        """Note the memory in use, and return it."""
        now_bytes, now = allocated_bytes() or 0, time.monotonic()
        self.most_bytes = max(self.most_bytes, now_bytes)
        self._gap_seconds, self._last = max(self._gap_seconds, now - self._last), now
        return now_bytes

    @property
    def were_late(self) -> bool:
        most_seconds = max(MAX_GAP_SECONDS, MAX_GAP_SHARE * (self._last - self._began))
        return self._gap_seconds > most_seconds or self._look_seconds > MAX_LOOK_SECONDS


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
