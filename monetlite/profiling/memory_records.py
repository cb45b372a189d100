"""Memory that torch allocates while a program runs.

On CUDA the allocator's statistics say it. On the CPU torch's profiler records every allocation that goes through
torch's allocator. Memory that libraries allocate themselves (an OpenMP worker's scratch space) is missing there, so
CPU figures can be checked against the process's high-water mark (`memory_use`), which is complete but coarse.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monetlite.core.announcing import warn
from monetlite.fx.torch_internals.torch_profiler import is_profiling as is_profiling
from monetlite.fx.torch_internals.torch_profiler import marked_allocations, memory_profiler
from monetlite.profiling.gpu_peak import GpuPeak

_MARK = "monetlite mark "
_WAIT_SECONDS = 30.0
"""The most time that a measurement waits for a step that another thread records."""


def peak_growth_bytes(function: Callable[[], Any], device: str = "cpu") -> int:
    """Largest growth of allocated memory while a function runs, in bytes.

    On CUDA these are the bytes asked for; the caching allocator's blocks may be up to a megabyte larger.
    """
    if device == "cuda":
        _leave_open_record()
        torch.cuda.synchronize()
        peak = GpuPeak()
        before, _ = peak.look()
        function()
        torch.cuda.synchronize()
        _, most = peak.look()
        return most - before
    return max(running_totals(function), default=0)


def running_totals(function: Callable[[], Any]) -> list[int]:
    """Bytes allocated on the CPU since the start, after each allocation or free that a function makes.

    Raises:
        RuntimeError: another thread of this process has torch's profiler on, and goes on with it.
    """
    _leave_open_record()
    profiler = _Profiler(_WAIT_SECONDS)
    try:
        function()
    finally:
        profiler.stop()
    return [total for name, total in profiler.totals() if not name]


class MemoryRecord:
    """Memory of a stretch of a program between marks. Begins when it is made, on this thread.

    It also ends, unread, when it is collected, when its thread ends or the process exits (which would crash while
    torch's profiler is on), and where `may_profile` finds it to be left. It may last on after its last mark, as
    torch's profiler can't be stopped in a backward pass.

    Raises:
        RuntimeError: torch's profiler is in use, or another record is open.
    """

    def __init__(self, device: str) -> None:
        if not may_profile():
            raise RuntimeError("torch's profiler is on")
        self._profiler = _Profiler() if device == "cpu" else None
        self._thread = threading.get_ident()
        self._stopped = weakref.finalize(self, _ended, self._profiler)
        self._marks: list[MemoryMark] = []
        self._times: list[float] = []
        self._found: list[MemoryMark] | None = None
        self.is_complete = False
        self.awaited = False  # somebody else wants to profile
        _recording.last = _LastRecord(self, self._profiler)
        self._peak = GpuPeak() if self._profiler is None else None

    @property
    def is_open(self) -> bool:
        return bool(self._stopped.alive)

    def mark(self, name: str, *, last: bool = False) -> None:
        """Set a mark; none where it has ended, or after the last."""
        if not self.is_open or self.is_complete:
            return
        self.is_complete = last
        self._times.append(time.perf_counter())
        if self._peak is None:
            with torch.profiler.record_function(f"{_MARK}{name}"):
                pass
            return
        live, peak = self._peak.look()
        self._marks.append(MemoryMark(name=name, live_bytes=live, peak_bytes=peak, seconds=self._times[-1]))
        self._peak.begin()

    def leave(self) -> None:
        """End it for somebody else. Its marks are lost, unless it has the last."""
        if self.is_complete:
            self.end()
        else:
            self._found = []
            self._stopped()

    def end(self) -> "list[MemoryMark]":
        """End it, and return the marks in order; none if it was left, or somebody else's profiler disturbed it."""
        if self._found is None:
            self._found = self._measured()
        return self._found

    def _measured(self) -> "list[MemoryMark]":
        if self._stopped() is None or self._thread != threading.get_ident():
            return []
        if self._profiler is None:
            return self._marks
        peak = live = 0
        for name, total in self._profiler.totals():
            if not name:
                live, peak = total, max(peak, total)
                continue
            seconds = self._times[len(self._marks)]
            own = name.removeprefix(_MARK)
            self._marks.append(MemoryMark(name=own, live_bytes=live, peak_bytes=peak, seconds=seconds))
            peak = live
        return self._marks if len(self._marks) == len(self._times) else []


@dataclass(frozen=True, kw_only=True)
class MemoryMark:
    """A mark: memory in use there, the most in use since the mark before, and its time in seconds.

    On the CPU, memory counts from the beginning of the record.
    """

    name: str
    live_bytes: int
    peak_bytes: int
    seconds: float


class _LastRecord:
    """The last record that was made on a thread, weakly. It is left when the thread ends, which deletes this."""

    def __init__(self, record: MemoryRecord, profiler: "_Profiler | None") -> None:
        self._record, self._profiler = weakref.ref(record), profiler

    def open(self) -> MemoryRecord | None:
        """The record, if it is open. Another thread may have ended it, and left the profiler on."""
        record = self._record()
        if record is not None and record.is_open:
            return record
        _ended(self._profiler)
        return None

    def __del__(self) -> None:
        if (record := self.open()) is not None:
            record.leave()


_recording = threading.local()
"""`last`: the thread's `_LastRecord`, if it made any."""


def may_profile() -> bool:
    """True if no profiler of torch is on in this thread, no record open, and no other thread profiles here.

    A record has the time until somebody asks again. A step that is still recorded then was left before its end, or
    has had its turn, and its record ends.
    """
    record = _open_record()
    if record is not None:
        if not (record.awaited or record.is_complete):
            record.awaited = True
            return False
        record.leave()
    return not is_profiling() and _Profiler.is_free()


def _open_record() -> MemoryRecord | None:
    last: _LastRecord | None = getattr(_recording, "last", None)
    return None if last is None else last.open()


def _leave_open_record() -> None:
    """End this thread's record, which what is measured now is not for."""
    if (record := _open_record()) is not None:
        record.leave()


def _ended(profiler: "_Profiler | None") -> bool:
    """Stop the profiler of a record, if it has one and this is its thread."""
    if profiler is not None:
        profiler.stop()
    return True


class _Profiler:
    """Torch's profiler of memory, which begins when this is made. Two in a process at once crash it.

    A profiler that the person has on in this thread ends, with a warning.

    Args:
        wait_seconds: the most time to wait for the one of another thread.

    Raises:
        RuntimeError: another thread's is on.
    """

    _changed = threading.Condition()
    on: "_Profiler | None" = None

    def __init__(self, wait_seconds: float = 0.0) -> None:
        with self._changed:
            if not self._changed.wait_for(self.is_free, wait_seconds):
                raise RuntimeError(
                    "memory can't be measured while another thread of this process measures a step. Train models "
                    "that are captured in pieces in one thread"
                )
            _Profiler.on = self
        self._thread = threading.get_ident()
        try:
            if is_profiling():
                warn(
                    "torch's profiler is on. It ends here, as monetlite measures memory by it; begin to profile "
                    "after the first training step"
                )
            self._profiler = memory_profiler()
            with _without_stderr():
                self._profiler.__enter__()
        except BaseException:
            self._free()
            raise

    @classmethod
    def is_free(cls) -> bool:
        """True if none is on."""
        return cls.on is None

    def stop(self) -> None:
        """Stop it, if it is on, and was begun on this thread: it can't be stopped on another."""
        if _Profiler.on is not self or self._thread != threading.get_ident():
            return
        try:
            with _without_stderr():
                self._profiler.__exit__(None, None, None)
        finally:
            self._free()

    def _free(self) -> None:
        with self._changed:
            _Profiler.on = None
            self._changed.notify_all()

    def totals(self) -> Iterator[tuple[str, int]]:
        """Marks, and bytes allocated since it began, after each allocation or free."""
        return _totals(marked_allocations(self._profiler, _MARK))


def _totals(events: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int]]:
    """Bytes allocated since the start, after each allocation, free or mark.

    Frees of what was allocated before the start don't count: that much is overestimated. Torch keeps the sizes of
    blocks it has seen, and may report the free of another block at such an address, so frees are counted by what
    was allocated there since the start.
    """
    sizes: dict[int, int] = {}
    total = 0
    for name, address, size in events:
        if size > 0:
            sizes[address] = size
            total += size
        elif size < 0:
            total -= sizes.pop(address, 0)
        yield name, total


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Silence the profiler library, which writes its log to the file descriptor itself."""
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
