"""The model of torch's CUDA allocator (`monetlite.allocator`), held against what the allocator did."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from monetlite.allocator.allocator import PAGE_BYTES, Allocator

MAX_EVENTS = 500_000
GIGABYTE = 10**9
REPEATS = 5

_TAKEN, _GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


def held_to_model(
    events: Sequence[Mapping[str, Any]], *, expandable: bool, limit_bytes: int | None = None
) -> dict[str, Any]:
    """Replay recorded requests by the model, and compare the reserved memory after each.

    Args:
        events: a device's trace of `torch.cuda.memory._snapshot()`, recorded from the first allocation on.
        expandable: with `expandable_segments:True`.
        limit_bytes: the most that the allocator could reserve.

    Returns:
        The number of requests, the peaks of both in bytes, the largest difference, and the place where they part
        (None where they don't): the number of the event, its size, and both figures.
    """
    model = Allocator(expandable=expandable, limit_bytes=limit_bytes)
    blocks: dict[int, tuple[int, int]] = {}
    reserved_bytes = peak_bytes = largest_bytes = requests = 0
    parts: dict[str, int] | None = None
    for number, event in enumerate(events):
        action, size = event["action"], event["size"]
        if action in _TAKEN:
            reserved_bytes += size
            peak_bytes = max(peak_bytes, reserved_bytes)
        elif action in _GIVEN:
            reserved_bytes -= size
        elif action == "free_completed" and event["addr"] in blocks:
            model.free(blocks.pop(event["addr"]))
        elif action == "alloc" and size > 0:
            requests += 1
            blocks[event["addr"]] = model.allocate(size)
            difference = abs(model.reserved_bytes - reserved_bytes)
            largest_bytes = max(largest_bytes, difference)
            if difference and parts is None:
                parts = {
                    "event": number,
                    "size_bytes": size,
                    "reserved_bytes": reserved_bytes,
                    "by_model_bytes": model.reserved_bytes,
                }
    return {
        "requests": requests,
        "peak_reserved_bytes": peak_bytes,
        "by_model_bytes": model.peak_reserved_bytes,
        "largest_difference_bytes": largest_bytes,
        "parts": parts,
    }


def recorded(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the current GPU's allocator does while a function runs, from an empty cache on."""
    memory: Any = torch.cuda.memory
    torch.cuda.empty_cache()
    memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=MAX_EVENTS)
    try:
        run()
        torch.cuda.synchronize()
        traces: list[list[dict[str, Any]]] = memory._snapshot()["device_traces"]
    finally:
        memory._record_memory_history(enabled=None)
    return traces[torch.cuda.current_device()]


def give_back_ms() -> dict[str, float]:
    """Time to give a gigabyte of free pages back to the GPU, and to take it again, in ms; medians."""
    given, taken = [], []
    pages = GIGABYTE // PAGE_BYTES
    for _ in range(REPEATS):
        tensors = [torch.empty(PAGE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(pages)]
        torch.cuda.synchronize()
        del tensors
        began = time.perf_counter()
        torch.cuda.empty_cache()
        given.append(time.perf_counter() - began)
        began = time.perf_counter()
        tensors = [torch.empty(PAGE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(pages)]
        taken.append(time.perf_counter() - began)
        del tensors
    return {
        "given_back_ms": sorted(given)[REPEATS // 2] * 1000,
        "taken_ms": sorted(taken)[REPEATS // 2] * 1000,
        "pages": float(pages),
    }
