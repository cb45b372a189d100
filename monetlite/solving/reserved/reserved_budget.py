"""Schedules for a budget of reserved memory, which `nvidia-smi` shows, in place of allocated memory.

One is found for a peak of the budget, and one for less. From these `arrange` looks for schedules whose tensors lie
without gaps. Where it finds none, memory has to go back to the GPU within the step, and the budget of the peak is
lowered until that is enough.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from monetlite.allocator.allocator import PAGE_BYTES
from monetlite.allocator.reserved import Reserved, least_limit, refuse_without_gpu, reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.steps import Step
from monetlite.solving.incumbent import Solution
from monetlite.solving.reserved.arranging import arrange
from monetlite.solving.solver import solve_peak

RELEASE_MS = 10.0
"""Assumed cost of giving memory back once, where schedules are compared: it waits for the GPU, and gigabytes are
unmapped and mapped page by page. It is not measured, and no step time has it."""
FOR_THE_PEAK, FOR_LESS, ARRANGING = 0.25, 0.15, 0.6
"""Parts of the time."""
MAX_ROUNDS = 8
"""Rounds with lowered budgets, while nothing fits, of `FOR_THE_PEAK` each."""
_LESS = 0.87
"""The second peak that is solved for, over the budget."""
_STEP = 0.004
"""Part of the budget by which it is lowered from round to round, beyond the last schedule's excess."""


def solve_reserved(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Solution], None] | None = None,
) -> Solution:
    """Solve for a budget of reserved memory, as `monetlite.solving.solve_profile` says.

    The result is the fastest schedule found that runs within it, `starts` included. Its bound is that of all
    schedules whose peak is within the budget, which are more. Where nothing fits in the time limit, lowered budgets
    of the peak take up to twice that again. Where peaks are within the budget, but no schedule that runs within it
    was found, the result has no steps, and `reserved_bytes` is the least that any schedule needs that was seen.

    Raises:
        DeviceError: the costs are a CPU's.
        SolverError: the solver is unknown or not installed.
    """
    refuse_without_gpu(profile)
    began = time.monotonic()
    known = list(starts)

    def solve(target_bytes: int, share: float, found: Sequence[Solution] = ()) -> Solution:
        return solve_peak(
            profile,
            target_bytes,
            replace(options, time_limit=options.time_limit * share),
            starts=[*known, *(item.steps for item in found if item.steps is not None)],
            progress=progress,
        )

    candidates: list[Solution] = []
    for steps in known:
        with suppress(IllegalSchedule):  # not for these sizes
            candidates.append(Solution.of_steps(profile, steps, method="start"))
    found = solve(budget_bytes, FOR_THE_PEAK)
    if found.steps is None:
        return found
    candidates.append(found)
    within = _reserved(profile, found.steps, budget_bytes)
    if within.fits and not within.releases:
        candidates.append(solve(budget_bytes, 1 - FOR_THE_PEAK, [found]))
    else:
        candidates.append(replace(solve(int(budget_bytes * _LESS), FOR_LESS), lower_bound_ms=0.0))
        given = [item.steps for item in candidates if item.steps is not None]
        seconds = options.time_limit * ARRANGING
        arranged = arrange(profile, given, budget_bytes, seconds=seconds, seed=options.seed)
        if arranged is not None:
            made = Solution.of_steps(profile, arranged, method="arranging")
            candidates.append(replace(made, methods=(*found.methods, "arranging")))
    bound_ms = max(item.lower_bound_ms for item in candidates)
    proven_bytes = max(item.smallest_proven_bytes for item in candidates)
    best = _best_within(profile, budget_bytes, candidates)
    least_bytes = min(least_limit(profile, item.steps) for item in candidates if item.steps is not None)
    target_bytes = budget_bytes
    for _ in range(MAX_ROUNDS):
        if best is not None:
            break
        assert found.steps is not None
        assert found.peak_bytes is not None
        over_bytes = max(0, least_limit(profile, found.steps) - budget_bytes) + int(budget_bytes * _STEP)
        target_bytes = min(found.peak_bytes, target_bytes) - over_bytes
        found = solve(target_bytes, FOR_THE_PEAK)
        if found.steps is None:
            break
        least_bytes = min(least_bytes, least_limit(profile, found.steps))
        best = _best_within(profile, budget_bytes, [found])
    seconds = time.monotonic() - began
    if best is None or best.latency_ms is None:
        return Solution(
            status=Status.TIMEOUT,
            lower_bound_ms=bound_ms,
            smallest_proven_bytes=proven_bytes,
            reserved_bytes=least_bytes,
            seconds=seconds,
        )
    smallest = min(candidates, key=lambda item: item.smallest_reached_bytes or budget_bytes)
    return replace(
        best,
        lower_bound_ms=bound_ms,
        status=Status.OPTIMAL if best.latency_ms <= bound_ms else Status.FEASIBLE,
        smallest_proven_bytes=proven_bytes,
        smallest_reached_bytes=smallest.smallest_reached_bytes,
        smallest_reached_steps=smallest.smallest_reached_steps,
        seconds=seconds,
    )


def _reserved(profile: Profile, steps: Sequence[Step], budget_bytes: int) -> Reserved:
    return reserve(profile, steps, expandable=True, limit_bytes=budget_bytes)


def _best_within(profile: Profile, budget_bytes: int, solutions: Iterable[Solution]) -> Solution | None:
    """The best of some solutions that runs within a budget of reserved memory, counting what releases may cost."""
    best: Solution | None = None
    best_ms = float("inf")
    for item in solutions:
        if item.steps is None or item.latency_ms is None or (item.peak_bytes or 0) > budget_bytes:
            continue
        within = _reserved(profile, item.steps, budget_bytes)
        latency_ms = item.latency_ms + RELEASE_MS * within.releases
        if within.fits and latency_ms < best_ms:
            needed_bytes = least_limit(profile, item.steps) if within.releases else within.peak_bytes + PAGE_BYTES
            best, best_ms = replace(item, reserved_bytes=min(needed_bytes, budget_bytes)), latency_ms
    return best


__all__ = ["solve_reserved"]
