"""Step time against memory: the best schedules of several budgets, beside the baselines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.solving import baselines
from monetlite.solving.annealing.compiling import announcement, ensure_compiled, is_ready
from monetlite.solving.annealing.flat_problem import flatten
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.annealing.search import search
from monetlite.solving.clock import now
from monetlite.solving.incumbent import Incumbent, Solution
from monetlite.solving.problem import Problem
from monetlite.solving.smallest import smallest_budget
from monetlite.solving.sweep import sweep_profile

BASELINE_SHARE = 0.25
"""Share of a budget's time for which each baseline is searched for that has to be."""
SEARCHED_BASELINES = 2
"""Baselines that are searched for: Checkmate and Gist."""
_COMPILING_SECONDS = 600.0

SQRT, BLOCKS = "√n checkpointing", "checkpointing every block"
CHECKMATE, GIST, GREEDY = "Checkmate", "Gist", "greedy"
"""The baselines: a single point of the first two; of the others, one for each budget that they can keep."""


@dataclass(frozen=True, kw_only=True)
class TradeoffPoint:
    """A schedule's steps with their peak and step time, and the budget that it was made for, if any."""

    peak_bytes: int
    latency_ms: float
    budget_bytes: int | None = None
    steps: tuple[Step, ...] = ()

    @classmethod
    def of_steps(cls, profile: Profile, steps: Iterable[Step], budget_bytes: int | None = None) -> Self:
        timeline = simulate(profile, steps)
        return cls(
            peak_bytes=timeline.peak_bytes,
            latency_ms=timeline.latency_ms,
            budget_bytes=budget_bytes,
            steps=timeline.steps,
        )


@dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """Results of one budget.

    Attributes:
        best: the fastest schedule found; None if there is none.
        lower_bound_ms: no schedule within the budget, or within a smaller one, is faster.
    """

    budget_bytes: int
    status: Status
    best: TradeoffPoint | None
    lower_bound_ms: float


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """Step time against memory, for one model and one device.

    Attributes:
        plain: plain training; own: the schedule that it was made for.
        budgets: ascending; more memory never has the slower schedule, nor the higher bound.
        others: points of each baseline, by its name.
        smallest_proven_bytes: nothing fits below; smallest_reached_bytes: the smallest peak of a known schedule.
        time_limit: seconds for each budget; baseline_seconds: for each budget of a baseline that is searched for.
    """

    plain: TradeoffPoint
    own: TradeoffPoint
    budgets: tuple[BudgetPoint, ...]
    others: Mapping[str, tuple[TradeoffPoint, ...]]
    smallest_proven_bytes: int
    smallest_reached_bytes: int
    time_limit: float
    baseline_seconds: float

    def overhead(self, latency_ms: float) -> float:
        """A step time over plain training's, less one."""
        return latency_ms / self.plain.latency_ms - 1 if self.plain.latency_ms > 0 else 0.0


def trade_off(
    profile: Profile,
    plain: Profile,
    steps: Sequence[Step],
    options: SolvingOptions,
    *,
    points: int = 8,
    known_bound: tuple[int, float] = (0, 0.0),
    progress: Callable[[str, int, int], None] | None = None,
) -> Tradeoff:
    """Solve for budgets between the smallest feasible one and plain training's peak, and try the baselines.

    Args:
        profile: the costs to solve with; plain: those of plain training, and of the baselines.
        steps: of a schedule on `profile`: every solve may begin from them.
        options: tolerance, time limit of everything together, and seed.
        points: number of budgets.
        known_bound: a budget, and the ms that no schedule within it is below, nor within a smaller one.
        progress: called with what is done next, and the pieces of work that are done and in all.

    Raises:
        ScheduleMismatch: the steps use an implementation that the tolerance rules out.
    """
    allowed, plain = options.allowed(profile), options.allowed(plain)
    known_bytes, known_ms = known_bound
    # The smallest budget, and each of the others with its baselines.
    time_limit = options.time_limit / (1 + points * (1 + SEARCHED_BASELINES * BASELINE_SHARE))
    seed = options.seed
    own = TradeoffPoint.of_steps(allowed, Choices.of_steps(profile.graph, steps).steps(allowed.graph))
    plain_point = TradeoffPoint.of_steps(plain, plain_steps(plain.graph))

    def begin(what: str, done: int) -> None:
        """Tell what is next, and how many pieces of work, of about the same length, are done."""
        if progress is not None:
            progress(what, done, 2 + 4 * points)

    if not is_ready():
        # No budget's time should go into this, nor its result depend on it.
        begin(announcement(), 0)
        ensure_compiled(now() + _COMPILING_SECONDS)
    begin("the smallest feasible budget", 0)
    smallest = smallest_budget(allowed, seconds=time_limit, seed=seed, starts=[own.steps])
    assert smallest.smallest_reached_steps is not None
    leanest = TradeoffPoint.of_steps(allowed, smallest.smallest_reached_steps)
    budgets = _between(leanest.peak_bytes, plain_point.peak_bytes, points, own.peak_bytes)
    others = _baselines(plain, budgets, BASELINE_SHARE * time_limit, seed, begin)
    starts = [leanest, own]
    if plain.graph.fingerprint == allowed.graph.fingerprint:
        # A baseline's steps are a schedule too: none may be faster than the one that is solved for.
        starts += _fastest(budgets, [point for of in others.values() for point in of])

    def solving(budget_bytes: int, _: Solution) -> None:
        at = budgets.index(budget_bytes)
        begin(f"budget {at + 1} of {len(budgets)}", 2 + 3 * points + at)

    solutions = sweep_profile(
        allowed,
        budgets,
        replace(options, time_limit=points * time_limit),
        starts=list(dict.fromkeys(point.steps for point in starts)),
        progress=solving,
    )
    reached = [
        item.smallest_reached_bytes for item in solutions.values() if item.smallest_reached_bytes is not None
    ]
    return Tradeoff(
        plain=plain_point,
        own=own,
        budgets=tuple(
            BudgetPoint(
                budget_bytes=budget_bytes,
                status=solution.status,
                best=None
                if solution.steps is None
                else TradeoffPoint.of_steps(allowed, solution.steps, budget_bytes),
                lower_bound_ms=max(solution.lower_bound_ms, known_ms if budget_bytes <= known_bytes else 0.0),
            )
            for budget_bytes, solution in solutions.items()
        ),
        others=others,
        smallest_proven_bytes=max(
            smallest.smallest_proven_bytes, *(item.smallest_proven_bytes for item in solutions.values())
        ),
        smallest_reached_bytes=min(leanest.peak_bytes, *reached),
        time_limit=time_limit,
        baseline_seconds=BASELINE_SHARE * time_limit,
    )


