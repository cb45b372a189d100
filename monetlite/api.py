"""The pipeline in four calls: trace, profile, solve, and the three in one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from monetlite.choices import Choices
from monetlite.costs import Profile
from monetlite.errors import DeviceError, InfeasibleBudget
from monetlite.graph import OPTIMIZER_STEP, OperatorGraph
from monetlite.schedule import Schedule, Status, plain_steps, simulate
from monetlite.units import format_bytes, parse_budget

if TYPE_CHECKING:
    from torch import nn

    from monetlite.solving.solve import Progress
    from monetlite.tracing import Inputs


def profile(
    graph: OperatorGraph,
    device: str | None = None,
    *,
    optimizer: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Price every implementation of every operator of a graph.

    Args:
        graph: from `monetlite.trace`.
        device: `"cpu"` or `"cuda"` to measure on this machine, or the name of a device to estimate
            (`"a100-40gb"`); by default, the device the graph was traced on.
        optimizer: `"sgd"`, `"momentum"`, `"adam"` or `"adamw"`, to count its state and its step in the peak.
        progress: told (calls measured, calls in all) while measuring.

    Raises:
        DeviceError: an unknown device, or one this machine does not have.
        ProfileError: an operator can't be measured.
        ModelError: an unknown optimizer.
    """
    from monetlite.profiling.optimizers import with_optimizer

    device = device or graph.device
    if device in ("cpu", "cuda"):
        from monetlite.profiling.measured import measure_profile

        if device != graph.device:
            raise DeviceError(
                f"the graph was traced on {graph.device}, so its operators can't be measured on {device}; "
                f"move the model and the inputs there before tracing, or name a device to estimate"
            )
        made = measure_profile(graph, device, progress=progress)
    else:
        from monetlite.profiling.estimate import estimate_profile

        made = estimate_profile(graph, device)
    return made if optimizer is None else with_optimizer(made, optimizer)


def solve(
    profile: Profile,
    budget: str | int | float,
    *,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
    progress: "Callable[[Progress], None] | None" = None,
) -> Schedule:
    """Find the fastest schedule within a memory budget.

    Args:
        profile: from `monetlite.profile`.
        budget: the whole step's peak (weights, buffers, inputs, gradients, activations, workspace, and the
            optimizer's state if the profile has one): `"6GB"`, `"6GiB"`, bytes, or `"50%"` of plain
            training's peak.
        time_limit: seconds until the best schedule found is returned, with a bound on how much better any
            schedule could be.
        solver: for the exact program: `"SCIP"`, `"HIGHS"`, or `"GUROBI"` where it is installed.
        seed: of the search; the same seed gives the same schedule as far as time limits allow.
        progress: told the incumbent and the bound as they improve.

    Raises:
        BudgetError: the budget can't be read.
        InfeasibleBudget: nothing fits, or nothing was found; says the smallest budget that is known to do.
        SolverError: the solver is not installed.
    """
    from monetlite.solving.solve import solve_profile

    graph = profile.graph
    plain = simulate(profile, plain_steps(graph))
    budget_bytes = parse_budget(budget, plain.peak_bytes)
    solution = solve_profile(
        profile, budget_bytes, time_limit=time_limit, seed=seed, solver=solver, progress=progress
    )
    if solution.steps is None:
        raise _nothing_fits(profile, budget_bytes, solution.status, solution.smallest_proven_bytes, solution)
    timeline = simulate(profile, solution.steps, budget_bytes)
    return Schedule(
        name=graph.name,
        fingerprint=graph.fingerprint,
        structure=graph.structure,
        operators=sum(operator.family != OPTIMIZER_STEP for operator in graph.operators),
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
        smallest_proven_bytes=solution.smallest_proven_bytes,
        smallest_reached_bytes=solution.smallest_reached_bytes,
    )


def optimize(
    model: "nn.Module",
    example_inputs: "Inputs",
    budget: str | int | float,
    *,
    device: str | None = None,
    optimizer: str | None = None,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
) -> Schedule:
    """Trace a model, price its operators and solve for a schedule within a budget.

    Args and errors are those of `trace`, `profile` and `solve`.
    """
    from monetlite.tracing import trace

    graph = trace(model, example_inputs)
    priced = profile(graph, device, optimizer=optimizer)
    return solve(priced, budget, time_limit=time_limit, solver=solver, seed=seed)


def _nothing_fits(
    profile: Profile, budget_bytes: int, status: Status, proven_bytes: int, solution: object
) -> InfeasibleBudget:
    reached: int | None = getattr(solution, "smallest_reached_bytes", None)
    steps = getattr(solution, "smallest_reached_steps", None)
    where = ""
    if steps is not None:
        timeline = simulate(profile, steps)
        where = f" (at {profile.graph.operators[timeline.steps[timeline.peak_step][0]].name})"
    asked = f"budget {format_bytes(budget_bytes)} ({budget_bytes} bytes)"
    if status is Status.INFEASIBLE:
        least = f"{format_bytes(proven_bytes)} ({proven_bytes} bytes)"
        problem = f"{asked} is too small: no schedule needs less than {least}"
    else:
        problem = f"no schedule was found within {asked}, though it is not proven that there is none"
    known = f"; the smallest peak reached is {format_bytes(reached)} ({reached} bytes){where}" if reached else ""
    return InfeasibleBudget(
        f"{problem}{known}. Raise the budget, or lower the batch or the input size",
        budget_bytes=budget_bytes,
        proven_bytes=proven_bytes,
        reached_bytes=reached,
    )
