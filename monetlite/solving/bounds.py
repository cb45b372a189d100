"""Lower bounds that hold for every legal schedule: on its latency within a budget, and on its peak.

The latency bound comes from dual multipliers of the relaxation in `relaxation`, whoever computed them and
however exactly: Lagrangian duality turns *any* non-negative multipliers into a valid bound (`dual_bound_ms`),
so a solver's tolerances, or its running out of time, cost quality and never validity.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from monetlite.core.costs import Profile
from monetlite.solving.highs import minimise_dual_bound, solve_linear
from monetlite.solving.lifetimes import certain_lifetimes, own_bytes, pinned
from monetlite.solving.options import Option, Outline
from monetlite.solving.relaxation import Meaning, relaxation
from monetlite.solving.zero_one import Floats, ZeroOneProgram

_ROUNDING = 1e-11
"""How much of the summed magnitudes a floating-point bound gives up, to stay below its exact value."""
_BRANCH_AND_BOUND_ROUNDING = 2e-6
"""How much of a branch-and-bound's dual bound is given up for the solver's tolerances (1e-6)."""
_AVAILABILITY_LIMIT = 1_000_000
"""Backward operators times forward ones, beyond which `smallest_budget_bound` leaves out its second part."""


def trivial_bound_ms(profile: Profile) -> float:
    """Every main operator once, each with its fastest implementation: in ms."""
    return math.fsum(Outline.of(profile).main_least_ms)


def dual_bound_ms(program: ZeroOneProgram, multipliers: Floats) -> float:
    """The Lagrangian bound of a 0-1 program for the multipliers of its rows, rounded down.

    For multipliers λ ≥ 0 and every feasible x, cost·x ≥ cost·x + λ·(matrix·x − limit), and the right side is
    least when each column takes the sign of its reduced cost, one column in each group.
    """
    if not np.all(np.isfinite(multipliers)):
        return -math.inf
    multipliers = np.maximum(multipliers, 0.0)
    reduced_ms = program.cost_ms + program.matrix.T @ multipliers
    single = program.group < 0
    least_of_group = np.full(program.groups, np.inf)
    np.minimum.at(least_of_group, program.group[~single], reduced_ms[~single])
    terms = np.concatenate(
        [
            np.minimum(reduced_ms[single], 0.0),
            least_of_group,
            -multipliers * program.limit,
            [program.constant_ms],
        ]
    )
    magnitude = float(np.abs(terms).sum() + (abs(program.matrix).T @ multipliers).sum())
    return math.fsum(terms.tolist()) - _ROUNDING * magnitude


@dataclass(frozen=True, kw_only=True)
class LatencyBound:
    """A bound on the latency of every schedule within the budget.

    Attributes:
        lower_bound_ms: the bound; infinite if it proves that there are none.
        program: the relaxation it came from, for `integer_bound` to continue with.
        meaning: of its columns.
        solution: of its linear relaxation, between 0 and 1 for each column.
    """

    lower_bound_ms: float
    program: ZeroOneProgram | None = None
    meaning: Meaning | None = None
    solution: Floats | None = None


def latency_bound(
    profile: Profile,
    budget_bytes: int,
    *,
    seconds: float,
    checkpoint_limit: int = 60,
    value_limit: int = 400,
) -> LatencyBound:
    """Bound the latency of every legal schedule within a budget by a linear program.

    Args:
        profile: the graph and its costs.
        budget_bytes: the budget.
        seconds: the most that the linear program may take; unfinished, it still gives a bound.
        checkpoint_limit, value_limit: how fine the relaxation is; see `relaxation`.

    Raises:
        SolverError: HiGHS is not installed.
    """
    outline = Outline.of(profile)
    least_ms = math.fsum(outline.main_least_ms)
    if not outline.runnable:
        return LatencyBound(lower_bound_ms=math.inf)
    began = time.monotonic()
    program, meaning = relaxation(outline, budget_bytes, checkpoint_limit=checkpoint_limit, value_limit=value_limit)
    if program.cost_ms.size == 0 or program.limit.size == 0:
        return LatencyBound(lower_bound_ms=least_ms)
    solution, multipliers = solve_linear(program, seconds=max(0.1, seconds - (time.monotonic() - began)))
    bound_ms = least_ms if multipliers is None else max(least_ms, dual_bound_ms(program, multipliers))
    return LatencyBound(lower_bound_ms=bound_ms, program=program, meaning=meaning, solution=solution)


def integer_bound(
    program: ZeroOneProgram,
    *,
    seconds: float,
    cutoff_ms: float = math.inf,
    on_bound: Callable[[float], None] | None = None,
    on_solution: Callable[[Floats], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> float:
    """Tighten a relaxation's bound by branch and bound and cuts (HiGHS): its dual bound, in ms, rounded down.

    Every legal schedule is a 0-1 point of the relaxation, so the dual bound is valid for all of them,
    finished or not. `cutoff_ms`, the latency of a known schedule, prunes what could only confirm it: the
    result is never above it. Rounding leaves a gap of 0.0002% where the cutoff itself is proven.

    Args:
        program: the relaxation.
        seconds: when to stop.
        cutoff_ms: the latency of a schedule that is known.
        on_bound: told of the bound as it rises.
        on_solution: told of the columns of each better solution of the relaxation; looking for them takes time.
        should_stop: asked often.

    Raises:
        SolverError: HiGHS is not installed.
    """
    dual_ms = minimise_dual_bound(
        program,
        seconds=seconds,
        cutoff_ms=cutoff_ms,
        on_bound=None if on_bound is None else lambda bound_ms: on_bound(_rounded_down(bound_ms)),
        on_solution=on_solution,
        should_stop=should_stop,
    )
    return _rounded_down(min(dual_ms, cutoff_ms))


def _rounded_down(bound_ms: float) -> float:
    return bound_ms - _BRANCH_AND_BOUND_ROUNDING * abs(bound_ms) if math.isfinite(bound_ms) else bound_ms


def smallest_budget_bound(profile: Profile) -> int:
    """A number of bytes below which no schedule fits, however slow.

    Each main operator needs the values that are live across it whatever the schedule (`certain_lifetimes`),
    and its own reads, outputs and workspace. What it reads was either kept since the forward part, past every
    operator in between, or made again somewhere, beside what was certainly live there, from what was
    available there by the same argument: the least peak of all those ways, value by value, is a bound too.
    """
    outline = Outline.of(profile)
    if not outline.runnable:
        return outline.resident_bytes
    lifetimes = certain_lifetimes(outline)
    nothing: frozenset[int] = frozenset()
    needs = [
        [
            (option, lifetimes.fixed_bytes[at] + own_bytes(outline, at, option, lifetimes, nothing))
            for option in outline.options[operator]
        ]
        for at, operator in enumerate(outline.main)
    ]
    bound = max((min(need for _, need in ways) for ways in needs), default=0)
    backward = len(outline.main) - outline.forward_main
    if backward * len(outline.extra) <= _AVAILABILITY_LIMIT:
        bound = max(bound, _availability_bound(outline, needs))
    return outline.resident_bytes + max(bound, 0)


def _availability_bound(outline: Outline, needs: list[list[tuple[Option, int]]]) -> int:
    """The second part of `smallest_budget_bound`: the peak without which reads can't be live."""
    lifetimes = certain_lifetimes(outline)
    size = np.array(outline.size_bytes, dtype=np.int64)
    forward, count = outline.forward_main, len(outline.main)
    # peak[v]: no schedule has v live just before the present place with a smaller peak so far. Values with
    # several makers, and those of the backward part, are not followed: 0 is a bound for them.
    followed = np.array(
        [
            len(makers) == 1 and outline.is_forward(makers[0]) and value in outline.always_writes[makers[0]]
            for value, makers in enumerate(outline.producers)
        ],
        dtype=bool,
    )
    peak = np.zeros(len(size), dtype=np.int64)
    runs = [
        (
            operator,
            sorted(value for value in outline.must_read[operator] if followed[value]),
            sorted(value for value in outline.always_writes[operator] if followed[value]),
            [
                (
                    option.reads,
                    sum(outline.size_bytes[value] for value in option.writes if not outline.held[value])
                    + min(option.first_extra_bytes, option.again_extra_bytes),
                )
                for option in outline.options[operator]
            ],
        )
        for operator in outline.extra
        if outline.options[operator]
    ]
    made_at = np.full(len(size), count, dtype=np.int64)
    for value, makers in enumerate(outline.producers):
        if followed[value] and makers[0] in outline.position:
            made_at[value] = outline.position[makers[0]]
    bound = 0
    for at in range(count):
        if at >= forward:
            for _, reads, writes, ways in runs:
                here = min(
                    extra
                    + sum(outline.size_bytes[v] for v in option_reads if not pinned(outline, lifetimes, v, at))
                    for option_reads, extra in ways
                )
                here = max([lifetimes.fixed_bytes[at] + here, *(int(peak[value]) for value in reads)])
                for value in writes:
                    if here < peak[value]:
                        peak[value] = here
        bound = max(
            bound,
            min(
                max([need, *(int(peak[value]) for value in option.reads if followed[value])])
                for option, need in needs[at]
            ),
        )
        # Keeping a value past this operator takes the operator's memory, with the value beside its reads.
        least = min(need for _, need in needs[at])
        beside = least + size
        for value in {value for option, _ in needs[at] for value in option.reads}:
            beside[value] = min(
                need + (0 if value in option.reads else int(size[value])) for option, need in needs[at]
            )
        for value in np.flatnonzero(followed).tolist():
            if pinned(outline, lifetimes, value, at):
                beside[value] = least
        alive = followed & (made_at < at)
        peak[alive] = np.maximum(peak[alive], beside[alive])
    return bound
