"""Schedules for a budget of reserved memory: what `nvidia-smi` shows, in place of what is allocated.

How much more than its peak a schedule reserves is known once there is a schedule. So one is found for the budget,
and others for what is left of the budget when that much is taken away.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from monetlite.allocation.reserved import least_limit, reserve
from monetlite.costs import Profile
from monetlite.errors import DeviceError, InfeasibleBudget
from monetlite.schedule import Schedule, Status
from monetlite.units import format_bytes

ROUNDS = (0.25, 0.35, 0.4)
"""Shares of the time."""
MOST_ROUNDS = 8
"""With those that follow, each as long as the last, while nothing fits."""
_STEP = 0.004
"""Of the budget: by how much more than the last schedule was over it, it is lowered from round to round."""

SolveOnce: TypeAlias = Callable[[int, float, Sequence[Schedule]], Schedule]
"""Solves for a peak in bytes, in so many seconds, from schedules to begin with."""


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
    profile: Profile, budget_bytes: int, time_limit: float, solve: SolveOnce, starts: Iterable[Schedule] = ()
) -> Schedule:
    """The fastest schedule found that runs within a budget of reserved memory, `starts` included.

    Its bound is that of all schedules whose peak is within the budget, which are more. Where three rounds find
    none, up to five more take twice the time limit again.

    Raises:
        InfeasibleBudget: nothing fits, or nothing was found.
    """
    target_bytes = budget_bytes
    bound_ms = seconds = 0.0
    best = _fastest_within(profile, budget_bytes, starts)
    least_bytes: int | None = None
    for number in range(MOST_ROUNDS):
        share = ROUNDS[min(number, len(ROUNDS) - 1)]
        try:
            found = solve(target_bytes, time_limit * share, [] if best is None else [best])
        except InfeasibleBudget as error:
            if best is None and number == 0:
                raise
            if best is None:
                raise _no_room(budget_bytes, least_bytes, error) from error
            break
        seconds += found.seconds
        if target_bytes == budget_bytes:
            bound_ms = max(bound_ms, found.lower_bound_ms)
        limit_bytes = least_limit(profile, found)
        least_bytes = limit_bytes if least_bytes is None else min(least_bytes, limit_bytes)
        if not _fits(profile, found, budget_bytes):
            over_bytes = max(0, limit_bytes - budget_bytes) + int(budget_bytes * _STEP)
            target_bytes = min(found.peak_bytes, target_bytes) - over_bytes
        elif best is None or found.latency_ms < best.latency_ms:
            best = replace(found, reserved_bytes=min(limit_bytes, budget_bytes))
        if best is not None and (number + 1 >= len(ROUNDS) or best.latency_ms <= bound_ms):
            break
    if best is None:
        raise _no_room(budget_bytes, least_bytes, None)
    status = Status.OPTIMAL if best.latency_ms <= bound_ms else Status.FEASIBLE
    return replace(best, budget_bytes=budget_bytes, lower_bound_ms=bound_ms, status=status, seconds=seconds)


def _fits(profile: Profile, schedule: Schedule, budget_bytes: int) -> bool:
    return reserve(profile, schedule, expandable=True, limit_bytes=budget_bytes).fits


def _fastest_within(profile: Profile, budget_bytes: int, schedules: Iterable[Schedule]) -> Schedule | None:
    """The fastest of some schedules that runs within a budget of reserved memory."""
    for found in sorted(schedules, key=lambda item: item.latency_ms):
        if found.peak_bytes <= budget_bytes and _fits(profile, found, budget_bytes):
            return replace(found, reserved_bytes=min(least_limit(profile, found), budget_bytes))
    return None


def _no_room(budget_bytes: int, least_bytes: int | None, error: InfeasibleBudget | None) -> InfeasibleBudget:
    asked = f"a budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes) of reserved memory"
    least = f"; the least that a schedule was found for is {format_bytes(least_bytes)}" if least_bytes else ""
    return InfeasibleBudget(
        f"no schedule was found for {asked}, though peaks are within it{least}. Raise the budget, or lower the "
        "batch or the input size",
        budget_bytes=budget_bytes,
        proven_bytes=error.proven_bytes if error is not None else 0,
        reached_bytes=least_bytes,
    )


__all__ = ["SolveOnce", "refuse_without_gpu", "solve_reserved"]