def _between(least_bytes: int, most_bytes: int, points: int, own_bytes: int) -> list[int]:
    """Budgets about the same factor apart, both ends included, and a schedule's own peak in place of the nearest.

    The least budget alone, where there is nothing between the ends.
    """
    if most_bytes <= least_bytes:
        return [least_bytes]
    factor = (most_bytes / least_bytes) ** (1 / (points - 1))
    inner = [round(least_bytes * factor**at) for at in range(1, points - 1)]
    if inner and least_bytes < own_bytes < most_bytes:
        nearest = min(range(len(inner)), key=lambda at: abs(inner[at] - own_bytes))
        inner[nearest] = own_bytes
    return sorted({least_bytes, *inner, most_bytes})


def _baselines(
    plain: Profile, budgets: Sequence[int], seconds: float, seed: int, begin: Callable[[str, int], None]
) -> dict[str, tuple[TradeoffPoint, ...]]:
    """Points of each baseline, in the order of the budgets."""
    begin("checkpointing", 1)
    found: dict[str, tuple[TradeoffPoint, ...]] = {
        SQRT: (TradeoffPoint.of_steps(plain, baselines.sqrt_checkpointing(plain)),),
        BLOCKS: (_block_checkpointing(plain),),
    }
    done = 2
    for name, restricted in (
        (CHECKMATE, baselines.restrict_checkmate(plain)),
        (GIST, baselines.restrict_gist(plain)),
    ):
        descending: list[TradeoffPoint] = []
        # From the largest budget down: below the first that nothing fits, nothing is searched for.
        for at, budget_bytes in enumerate(reversed(budgets)):
            begin(name, done + at)
            best = Incumbent(Problem.of(restricted), budget_bytes)
            search(best, seconds=seconds, seed=seed)
            if best.steps is None:
                break
            chosen = Choices.of_steps(restricted.graph, best.steps).steps(plain.graph)
            descending.append(TradeoffPoint.of_steps(plain, chosen, budget_bytes))
        found[name] = _never_slower(reversed(descending))
        done += len(budgets)
    greedy: list[TradeoffPoint] = []
    flat = flatten(Problem.of(plain))
    for at, budget_bytes in enumerate(budgets):
        begin(GREEDY, done + at)
        steps = Greedy(flat, budget_bytes).best()
        if steps is not None:
            greedy.append(TradeoffPoint.of_steps(plain, steps, budget_bytes))
    return {**found, GREEDY: tuple(greedy)}


def _block_checkpointing(plain: Profile) -> TradeoffPoint:
    """Checkpointing of every module at one depth of the model: the depth that takes least memory."""
    paths = {operator.module for operator in plain.graph.operators}
    depths = range(1, max(path.count(".") for path in paths) + 2)
    divisions = [found for depth in depths if (found := baselines.module_boundaries(plain.graph, depth))]
    made = [baselines.segment_checkpointing(plain, boundaries) for boundaries in divisions]
    points = [TradeoffPoint.of_steps(plain, steps) for steps in made or [baselines.segment_checkpointing(plain)]]
    return min(points, key=lambda point: (point.peak_bytes, point.latency_ms))


def _never_slower(ascending: Iterable[TradeoffPoint]) -> tuple[TradeoffPoint, ...]:
    """For each budget the fastest of the points for it and for smaller ones."""
    best: list[TradeoffPoint] = []
    for point in ascending:
        if best and best[-1].latency_ms <= point.latency_ms:
            point = replace(best[-1], budget_bytes=point.budget_bytes)
        best.append(point)
    return tuple(best)


def _fastest(budgets: Sequence[int], points: Sequence[TradeoffPoint]) -> list[TradeoffPoint]:
    """For each budget the fastest of the points that fit it, if any does."""
    fitting = [[point for point in points if point.peak_bytes <= budget_bytes] for budget_bytes in budgets]
    return [min(of, key=lambda point: point.latency_ms) for of in fitting if of]
