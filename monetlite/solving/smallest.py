"""The smallest feasible budget: a bound proven for every schedule, and a peak that a known one reaches."""

import time
from collections.abc import Callable, Iterable

from monetlite.core.costs import Profile
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.bounds import smallest_budget_bound
from monetlite.solving.exhaustive import SmallestPeak, exhaustive_smallest_peak
from monetlite.solving.options import Outline

SMALL_OPERATORS = 40
"""Graphs of at most so many operators are tried exhaustively; larger ones have too many states."""


def smallest_budget(
    profile: Profile,
    *,
    seconds: float,
    seed: int = 0,
    starts: Iterable[tuple[Step, ...]] = (),
    should_stop: Callable[[], bool] | None = None,
) -> SmallestPeak:
    """Bracket the smallest feasible budget: exact for small graphs, a bound and a search's best otherwise.

    Args:
        profile: the graph and its costs.
        seconds: about how long to take.
        seed: of the search.
        starts: legal steps known already.
        should_stop: asked now and then; stop early when it says so.
    """
    deadline = time.monotonic() + seconds
    proven_bytes = smallest_budget_bound(profile)
    steps = min(starts, key=lambda candidate: simulate(profile, candidate).peak_bytes, default=None)
    if not Outline.of(profile).runnable:
        return SmallestPeak(proven_bytes=proven_bytes, reached_bytes=None, steps=None, complete=True)
    if len(profile.graph.operators) <= SMALL_OPERATORS:
        exact = exhaustive_smallest_peak(
            profile, at_least_bytes=proven_bytes, start=steps, seconds=seconds / 2, should_stop=should_stop
        )
        if exact.complete:
            return exact
        proven_bytes, steps = max(proven_bytes, exact.proven_bytes), exact.steps
    from monetlite.solving.leanest import minimise_peak

    left = deadline - time.monotonic()
    if left > 0 and not (should_stop is not None and should_stop()):
        known = () if steps is None else (steps,)
        found = minimise_peak(profile, seconds=left, seed=seed, starts=known, should_stop=should_stop)
        if steps is None or found.peak_bytes < simulate(profile, steps).peak_bytes:
            steps = found.steps
    reached_bytes = None if steps is None else simulate(profile, steps).peak_bytes
    return SmallestPeak(
        proven_bytes=proven_bytes,
        reached_bytes=reached_bytes,
        steps=steps,
        complete=reached_bytes == proven_bytes,
    )
