"""Schedules of one priced step, for one budget or for several."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike
from typing import Any

from monetlite.core.binding import bind, lacking
from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError, ScheduleMismatch
from monetlite.core.files.documents import common_fields
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import SolvingOptions, solving_options
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.planning.advice import LeastPeak
from monetlite.solving import solve_profile
from monetlite.solving.baselines import known_schedules
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem
from monetlite.solving.sweep import sweep_profile


def solve(
    profile: Profile,
    budget: str | int | float,
    *,
    starts: Iterable[Schedule] = (),
    progress: Callable[[Solution], None] | None = None,
    **options: Any,
) -> Schedule:
    """Find the fastest schedule within a memory budget.

    Args:
        profile: from `monetlite.profile`.
        budget: the whole step's peak (weights, buffers, inputs, gradients, activations, workspace, and the
            optimizer's state if the profile has one): `"6GB"`, `"6GiB"`, bytes, or `"50%"` of plain
            training's peak.
        starts: schedules for the same graph, of any sizes, to begin from, such as one for a smaller budget:
            the result is never slower than those that fit. Those that run what the options rule out are left aside.
        progress: called as the incumbent and the bound improve.
        **options: `tolerance`, `implementations`, `reserved`, `time_limit`, `gap`, `solver` and `seed`, as in
            `optimize`.

    Raises:
        BudgetError: the budget can't be read.
        ScheduleMismatch: a start is for another graph.
        InfeasibleBudget: nothing fits, or nothing was found; says the smallest budget that is known to do.
        SolverError: the solver is not installed.
        DeviceError: `reserved`, and costs that are not a GPU's.
        ModelError: an unknown option, or one that is out of range.
    """
    return solve_budget(profile, budget, solving_options(options), starts=starts, progress=progress)


def sweep(
    profile: Profile,
    budgets: str | float | Iterable[str | int | float],
    *,
    progress: Callable[[int, Solution], None] | None = None,
    **options: Any,
) -> dict[str | int | float, Schedule | None]:
    """Solve for several budgets, where more memory never gives a slower schedule.

    Each solve begins from the schedules of the smaller budgets.

    Args:
        profile: from `monetlite.profile`.
        budgets: as in `solve`, in any order.
        progress: called with the budget in bytes, and how its solve stands.
        **options: as in `solve`; the time limit is of all budgets together, by default 60 s for each.

    Returns:
        The schedule of each budget; None where nothing fits or nothing was found.

    Raises:
        BudgetError, SolverError, DeviceError, ModelError: as in `solve`.
    """
    asked = [budgets] if isinstance(budgets, (str, int, float)) else list(budgets)
    solving = solving_options({"time_limit": SolvingOptions.time_limit * max(1, len(asked)), **options})
    _require_profile(profile)
    profile = solving.allowed(profile)
    plain_peak_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
    in_bytes = {budget: parse_budget(budget, plain_peak_bytes) for budget in asked}
    with interrupts_kept():
        solutions = sweep_profile(profile, list(in_bytes.values()), solving, progress=progress)
    found = {size: solution for size, solution in solutions.items() if solution.steps is not None}
    return {
        budget: as_schedule(profile, size, found[size], solving.tolerance) if size in found else None
        for budget, size in in_bytes.items()
    }


def solve_budget(
    profile: Profile,
    budget: str | int | float,
    options: SolvingOptions,
    *,
    starts: Iterable[Schedule] = (),
    progress: Callable[[Solution], None] | None = None,
) -> Schedule:
    """Find the fastest schedule within a memory budget; args and errors as in `solve`."""
    _require_profile(profile)
    profile = options.allowed(profile)
    budget_bytes = parse_budget(budget, simulate(profile, plain_steps(profile.graph)).peak_bytes)
    known: list[tuple[Step, ...]] = []
    for start in starts:
        if start.structure != profile.graph.structure:
            raise ScheduleMismatch(
                f"the schedule to start from is for another graph ({start.name}, {start.operators} operators)"
            )
        if not lacking(start, profile.graph):
            known.append(start.choices.steps(profile.graph))
    solution = solve_profile(profile, budget_bytes, options, starts=known, progress=progress)
    if solution.steps is None:
        raise _nothing_fits(profile, budget_bytes, solution)
    return as_schedule(profile, budget_bytes, solution, options.tolerance)


def _require_profile(profile: object) -> None:
    if isinstance(profile, (str, PathLike)):
        raise ModelError(f"give a profile, not its file's name: monetlite.load_profile({str(profile)!r})")
    if not isinstance(profile, Profile):
        raise ModelError(f"give a profile, as monetlite.profile makes, not {type(profile).__name__}")


def as_schedule(profile: Profile, budget_bytes: int, solution: Solution, tolerance: float) -> Schedule:
    """A solution that has steps, in the form that is saved and shared."""
    assert solution.steps is not None
    graph = profile.graph
    timeline = simulate(profile, solution.steps, budget_bytes)
    plain = simulate(profile, plain_steps(graph))
    own: dict[str, Any] = {
        "operators": len(graph.traced),
        "choices": Choices.of_steps(graph, solution.steps),
        "budget_bytes": budget_bytes,
        "peak_bytes": timeline.peak_bytes,
        "latency_ms": timeline.latency_ms,
        "plain_peak_bytes": plain.peak_bytes,
        "plain_latency_ms": plain.latency_ms,
        "kind": str(profile.kind),
        "environment": dict(profile.environment),
        "tolerance": tolerance,
    }
    return Schedule(**common_fields(Schedule, graph, profile, solution) | own)


def rescale(schedule: Schedule, profile: Profile, plain: Profile) -> Schedule:
    """Price the choices of a schedule by other costs: at another batch or on another device.

    Args:
        schedule: of the same model, at any batch and for any device.
        profile: the model at the new batch, in the schedule's layout.
        plain: the same as plain training runs it.

    Returns:
        A schedule whose budget is its peak, and whose bound is what the operators take at the least: solving
        anew may find a faster one.

    Raises:
        ScheduleMismatch: the graph is another one; says where.
    """
    profile = profile.within(schedule.tolerance)
    problem = Problem.of(profile)
    solution = replace(
        Solution.of_steps(profile, bind(schedule, profile.graph), method="rescaled"),
        lower_bound_ms=problem.least_latency_ms,
        smallest_proven_bytes=smallest_budget_bound(problem),
    )
    assert solution.peak_bytes is not None
    before = simulate(plain, plain_steps(plain.graph))
    return replace(
        as_schedule(profile, solution.peak_bytes, solution, schedule.tolerance),
        name=schedule.name,
        source=schedule.source,
        plain_peak_bytes=before.peak_bytes,
        plain_latency_ms=before.latency_ms,
    )


def _nothing_fits(profile: Profile, budget_bytes: int, solution: Solution) -> InfeasibleBudget:
    proven_bytes, reached_bytes = solution.smallest_proven_bytes, solution.smallest_reached_bytes
    advice = "Raise the budget, or lower the batch or the input size"
    amount = f"{format_bytes(budget_bytes)} ({budget_bytes} bytes)"
    if solution.reserved_bytes is not None:
        reached_bytes = solution.reserved_bytes
        problem = (
            f"no schedule was found for a budget of {amount} of reserved memory, though peaks are within it; the "
            f"least that a schedule was found for is {format_bytes(reached_bytes)}"
        )
    elif solution.status is Status.INFEASIBLE:
        needed = f"{format_bytes(proven_bytes)} ({proven_bytes} bytes)"
        problem = f"budget {amount} is too small: every schedule needs at least {needed}"
    else:
        problem = f"no schedule was found within budget {amount}, though it is not proven that there is none"
    if solution.smallest_reached_steps is not None and solution.reserved_bytes is None:
        least = LeastPeak.of_steps(profile, solution.smallest_reached_steps, others=tuple(known_schedules(profile)))
        reached = f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), {least.place()}"
        problem += f"; the smallest peak reached is {reached}"
        advice = least.advice(budget_bytes)
    return InfeasibleBudget(
        f"{problem}.\n{advice}", budget_bytes=budget_bytes, proven_bytes=proven_bytes, reached_bytes=reached_bytes
    )
