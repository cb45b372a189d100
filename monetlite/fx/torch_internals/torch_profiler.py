"""Allocation events of the CPU profiler.

The public profiler sums up allocations by operator. A peak within an operator takes each allocation and free with
its address and time, which only the event tree has (`kineto_results.experimental_event_tree`, `_EventType`).
Without it, workspaces on a CPU can't be measured. `_profiler_enabled` says whether somebody else is profiling: a
record of a step would end that profile.
"""

from operator import itemgetter
from typing import Any

import torch
from torch._C._profiler import _EventType


def is_profiling() -> bool:
    """True while a profiler of torch is on in this thread, in which another one would end it."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]  # torch has no types for it


def memory_profiler() -> Any:
    """A profiler of the CPU that records allocations; a context manager for `marked_allocations`."""
    return torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)


def marked_allocations(profiler: Any, mark: str) -> list[tuple[str, int, int]]:
    """Name, address and bytes of each allocation on the CPU, and of each mark, in order.

    Bytes are negative for a free. Allocations have an empty name. Marks have no bytes; they are made by
    `torch.profiler.record_function`, with names that begin with `mark`.
    """
    found, rest = [], profiler.kineto_results.experimental_event_tree()[::-1]
    while rest:
        event = rest.pop()
        rest.extend(reversed(event.children))
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, "", event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(mark):
            found.append((event.start_time_ns, event.name, 0, 0))
    found.sort(key=itemgetter(0))
    return [(name, address, size_bytes) for _, name, address, size_bytes in found]
