"""The smallest feasible budget: a bound proven for every schedule, and a peak that a known one reaches."""

import threading
from collections.abc import Callable, Iterable

from monetlite.core.costs import Profile
from monetlite.core.steps import Step, plain_steps
from monetlite.solving.annealing.compiling import is_ready, load
from monetlite.solving.baselines import checkpointing_settings
from monetlite.solving.blocks.deep_step import DeepStep, in_blocks
from monetlite.solving.blocks.nested_plans import nested_plans, unit_places
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.clock import now
from monetlite.solving.exhaustive import exhaustive_smallest_peak
from monetlite.solving.incumbent import Incumbent, Solution
from monetlite.solving.problem import Problem
from monetlite.solving.side_by_side import CORES, THREADS, side_by_side

SMALL_OPERATORS = 40
"""Graphs of at most so many operators are tried exhaustively; larger ones have too many states."""
_SETTINGS_SHARE = 0.1
"""Part of the time for settings of checkpointing."""
_PLANS_SHARE = 0.3
"""Part of the time for plans of blocks."""
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
    began = now()
    incumbent = Incumbent(Problem.of(profile), _NOTHING_FITS)
    for steps in starts:
        incumbent.offer(steps, "start")
    for steps in checkpointing_settings(profile):
        incumbent.offer(steps, "checkpointing")
        if now() >= began + _SETTINGS_SHARE * seconds:
            break
    bracket_smallest(incumbent, seconds=began + seconds - now(), seed=seed, enough_bytes=enough_bytes)
    return incumbent.solution(infeasible=True)


def bracket_smallest(
    incumbent: Incumbent,
    *,
    seconds: float,
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    enough_bytes: int = 0,
    deep: DeepStep | None = None,
) -> None:
    """Raise the smallest budget that is proven, and lower the smallest peak that is reached.

    Args:
        incumbent: what is found and proven goes to it, and its steps of the smallest peak are improved on.
        seconds, seed, enough_bytes: as in `smallest_budget`.
        should_stop: asked now and then; stop early when it says so.
        deep: the step in blocks, with plans, if it is known.
    """
    problem = incumbent.problem
    deadline = now() + seconds
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
    elif is_ready():
        load()
        _nest_plans(incumbent, deep, seconds=deadline - now(), seed=seed, should_stop=should_stop)
    left = deadline - now()
    if left > 0 and not should_stop():
        _lower_in_threads(incumbent, seconds=left, seed=seed, should_stop=should_stop, enough_bytes=enough_bytes)


def _nest_plans(
    incumbent: Incumbent, deep: DeepStep | None, *, seconds: float, seed: int, should_stop: Callable[[], bool]
) -> None:
    """Offer the leanest schedule that nests plans of blocks."""
    profile, began = incumbent.problem.profile, now()
    deep = deep or in_blocks(profile, seed)
    if deep is None:
        return
    missing = {end - start for start, end in unit_places(len(deep.blocks)) if (start, end) not in deep.plans()}

    def over(share: float) -> Callable[[], bool]:
        return lambda: now() >= began + share * seconds or should_stop()

    for length in sorted(missing):
        deep.sweep(length, _PLANS_SHARE * seconds / len(missing), over(_PLANS_SHARE))
    nested = nested_plans(deep)
    if nested is None:
        return
    incumbent.offer(plain_steps(profile.graph), "smallest")
    assert incumbent.smallest_bytes is not None
    leanest = nested.leanest(incumbent.smallest_bytes, over(1.0))
    if leanest is not None:
        incumbent.offer(leanest.steps, "blocks")


def _lower_in_threads(
    incumbent: Incumbent, *, seconds: float, seed: int, should_stop: Callable[[], bool], enough_bytes: int
) -> None:
    """Lower the peak in two threads, each by itself: where one is stuck, the other may not be."""
    from monetlite.solving.annealing.lowest_peak import lower_peak

    enough = threading.Event()

    def lower(number: int, ended: Callable[[], bool]) -> Incumbent:
        own = Incumbent(incumbent.problem, incumbent.budget_bytes)
        if incumbent.smallest_steps is not None:
            own.offer(incumbent.smallest_steps, "start")
        lower_peak(
            own,
            seconds=seconds,
            seed=THREADS * seed + number,
            should_stop=ended,
            enough_bytes=enough_bytes,
        )
        if own.smallest_bytes is not None and own.smallest_bytes <= enough_bytes:
            enough.set()
        return own

    for own in side_by_side(range(CORES), lower, lambda: should_stop() or enough.is_set()):
        for steps in (own.smallest_steps, own.steps):
            if steps is not None:
                incumbent.offer(steps, "smallest")
