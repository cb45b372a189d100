"""Schedules of one priced step: for one budget, or for several."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ScheduleMismatch
from monetlite.core.graph import OperatorGraph
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import ALL_IMPLEMENTATIONS, SolvingOptions
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, parse_budget

if TYPE_CHECKING:
    from monetlite.solving.incumbent import Solution


def solve(
    profile: Profile,
    budget: str | int | float,
    *,
    tolerance: float = 0.0,
    implementations: str = ALL_IMPLEMENTATIONS,
    reserved: bool = False,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
    starts: Iterable[Schedule] = (),
    progress: "Callable[[Solution], None] | None" = None,
) -> Schedule:
    """Find the fastest schedule within a memory budget.

    Args:
        profile: from `monetlite.profile`.
        budget: the whole step's peak (weights, buffers, inputs, gradients, activations, workspace, and the
            optimizer's state if the profile has one): `"6GB"`, `"6GiB"`, bytes, or `"50%"` of plain
            training's peak.
        tolerance: how far an operator's result may be from the default implementation's, as a fraction of the
            largest sum of magnitudes on the way. 0: only implementations that make the same bits. 1e-5: also
            float32 sums in another order. 1e-4: also normalisations differentiated from their output. 4e-3:
            also activations kept as bfloat16 for their gradient.
        implementations: `"all"`, or `"default"` to store and recompute only, every operator running as it was
            traced (as Checkmate does, Jain et al., MLSys 2020).
        reserved: the budget is of the memory that torch's CUDA allocator reserves, which `nvidia-smi` shows, in a
            script that calls `monetlite.limit_reserved`; computed from the schedule's requests. Where memory is
            hard to fill without gaps, solving takes up to three times the time limit.
        time_limit: seconds until the best schedule found is returned, with a bound on how much better any
            schedule could be.
        solver: for the exact program: `"SCIP"`, `"HIGHS"`, or `"GUROBI"` where it is installed.
        seed: of the search; the same seed gives the same schedule as far as time limits allow.
        starts: schedules for the same graph, of any sizes, to begin from, such as one for a smaller budget:
            the result is never slower than those that fit.
        progress: called as the incumbent and the bound improve.

    Raises:
        BudgetError: the budget can't be read.
        ScheduleMismatch: a start is for another graph.
        InfeasibleBudget: nothing fits, or nothing was found; says the smallest budget that is known to do.
        SolverError: the solver is not installed.
        DeviceError: `reserved`, and costs that are not a GPU's.
        ModelError: an option that is out of range.
    """
    options = SolvingOptions(
        tolerance=tolerance,
        implementations=implementations,
        reserved=reserved,
        time_limit=time_limit,
        solver=solver,
        seed=seed,
    )
    return solve_budget(profile, budget, options, starts=starts, progress=progress)


def sweep(
    profile: Profile,
    budgets: str | float | Iterable[str | int | float],
    *,
    tolerance: float = 0.0,
    implementations: str = ALL_IMPLEMENTATIONS,
    reserved: bool = False,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
    progress: "Callable[[int, Solution], None] | None" = None,
) -> dict[str | int | float, Schedule | None]:
    """Solve for several budgets, where more memory never gives a slower schedule.

    Each solve begins from the schedules of the smaller budgets.

    Args:
        profile: from `monetlite.profile`.
        budgets: as in `solve`, in any order.
        tolerance: as in `solve`.
        implementations: as in `solve`.
        reserved: as in `solve`.
        time_limit: seconds for each budget.
        solver: as in `solve`.
        seed: as in `solve`.
        progress: called with the budget in bytes, and how its solve stands.

    Returns:
        The schedule of each budget; None where nothing fits or nothing was found.

    Raises:
        BudgetError: a budget can't be read.
        SolverError: the solver is not installed.
        DeviceError: `reserved`, and costs that are not a GPU's.
        ModelError: an option that is out of range.
    """
    from monetlite.solving.sweep import sweep_profile

    options = SolvingOptions(
        tolerance=tolerance,
        implementations=implementations,
        reserved=reserved,
        time_limit=time_limit,
        solver=solver,
        seed=seed,
    )
    profile = options.allowed(profile)
    plain_peak_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
    asked = [budgets] if isinstance(budgets, (str, int, float)) else budgets
    in_bytes = {budget: parse_budget(budget, plain_peak_bytes) for budget in asked}
    with interrupts_kept():
        solutions = sweep_profile(profile, list(in_bytes.values()), options, progress=progress)
    return {
        budget: None
        if solutions[budget_bytes].steps is None
        else as_schedule(profile, budget_bytes, solutions[budget_bytes], options.tolerance)
        for budget, budget_bytes in in_bytes.items()
    }


def solve_budget(
    profile: Profile,
    budget: str | int | float,
    options: SolvingOptions,
    *,
    starts: Iterable[Schedule] = (),
    progress: "Callable[[Solution], None] | None" = None,
) -> Schedule:
    """Find the fastest schedule within a memory budget; args and errors as in `solve`."""
    from monetlite.solving import solve_profile

    profile = options.allowed(profile)
    budget_bytes = parse_budget(budget, simulate(profile, plain_steps(profile.graph)).peak_bytes)
    known = [_steps_of(profile.graph, start) for start in starts]
    solution = solve_profile(profile, budget_bytes, options, starts=known, progress=progress)
    if solution.steps is None:
        raise _nothing_fits(profile, budget_bytes, solution)
    return as_schedule(profile, budget_bytes, solution, options.tolerance)


def _steps_of(graph: OperatorGraph, schedule: Schedule) -> tuple[Step, ...]:
    """The steps of a schedule for the same graph, of any budget, device and sizes.

    Raises:
        ScheduleMismatch: it is for another graph.
    """
    if schedule.structure != graph.structure:
        raise ScheduleMismatch(
            f"the schedule to start from is for another graph ({schedule.name}, {schedule.operators} operators)"
        )
    return schedule.choices.steps(graph)


def as_schedule(profile: Profile, budget_bytes: int, solution: "Solution", tolerance: float) -> Schedule:
    """A solution that has steps, in the form that is saved and shared."""
    assert solution.steps is not None
    graph = profile.graph
    timeline = simulate(profile, solution.steps, budget_bytes)
    plain = simulate(profile, plain_steps(graph))
    return Schedule(
        name=graph.name,
        fingerprint=graph.fingerprint,
        structure=graph.structure,
        operators=graph.traced_count,
        operator_digests=graph.operator_digests,
        inputs=graph.inputs,
        choices=Choices.of_steps(graph, solution.steps),
        budget_bytes=budget_bytes,
        peak_bytes=timeline.peak_bytes,
        latency_ms=timeline.latency_ms,
        lower_bound_ms=solution.lower_bound_ms,
        status=solution.status,
        plain_peak_bytes=plain.peak_bytes,
        plain_latency_ms=plain.latency_ms,
        device=profile.device,
        kind=str(profile.kind),
        solver=solution.solver,
        seconds=solution.seconds,
        environment=dict(profile.environment),
        optimizer=profile.optimizer,
        accumulate=profile.accumulate,
        tolerance=tolerance,
        layout=graph.layout,
        autocast=graph.autocast,
        smallest_proven_bytes=solution.smallest_proven_bytes,
        smallest_reached_bytes=solution.smallest_reached_bytes,
        reserved_bytes=solution.reserved_bytes,
        source=profile.source,
    )


def _nothing_fits(profile: Profile, budget_bytes: int, solution: "Solution") -> InfeasibleBudget:
    proven_bytes, reached_bytes = solution.smallest_proven_bytes, solution.smallest_reached_bytes
    amount = f"{format_bytes(budget_bytes)} ({budget_bytes} bytes)"
    if solution.reserved_bytes is not None:
        reached_bytes = solution.reserved_bytes
        problem = (
            f"no schedule was found for a budget of {amount} of reserved memory, though peaks are within it; the "
            f"least that a schedule was found for is {format_bytes(reached_bytes)}"
        )
    elif solution.status is Status.INFEASIBLE:
        least = f"{format_bytes(proven_bytes)} ({proven_bytes} bytes)"
        problem = f"budget {amount} is too small: no schedule needs less than {least}"
    else:
        problem = f"no schedule was found within budget {amount}, though it is not proven that there is none"
    if solution.reserved_bytes is None and reached_bytes is not None:
        problem += f"; the smallest peak reached is {format_bytes(reached_bytes)} ({reached_bytes} bytes)"
        if solution.smallest_reached_steps is not None:
            timeline = simulate(profile, solution.smallest_reached_steps)
            problem += f" (at {profile.graph.operators[timeline.steps[timeline.peak_step][0]].name})"
    return InfeasibleBudget(
        f"{problem}. Raise the budget, or lower the batch or the input size",
        budget_bytes=budget_bytes,
        proven_bytes=proven_bytes,
        reached_bytes=reached_bytes,
    )


__all__ = ["as_schedule", "solve", "solve_budget", "sweep"]
