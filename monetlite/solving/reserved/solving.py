"""Schedules for a budget of reserved memory: what `nvidia-smi` shows, in place of what is allocated.

One is found for a peak of the budget, and one for less. From these `arrange` looks for schedules whose tensors come
to lie without gaps. Where it finds none, memory has to go back to the GPU within the step, and the budget of the
peak is lowered until that is enough.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from monetlite.allocator.allocator import PAGE_BYTES
from monetlite.allocator.reserved import Reserved, least_limit, reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError, IllegalSchedule, InfeasibleBudget
from monetlite.core.schedule import Schedule, Status
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes
from monetlite.solving.reserved.arranging import arrange

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

SolveOnce: TypeAlias = Callable[[int, float, Sequence[Schedule]], Schedule]
"""Solves for a peak in bytes, in so many seconds, from schedules to begin with."""
AsSchedule: TypeAlias = Callable[[tuple[Step, ...], str], Schedule]
"""Makes a schedule of steps, and of the name of what found them. Raises `IllegalSchedule` where they are not one
within the budget."""


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
    time_limit: float,
    solve: SolveOnce,
    as_schedule: AsSchedule,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    seed: int = 0,
) -> Schedule:
    """The fastest schedule found that runs within a budget of reserved memory, `starts` included.

    Its bound is that of all schedules whose peak is within the budget, which are more. Where nothing fits in the
    time limit, lowered budgets of the peak take up to twice that again.

    Raises:
        InfeasibleBudget: nothing fits, or nothing was found.
    """
    began = time.monotonic()
    given = list(_legal(starts, "start", as_schedule))
    target_bytes = budget_bytes
    found = solve(target_bytes, time_limit * FOR_THE_PEAK, given)
    bound_ms = found.lower_bound_ms
    candidates = [*given, found]
    within = _reserved(profile, found, budget_bytes)
    if within.fits and not within.releases:
        candidates.append(solve(budget_bytes, time_limit * (1 - FOR_THE_PEAK), [found]))
        bound_ms = max(bound_ms, candidates[-1].lower_bound_ms)
    else:
        with suppress(InfeasibleBudget):
            candidates.append(solve(int(budget_bytes * _LESS), time_limit * FOR_LESS, ()))
        steps = [item.steps(profile.graph) for item in candidates]
        arranged = arrange(profile, steps, budget_bytes, seconds=time_limit * ARRANGING, seed=seed)
        how = f"{found.solver} + arranging"
        candidates += _legal([] if arranged is None else [arranged], how, as_schedule)
    reached_bytes = [item.smallest_reached_bytes for item in candidates if item.smallest_reached_bytes is not None]
    best = _best_within(profile, budget_bytes, candidates)
    least_bytes = min(least_limit(profile, item) for item in candidates)
    for _ in range(MOST_ROUNDS):
        if best is not None:
            break
        over_bytes = max(0, least_limit(profile, found) - budget_bytes) + int(budget_bytes * _STEP)
        target_bytes = min(found.peak_bytes, target_bytes) - over_bytes
        try:
            found = solve(target_bytes, time_limit * FOR_THE_PEAK, ())
        except InfeasibleBudget as error:
            raise _no_room(budget_bytes, least_bytes, error) from error
        least_bytes = min(least_bytes, least_limit(profile, found))
        best = _best_within(profile, budget_bytes, [found])
    if best is None:
        raise _no_room(budget_bytes, least_bytes, None)
    status = Status.OPTIMAL if best.latency_ms <= bound_ms else Status.FEASIBLE
    return replace(
        best,
        budget_bytes=budget_bytes,
        lower_bound_ms=bound_ms,
        status=status,
        smallest_proven_bytes=max(item.smallest_proven_bytes for item in candidates),
        smallest_reached_bytes=min(reached_bytes, default=best.peak_bytes),
        seconds=time.monotonic() - began,
    )


def _legal(steps: Iterable[tuple[Step, ...]], solver: str, as_schedule: AsSchedule) -> Iterator[Schedule]:
    for item in steps:
        with suppress(IllegalSchedule):  # over the budget, or not for these sizes
            yield as_schedule(item, solver)


def _reserved(profile: Profile, schedule: Schedule, budget_bytes: int) -> Reserved:
    return reserve(profile, schedule, expandable=True, limit_bytes=budget_bytes)


def _best_within(profile: Profile, budget_bytes: int, schedules: Iterable[Schedule]) -> Schedule | None:
    """The best of some schedules that runs within a budget of reserved memory, counting what releases may cost."""
    found = [
        (item, _reserved(profile, item, budget_bytes)) for item in schedules if item.peak_bytes <= budget_bytes
    ]
    fitting = [(item, within) for item, within in found if within.fits]
    if not fitting:
        return None
    best, within = min(fitting, key=lambda pair: pair[0].latency_ms + RELEASE_MS * pair[1].releases)
    needed_bytes = least_limit(profile, best) if within.releases else within.peak_bytes + PAGE_BYTES
    return replace(best, reserved_bytes=min(needed_bytes, budget_bytes))


def _no_room(budget_bytes: int, least_bytes: int, error: InfeasibleBudget | None) -> InfeasibleBudget:
    asked = f"a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) of reserved memory"
    least = f"; the least that a schedule was found for is {format_bytes(least_bytes)}"
    return InfeasibleBudget(
        f"no schedule was found for {asked}, though peaks are within it{least}. Raise the budget, or lower the "
        "batch or the input size",
        budget_bytes=budget_bytes,
        proven_bytes=error.proven_bytes if error is not None else 0,
        reached_bytes=least_bytes,
    )


__all__ = ["AsSchedule", "SolveOnce", "refuse_without_gpu", "solve_reserved"]
