"""Memory that torch's CUDA allocator reserves for a schedule, which `nvidia-smi` shows beside the context.

A peak is of allocated memory. The allocator reserves more: between blocks in use lie free ones that no request
fits, and a schedule that recomputes leaves more of them than plain training does. Reserved memory can be computed,
because a schedule makes the same requests in the same order every step.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from monetlite.allocator.allocator import PAGE_BYTES, Allocator
from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step

_STEPS = 3
"""Training steps that are run: the second finds the memory that the first reserved, and may reserve more."""
_PRECISION = 0.002
"""Of the peak: how closely the smallest limit is looked for."""


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The allocator's memory for a schedule, training step after training step.

    Attributes:
        peak_bytes: the most that it has reserved, what is always in memory included.
        releases: how often in a step it gives memory back to the GPU to stay within the limit, and waits for the
            GPU to do so.
        fits: whether every request is met within the limit; else there is an out-of-memory error on a GPU.
    """

    peak_bytes: int
    releases: int
    fits: bool


def refuse_without_gpu(profile: Profile) -> None:
    """Refuse a budget of reserved memory where nothing reserves any.

    Raises:
        DeviceError: the costs are a CPU's.
    """
    if profile.device == "cpu":
        raise DeviceError(
            "memory is reserved on GPUs; these costs are a CPU's: leave out reserved=True (--reserved)"
        )


def reserve(
    profile: Profile,
    schedule: Schedule | Iterable[Step],
    *,
    expandable: bool,
    limit_bytes: int | None = None,
) -> Reserved:
    """Run a schedule's requests through the allocator, for some training steps.

    Args:
        profile, schedule: as `simulate` takes them.
        expandable: with `expandable_segments:True`.
        limit_bytes: the most that may be reserved, what is always in memory included, as `limit_reserved` sets it.

    What is always in memory is taken to lie without gaps in segments of its own, and each operator to ask for its
    results first and then for all of its workspace at once.

    Raises:
        IllegalSchedule: as `simulate`.
    """
    timeline = simulate(profile, schedule)
    return _run(list(requests_of(profile.graph, timeline)), timeline.resident_bytes, expandable, limit_bytes)


def least_limit(profile: Profile, schedule: Schedule | Iterable[Step]) -> int:
    """The smallest limit on reserved memory within which a schedule runs with expandable segments, in bytes.

    To within 0.2% of the peak, from above. What runs within a limit runs within most larger ones, not by a law.
    """
    timeline = simulate(profile, schedule)
    requests = list(requests_of(profile.graph, timeline))

    def fits(limit_bytes: int) -> bool:
        return _run(requests, timeline.resident_bytes, True, limit_bytes).fits

    step = max(1, int(timeline.peak_bytes * _PRECISION))
    least, most = timeline.peak_bytes, _run(requests, timeline.resident_bytes, True, None).peak_bytes
    while not fits(most):
        least, most = most, most + max(step, PAGE_BYTES)
    while least < most:
        middle = least + (most - least) // (2 * step) * step
        if fits(middle):
            most = middle
        else:
            least = middle + step
    return most


def _run(
    requests: Sequence[tuple[int, int]], resident_bytes: int, expandable: bool, limit_bytes: int | None
) -> Reserved:
    left_bytes = None if limit_bytes is None else limit_bytes - PAGE_BYTES - resident_bytes
    allocator = Allocator(expandable=expandable, limit_bytes=left_bytes)
    before = 0
    for _ in range(_STEPS):
        before = allocator.releases
        blocks: dict[int, tuple[int, int]] = {}
        for number, size in requests:
            if size:
                blocks[number] = allocator.allocate(size)
            else:
                allocator.free(blocks.pop(number))
    return Reserved(
        peak_bytes=resident_bytes + allocator.peak_reserved_bytes,
        releases=allocator.releases - before,
        fits=not allocator.failures,
    )


def requests_of(graph: OperatorGraph, timeline: Timeline) -> Iterator[tuple[int, int]]:
    """(number of a request, bytes asked for) of a step in order; 0 bytes where what was asked for is freed.

    A result in the memory of an operand that dies has that operand's block from there on.
    """
    numbers = itertools.count()
    size = [value.size_bytes for value in graph.values]
    block_of: dict[int, int] = {}
    steps = zip(timeline.steps, timeline.workspace_bytes, timeline.frees, strict=True)
    for (index, choice), workspace_bytes, frees in steps:
        implementation = graph.operators[index].implementations[choice]
        overwritten = list(implementation.overwrites)
        for value in implementation.writes:
            if value in block_of or not size[value]:
                continue
            taken = next((item for item in overwritten if size[item] == size[value] and item in block_of), None)
            if taken is None:
                block_of[value] = next(numbers)
                yield block_of[value], size[value]
            else:
                overwritten.remove(taken)
                block_of[value] = block_of.pop(taken)
        if workspace_bytes > 0:
            workspace = next(numbers)
            yield workspace, workspace_bytes
            yield workspace, 0
        for value in sorted(frees):
            if value in block_of:
                yield block_of.pop(value), 0
    yield from ((block, 0) for block in block_of.values())
