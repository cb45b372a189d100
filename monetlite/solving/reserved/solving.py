"""Schedules for a budget of reserved memory: what `nvidia-smi` shows, in place of what is allocated.

One is found for a peak of the budget, and one for less. From these `arrange` looks for schedules whose tensors come
to lie without gaps. Where it finds none, memory has to go back to the GPU within the step, and the budget of the
peak is lowered until that is enough.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from monetlite.allocator.allocator import PAGE_BYTES
from monetlite.allocator.reserved import least_limit, reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError, IllegalSchedule
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.steps import Step
from monetlite.solving.race import Progress, Solution
from monetlite.solving.reserved.arranging import arrange
from monetlite.solving.solve import solve_peak

RELEASE_MS = 10.0
"""What giving memory back once is taken to cost, where schedules are compared: it waits for the GPU, and gigabytes
are unmapped and mapped page by page. Assumed, not measured; no step time has it."""
FOR_THE_PEAK, FOR_LESS, ARRANGING = 0.25, 0.15, 0.6
"""Shares of the time."""
MOST_ROUNDS = 8
"""With lowered budgets, while nothing fits, of `FOR_THE_PEAK` each."""
_LESS = 0.87
"""Of the budget: the second peak that is solved for."""
_STEP = 0.004
"""Of the budget: by how much more than the last schedule was over it, it is lowered from round to round."""


def refuse_without_gpu(profile: Profile) -> None:
    """Refuse a budget of reserved memory where nothing reserves any.

    Raises:
        DeviceError: the costs are a CPU's.
    """
    if profile.device == "cpu":
        raise DeviceError(
            "memory is reserved on GPUs; these costs are a CPU's: leave out reserved=True (--reserved)"
        )


def solve_reserved(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the fastest schedule that runs within a budget of reserved memory, `starts` included.

    Its bound is that of all schedules whose peak is within the budget, which are more. Where nothing fits in the
    time limit, lowered budgets of the peak take up to twice that again.

    Args:
        profile, starts, progress: as in `solve_peak`.
        budget_bytes: of reserved memory.
        options: time limit, seed and solver.

    Raises:
        DeviceError: the costs are a CPU's.
        SolverError: the solver is unknown or not installed.
    """
    refuse_without_gpu(profile)
    began = time.monotonic()
    known = list(starts)

    def solve(peak_bytes: int, share: float, found: Iterable[tuple[Step, ...]] = ()) -> Solution:
        shorter = replace(options, time_limit=share * options.time_limit)
        return solve_peak(profile, peak_bytes, shorter, starts=[*known, *found], progress=progress)

    given = list(_legal(profile, budget_bytes, known, "start"))
    target_bytes = budget_bytes
    first = found = solve(target_bytes, FOR_THE_PEAK)
    if found.steps is None:
        return found
    candidates = [*given, found]
    within = reserve(profile, found.steps, expandable=True, limit_bytes=budget_bytes)
    if within.fits and not within.releases:
        candidates.append(solve(budget_bytes, 1 - FOR_THE_PEAK, [found.steps]))
        bound_ms = max(first.lower_bound_ms, candidates[-1].lower_bound_ms)
    else:
        candidates.append(solve(int(budget_bytes * _LESS), FOR_LESS))
        bound_ms = first.lower_bound_ms
        steps = [item.steps for item in candidates if item.steps is not None]
        arranged = arrange(profile, steps, budget_bytes, seconds=options.time_limit * ARRANGING, seed=options.seed)
        if arranged is not None:
            candidates += _legal(profile, budget_bytes, [arranged], f"{found.solver} + arranging")
    candidates = [item for item in candidates if item.steps is not None]
    best = _best_within(profile, budget_bytes, candidates)
    least_bytes = min(_least_limit(profile, item) for item in candidates)
    for _ in range(MOST_ROUNDS):
        if best is not None:
            break
        over_bytes = max(0, _least_limit(profile, found) - budget_bytes) + int(budget_bytes * _STEP)
        assert found.peak_bytes is not None
        target_bytes = min(found.peak_bytes, target_bytes) - over_bytes
        found = solve(target_bytes, FOR_THE_PEAK)
        if found.steps is None:
            break
        least_bytes = min(least_bytes, _least_limit(profile, found))
        best = _best_within(profile, budget_bytes, [found])
    proven_bytes = max(item.smallest_proven_bytes for item in candidates)
    seconds = time.monotonic() - began
    if best is None or best.latency_ms is None:
        return replace(
            first,
            status=Status.TIMEOUT,
            steps=None,
            latency_ms=None,
            peak_bytes=None,
            smallest_proven_bytes=proven_bytes,
            reserved_bytes=least_bytes,
            seconds=seconds,
        )
    reached = [item.smallest_reached_bytes for item in candidates if item.smallest_reached_bytes is not None]
    return replace(
        best,
        lower_bound_ms=bound_ms,
        status=Status.OPTIMAL if best.latency_ms <= bound_ms else Status.FEASIBLE,
        smallest_proven_bytes=proven_bytes,
        smallest_reached_bytes=min(reached, default=best.peak_bytes),
        seconds=seconds,
    )


def _legal(
    profile: Profile, budget_bytes: int, steps: Iterable[tuple[Step, ...]], solver: str
) -> Iterator[Solution]:
    """The steps that are a schedule for these sizes, with a peak within the budget."""
    for item in steps:
        with suppress(IllegalSchedule):
            solution = Solution.of_steps(profile, item, solver=solver)
            if solution.peak_bytes is not None and solution.peak_bytes <= budget_bytes:
                yield solution


def _least_limit(profile: Profile, solution: Solution) -> int:
    assert solution.steps is not None
    return least_limit(profile, solution.steps)


def _best_within(profile: Profile, budget_bytes: int, solutions: Iterable[Solution]) -> Solution | None:
    """The best of some solutions that runs within a budget of reserved memory, counting what releases may cost."""
    found = [
        (item, reserve(profile, item.steps, expandable=True, limit_bytes=budget_bytes))
        for item in solutions
        if item.steps is not None and item.peak_bytes is not None and item.peak_bytes <= budget_bytes
    ]
    fitting = [(item, within) for item, within in found if within.fits]
    if not fitting:
        return None
    best, within = min(fitting, key=lambda pair: (pair[0].latency_ms or 0.0) + RELEASE_MS * pair[1].releases)
    needed_bytes = _least_limit(profile, best) if within.releases else within.peak_bytes + PAGE_BYTES
    return replace(best, reserved_bytes=min(needed_bytes, budget_bytes))


__all__ = ["refuse_without_gpu", "solve_reserved"]
