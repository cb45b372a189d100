"""Allocation events of the CPU profiler.

The public profiler sums up allocations by operator. A peak within an operator takes each allocation and free with
its address and time, which only the event tree has (`kineto_results.experimental_event_tree`, `_EventType`).
Without it, workspaces on a CPU can't be measured.
"""

from operator import itemgetter
from typing import Any

import torch
from torch._C._profiler import _EventType


def memory_profiler() -> Any:
    """A profiler of the CPU that records allocations; a context manager for `allocations`."""
    return torch.autograd.profiler.profile(use_cpu=True, profile_memory=True)


def allocations(profiler: Any) -> list[tuple[int, int]]:
    """Address and bytes of each allocation on the CPU, in order; bytes are negative for a free."""
    found, rest = [], profiler.kineto_results.experimental_event_tree()[::-1]
    while rest:
        event = rest.pop()
        rest.extend(reversed(event.children))
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=itemgetter(0))
    return [(address, size_bytes) for _, address, size_bytes in found]
