"""Keeping freed memory in the process while CPU operators are timed.

The C library gives large blocks back to the system as soon as they are freed, and takes them again for the next
call; the page faults of that can cost more than the operator and vary with whatever else the machine does (on a
virtual machine, a hundredfold). With memory kept, a call costs what it computes, alone as in a step.
"""

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_KEEP_BYTES, _MAP_BYTES = 2**31 - 1, 2**30
_USUAL_TRIM_BYTES, _USUAL_MAP_BYTES = 2**26, 2**25
"""What glibc's own thresholds grow to in a process that frees large blocks."""


@contextlib.contextmanager
def steady_heap() -> Iterator[None]:
    """Have the C library keep what is freed; on leaving, give it back. Does nothing where that isn't glibc."""
    if not _set(_KEEP_BYTES, _MAP_BYTES):
        yield
        return
    try:
        yield
    finally:
        _set(_USUAL_TRIM_BYTES, _USUAL_MAP_BYTES)
        trim_heap()


def trim_heap() -> None:
    """Have the C library give what is freed back to the system. Does nothing where that isn't glibc."""
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)


def _set(trim_bytes: int, map_bytes: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        return False
    done = [library.mallopt(_TRIM_THRESHOLD, trim_bytes), library.mallopt(_MMAP_THRESHOLD, map_bytes)]
    return all(done)
