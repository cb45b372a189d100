"""Searches around a schedule: with a little more memory, with a little less, and for the smallest peak."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.step_analysis import StepAnalysis
from monetlite.core.steps import Step, stored_values
from monetlite.reporting.analysis_tensors import PeakStep, peak_step_of
from monetlite.solving import solve_profile
from monetlite.solving.incumbent import Solution


@dataclass(frozen=True, kw_only=True)
class StoredByOne:
    """A tensor that one of two schedules stores and the other doesn't. `recomputed`: the other runs it again."""

    name: str
    size_bytes: int
    recomputed: bool


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best schedule found for another budget, beside the present one.

    Attributes:
        budget_bytes, seconds, status: of the solve.
        latency_ms, peak_bytes: predicted; None if nothing was found. reserved_bytes: as in `Schedule`.
        lower_bound_ms: no schedule within that budget is faster; needed_bytes: none needs less (both proven).
        stored: tensors that it stores and the present one doesn't; dropped: the reverse; largest first.
    """

    budget_bytes: int
    seconds: float
    status: Status
    latency_ms: float | None
    peak_bytes: int | None
    lower_bound_ms: float
    needed_bytes: int
    reserved_bytes: int | None = None
    stored: tuple[StoredByOne, ...] = ()
    dropped: tuple[StoredByOne, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LowestPeak:
    """The smallest peak: `proven_bytes` at least; `peak` is the leanest schedule's that was found in `seconds`."""

    proven_bytes: int
    seconds: float
    peak: PeakStep


@dataclass(frozen=True, kw_only=True)
class Around:
    """Results of the searches around a schedule; None for those that were not run."""

    limit: LowestPeak | None = None
    more: Alternative | None = None
    less: Alternative | None = None


def alternative(
    profile: Profile,
    steps: tuple[Step, ...],
    budget_bytes: int,
    options: SolvingOptions,
    *,
    known_bound_ms: float = 0.0,
    progress: Callable[[Solution], None] | None = None,
) -> Alternative:
    """Solve for another budget, beginning from the steps of the present schedule.

    Args:
        profile: the graph and its costs.
        steps: the present schedule's, whatever its budget.
        budget_bytes: the other budget.
        options: of the search.
        known_bound_ms: a bound for that budget that is known already.
        progress: as in `monetlite.solve`.
    """
    solution = solve_profile(profile, budget_bytes, options, starts=[steps], progress=progress)
    there = solution.steps
    return Alternative(
        budget_bytes=budget_bytes,
        seconds=solution.seconds,
        status=solution.status,
        latency_ms=solution.latency_ms,
        peak_bytes=solution.peak_bytes,
        lower_bound_ms=max(solution.lower_bound_ms, known_bound_ms),
        needed_bytes=solution.smallest_proven_bytes,
        reserved_bytes=solution.reserved_bytes,
        stored=() if there is None else stored_by_one(profile.graph, there, steps),
        dropped=() if there is None else stored_by_one(profile.graph, steps, there),
    )


def stored_by_one(graph: OperatorGraph, one: tuple[Step, ...], other: tuple[Step, ...]) -> tuple[StoredByOne, ...]:
    """Tensors that cross the border under the steps of one schedule and not under those of the other."""
    runs = Counter(index for index, _ in other)
    found = [
        StoredByOne(
            name=graph.values[value].name,
            size_bytes=graph.values[value].size_bytes,
            recomputed=runs[graph.writer[value]] > 1,
        )
        for value in set(stored_values(graph, one)) - set(stored_values(graph, other))
    ]
    return tuple(sorted(found, key=lambda item: (-item.size_bytes, item.name)))


def lowest_peak(profile: Profile, steps: tuple[Step, ...], options: SolvingOptions) -> LowestPeak:
    """Look for the smallest peak of any schedule, from the steps of the present one, within the time limit."""
    from monetlite.solving.smallest import smallest_budget

    began = time.monotonic()
    found = smallest_budget(profile, seconds=options.time_limit, seed=options.seed, starts=[steps])
    seconds = time.monotonic() - began
    leanest = StepAnalysis(profile=profile, timeline=simulate(profile, found.smallest_reached_steps or steps))
    return LowestPeak(proven_bytes=found.smallest_proven_bytes, seconds=seconds, peak=peak_step_of(leanest))
