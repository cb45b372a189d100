"""The smallest feasible budget: a bound proven for every schedule, and a peak that a known one reaches."""

import time
from collections.abc import Callable, Iterable

from monetlite.core.costs import Profile
from monetlite.core.steps import Step
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.exhaustive import exhaustive_smallest_peak
from monetlite.solving.incumbent import Incumbent, Solution
from monetlite.solving.problem import Problem

SMALL_OPERATORS = 40
"""Graphs of at most so many operators are tried exhaustively; larger ones have too many states."""
_NOTHING_FITS = -1
"""A budget for an incumbent that is about the smallest peak alone."""


def smallest_budget(
    profile: Profile,
    *,
    seconds: float,
    seed: int = 0,
    starts: Iterable[tuple[Step, ...]] = (),
    enough_bytes: int = 0,
) -> Solution:
    """Bracket the smallest feasible budget: exact for small graphs, a bound and a search's best otherwise.

    Args:
        profile: the graph and its costs.
        seconds: about how long to take.
        seed: of the search.
        starts: legal steps known already.
        enough_bytes: a peak that need not be lowered further.

    Returns:
        A solution for no budget: `smallest_proven_bytes` and `smallest_reached_bytes` are its result, with
        `smallest_reached_steps`.
    """
    problem = Problem.of(profile)
    incumbent = Incumbent(problem, _NOTHING_FITS)
    for steps in starts:
        incumbent.offer(steps, "start")
    bracket_smallest(incumbent, seconds=seconds, seed=seed, enough_bytes=enough_bytes)
    return incumbent.solution(infeasible=True)


def bracket_smallest(
    incumbent: Incumbent,
    *,
    seconds: float,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    enough_bytes: int = 0,
) -> None:
    """Raise the smallest budget that is proven, and lower the smallest peak that is reached.

    Args:
        incumbent: what is found and proven goes to it, and its steps of the smallest peak are improved on.
        seconds, seed, enough_bytes: as in `smallest_budget`.
        should_stop: asked now and then; stop early when it says so.
    """
    problem = incumbent.problem
    deadline = time.monotonic() + seconds
    incumbent.raise_smallest(smallest_budget_bound(problem))
    if not problem.runnable:
        return
    if len(problem.graph.operators) <= SMALL_OPERATORS:
        exact = exhaustive_smallest_peak(
            problem,
            at_least_bytes=incumbent.proven_bytes,
            start=incumbent.smallest_steps,
            seconds=seconds / 2,
            should_stop=should_stop,
        )
        incumbent.raise_smallest(exact.smallest_proven_bytes)
        if exact.smallest_reached_steps is not None:
            incumbent.offer(exact.smallest_reached_steps, "smallest")
        if incumbent.proven_bytes == incumbent.smallest_bytes:
            return
    from monetlite.solving.annealing.lowest_peak import lower_peak

    left = deadline - time.monotonic()
    if left > 0 and not should_stop():
        lower_peak(incumbent, seconds=left, seed=seed, should_stop=should_stop, enough_bytes=enough_bytes)
