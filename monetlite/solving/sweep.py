"""Several budgets for one profile, each with what the others know."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from monetlite.core.costs import Profile
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.steps import Step
from monetlite.solving import solve_profile
from monetlite.solving.clock import now
from monetlite.solving.incumbent import PROVEN_GAP, Solution

MIN_SECONDS = 0.1
"""The least time of a budget, where those before it took more than their share."""


def sweep_profile(
    profile: Profile,
    budgets_bytes: Sequence[int],
    options: SolvingOptions,
    *,
    starts: Sequence[tuple[Step, ...]] = (),
    progress: Callable[[int, Solution], None] | None = None,
) -> dict[int, Solution]:
    """Solve for several budgets; a larger one never has the slower schedule, nor the higher bound.

    The smallest budget comes first, since its schedule fits all others: each solve begins from those before
    it. A bound for a budget holds for every smaller one, and what is proven infeasible makes all smaller
    budgets so.

    Args:
        profile: the graph and its costs.
        budgets_bytes: the budgets, in any order.
        options: as in `solve_profile`; the time limit is of all budgets together. Each has an equal share of what
            those before it left.
        starts: steps that every solve begins from, beside the schedules of the smaller budgets.
        progress: told the budget, and its solution so far.

    Raises:
        SolverError, DeviceError: as in `solve_profile`.
    """
    ascending = sorted(set(budgets_bytes))
    solutions: dict[int, Solution] = {}
    found: list[tuple[Step, ...]] = []
    deadline = now() + options.time_limit
    for number, budget_bytes in enumerate(ascending):
        share = (deadline - now()) / (len(ascending) - number)
        solution = solve_profile(
            profile,
            budget_bytes,
            replace(options, time_limit=max(MIN_SECONDS, share)),
            starts=[*starts, *found[-2:]],
            progress=None if progress is None else partial(progress, budget_bytes),
        )
        found += [steps for steps in (solution.smallest_reached_steps, solution.steps) if steps is not None]
        solutions[budget_bytes] = solution
    proven_bytes = max((solution.smallest_proven_bytes for solution in solutions.values()), default=0)
    bound_ms = 0.0
    for budget_bytes in reversed(ascending):
        solution = solutions[budget_bytes]
        bound_ms = max(bound_ms, solution.lower_bound_ms)
        solutions[budget_bytes] = _with(solution, budget_bytes, bound_ms, proven_bytes)
    return solutions


def _with(solution: Solution, budget_bytes: int, bound_ms: float, proven_bytes: int) -> Solution:
    """The same solution, with what the other budgets proved."""
    status = solution.status
    if solution.latency_ms is not None:
        bound_ms = min(bound_ms, solution.latency_ms)
        if solution.latency_ms <= bound_ms * (1 + PROVEN_GAP):
            status = Status.OPTIMAL
    elif budget_bytes < proven_bytes:
        status = Status.INFEASIBLE
    return replace(solution, status=status, lower_bound_ms=bound_ms, smallest_proven_bytes=proven_bytes)
