"""What a little more memory would buy a schedule, what a little less would cost it, and how low it can go."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, stored_values
from monetlite.reporting.analysis_tensors import Peak, peak_of
from monetlite.reporting.memory import break_down

if TYPE_CHECKING:
    from monetlite.solving.incumbent import Solution


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor that one of two schedules stores and the other doesn't; `recomputed`: whether that one computes it
    again."""

    name: str
    size_bytes: int
    recomputed: bool


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best schedule found for another budget, beside the present one.

    Attributes:
        budget_bytes: what it was solved for; seconds: for how long.
        status: of the solve. Where it found nothing, latency and peak are None.
        latency_ms, peak_bytes: predicted; lower_bound_ms: no schedule within that budget is faster.
        needed_bytes: no schedule needs less (proven).
        stored: what it stores and the present one doesn't; dropped: the other way round; largest first.
    """

    budget_bytes: int
    seconds: float
    status: Status
    latency_ms: float | None
    peak_bytes: int | None
    lower_bound_ms: float
    needed_bytes: int
    stored: tuple[Kept, ...] = ()
    dropped: tuple[Kept, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How low the peak can go: `proven_bytes` at the least; `peak` is that of the leanest schedule found in so many
    seconds."""

    proven_bytes: int
    seconds: float
    peak: Peak


def alternative(
    profile: Profile,
    steps: tuple[Step, ...],
    budget_bytes: int,
    *,
    time_limit: float,
    seed: int = 0,
    known_bound_ms: float = 0.0,
    progress: "Callable[[Solution], None] | None" = None,
) -> Alternative:
    """Solve for another budget, beginning from the steps of the present schedule.

    Args:
        profile: the graph and its costs.
        steps: the present schedule's, whatever its budget.
        budget_bytes: the other budget.
        time_limit: seconds.
        seed: of the search.
        known_bound_ms: no schedule within that budget is faster, as is known already.
        progress: as in `monetlite.solve`.
    """
    from monetlite.core.options import SolvingOptions
    from monetlite.solving import solve_profile

    options = SolvingOptions(time_limit=time_limit, seed=seed)
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
        stored=() if there is None else stored_by_one(profile.graph, there, steps),
        dropped=() if there is None else stored_by_one(profile.graph, steps, there),
    )


def stored_by_one(graph: OperatorGraph, one: tuple[Step, ...], other: tuple[Step, ...]) -> tuple[Kept, ...]:
    """What the forward pass of one schedule leaves for its backward pass, and that of another doesn't."""
    differing = set(stored_values(graph, one)) - set(stored_values(graph, other))
    runs: dict[int, int] = {}
    for index, _ in other:
        runs[index] = runs.get(index, 0) + 1
    kept = [
        Kept(
            name=graph.values[value].name,
            size_bytes=graph.values[value].size_bytes,
            recomputed=runs.get(graph.writer[value], 0) > 1,
        )
        for value in differing
    ]
    return tuple(sorted(kept, key=lambda item: (-item.size_bytes, item.name)))


def limit(profile: Profile, steps: tuple[Step, ...], *, time_limit: float, seed: int = 0) -> Limit:
    """Look for the smallest peak of any schedule, beginning from the present one.

    Args:
        profile: the graph and its costs.
        steps: the present schedule's.
        time_limit: seconds; seed: of the search.
    """
    from monetlite.solving.smallest import smallest_budget

    began = time.monotonic()
    found = smallest_budget(profile, seconds=time_limit, seed=seed, starts=[steps])
    seconds = time.monotonic() - began
    leanest = found.smallest_reached_steps or steps
    parts = break_down(profile, simulate(profile, leanest))
    return Limit(proven_bytes=found.smallest_proven_bytes, seconds=seconds, peak=peak_of(profile, parts))


__all__ = ["Alternative", "Kept", "Limit", "alternative", "limit", "stored_by_one"]
