"""The pipeline in four calls: trace, profile, solve, and the three in one."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.errors import DeviceError, InfeasibleBudget, ModelError, ScheduleMismatch
from monetlite.core.graph import OperatorGraph
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.planning.unplanned import unplanned_loss

ALL, DEFAULT_ONLY = "all", "default"
"""Which implementations may be chosen."""

if TYPE_CHECKING:
    from torch import nn

    from monetlite.solving.race import Progress, Solution
    from monetlite.tracing import Inputs


def profile(
    graph: OperatorGraph,
    device: str | None = None,
    *,
    optimizer: str | None = None,
    accumulate: bool = False,
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Price every implementation of every operator of a graph.

    Args:
        graph: from `monetlite.trace`.
        device: `"cpu"` or `"cuda"` to measure on this machine, or the name of a device to estimate
            (`"a100-40gb"`); by default, the device the graph was traced on.
        optimizer: `"sgd"`, `"momentum"`, `"adam"` or `"adamw"`, to count its state and its step in the peak.
        accumulate: count gradients that are there when the step begins: gradient accumulation, or
            `zero_grad(set_to_none=False)`.
        tolerance: price only what can be chosen within this tolerance (see `solve`), which is quicker to measure.
        progress: told (calls measured, calls in all) while measuring.

    Raises:
        DeviceError: an unknown device, or one this machine does not have.
        ProfileError: an operator can't be measured.
        ModelError: an unknown optimizer.
    """
    if device not in (None, "cpu", "cuda"):
        from monetlite.profiling.attention import attention_problem

        if problem := attention_problem(graph, device):
            warnings.warn(problem, stacklevel=2)
    return price(graph, device, optimizer=optimizer, accumulate=accumulate, tolerance=tolerance, progress=progress)


def price(
    graph: OperatorGraph,
    device: str | None,
    *,
    optimizer: str | None = None,
    accumulate: bool = False,
    tolerance: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """`profile` for whatever graph, though the device may run other operators than it has."""
    from monetlite.profiling.step_additions import with_accumulation, with_optimizer

    if tolerance is not None:
        _checked_tolerance(tolerance)
    device = str(device or graph.device)
    if device.lower() in ("cpu", "cuda"):
        device = device.lower()
    if device in ("cpu", "cuda"):
        from monetlite.profiling.measured import measure_profile

        if device != graph.device:
            raise DeviceError(
                f"the graph was traced on {graph.device}, so its operators can't be measured on {device}; "
                f"move the model and the inputs there before tracing, or name a device to estimate"
            )
        made = measure_profile(graph, device, tolerance=tolerance, progress=progress)
    else:
        from monetlite.profiling.estimate import estimate_profile

        made = estimate_profile(graph, device)
        if tolerance is not None:
            made = made.within(tolerance)
    if optimizer is not None:
        made = with_optimizer(made, optimizer)
    return with_accumulation(made) if accumulate else made


def solve(
    profile: Profile,
    budget: str | int | float,
    *,
    tolerance: float = 0.0,
    implementations: str = ALL,
    reserved: bool = False,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
    starts: "Iterable[Schedule]" = (),
    progress: "Callable[[Progress], None] | None" = None,
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
            traced (what Checkmate does, Jain et al., MLSys 2020).
        reserved: the budget is of what torch's CUDA allocator reserves, which `nvidia-smi` shows, in a script that
            calls `monetlite.limit_reserved`; computed from the schedule's requests. Where memory is hard to fill
            without gaps, solving takes up to three times the time limit.
        time_limit: seconds until the best schedule found is returned, with a bound on how much better any
            schedule could be.
        solver: for the exact program: `"SCIP"`, `"HIGHS"`, or `"GUROBI"` where it is installed.
        seed: of the search; the same seed gives the same schedule as far as time limits allow.
        starts: schedules for the same graph, of whatever sizes, to begin from, such as one for a smaller budget:
            the result is never slower than those that fit.
        progress: told the incumbent and the bound as they improve.

    Raises:
        BudgetError: the budget can't be read.
        ScheduleMismatch: a start is for another graph.
        InfeasibleBudget: nothing fits, or nothing was found; says the smallest budget that is known to do.
        SolverError: the solver is not installed.
        DeviceError: `reserved`, and costs that are not a GPU's.
    """
    from monetlite.solving.solve import solve_profile

    profile = profile.within(_checked_tolerance(tolerance))
    if implementations not in (ALL, DEFAULT_ONLY):
        raise ModelError(f"implementations {implementations!r} is neither {ALL!r} nor {DEFAULT_ONLY!r}")
    if implementations == DEFAULT_ONLY:
        profile = profile.restricted(lambda _: False)
    plain = simulate(profile, plain_steps(profile.graph))
    known = [_steps_of(profile.graph, start) for start in starts]

    def solve_once(budget_bytes: int, seconds: float, found: Iterable[Schedule]) -> Schedule:
        solution = solve_profile(
            profile,
            budget_bytes,
            time_limit=seconds,
            seed=seed,
            solver=solver,
            starts=[*known, *(_steps_of(profile.graph, start) for start in found)],
            progress=progress,
        )
        if solution.steps is None:
            raise _nothing_fits(profile, budget_bytes, solution.status, solution.smallest_proven_bytes, solution)
        return as_schedule(profile, plain, budget_bytes, solution, solution.steps, tolerance)

    if not 0 < time_limit < math.inf:
        raise ModelError(f"time_limit {time_limit}: seconds, more than 0")
    budget_bytes = parse_budget(budget, plain.peak_bytes)
    if not reserved:
        return solve_once(budget_bytes, time_limit, ())
    from monetlite.solving.race import Solution
    from monetlite.solving.reserved.solving import refuse_without_gpu, solve_reserved

    refuse_without_gpu(profile)

    def as_found(steps: tuple[Step, ...], solver: str) -> Schedule:
        given = Solution.of_steps(profile, steps, solver=solver)
        return as_schedule(profile, plain, budget_bytes, given, steps, tolerance)

    return solve_reserved(profile, budget_bytes, time_limit, solve_once, as_found, starts=known, seed=seed)


def sweep(
    profile: Profile,
    budgets: "str | float | Iterable[str | int | float]",
    *,
    tolerance: float = 0.0,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
    progress: "Callable[[int, Progress], None] | None" = None,
) -> "dict[str | int | float, Schedule | None]":
    """Solve for several budgets, where more memory never gives a slower schedule.

    Each solve begins from the schedules of the smaller budgets.

    Args:
        profile: from `monetlite.profile`.
        budgets: as in `solve`, in any order.
        tolerance: as in `solve`.
        time_limit: seconds for each budget.
        solver, seed: as in `solve`.
        progress: told the budget in bytes, and how its solve stands.

    Returns:
        The schedule of each budget; None where nothing fits or nothing was found.

    Raises:
        BudgetError: a budget can't be read.
        SolverError: the solver is not installed.
    """
    from monetlite.solving.sweep import sweep_profile

    profile = profile.within(_checked_tolerance(tolerance))
    plain = simulate(profile, plain_steps(profile.graph))
    asked = [budgets] if isinstance(budgets, (str, int, float)) else budgets
    in_bytes = {budget: parse_budget(budget, plain.peak_bytes) for budget in asked}
    with interrupts_kept():
        solutions = sweep_profile(
            profile, list(in_bytes.values()), time_limit=time_limit, seed=seed, solver=solver, progress=progress
        )
    schedules: dict[str | int | float, Schedule | None] = {}
    for budget, budget_bytes in in_bytes.items():
        solution = solutions[budget_bytes]
        schedules[budget] = (
            None
            if solution.steps is None
            else as_schedule(profile, plain, budget_bytes, solution, solution.steps, tolerance)
        )
    return schedules


def _steps_of(graph: OperatorGraph, schedule: Schedule) -> tuple[Step, ...]:
    """The steps of a schedule for the same graph, for whatever budget, device and sizes.

    Raises:
        ScheduleMismatch: it is for another graph.
    """
    if schedule.structure != graph.structure:
        raise ScheduleMismatch(
            f"the schedule to start from is for another graph ({schedule.name}, {schedule.operators} operators)"
        )
    return schedule.choices.steps(graph)


def as_schedule(
    profile: Profile,
    plain: Timeline,
    budget_bytes: int,
    solution: "Solution",
    steps: tuple[Step, ...],
    tolerance: float,
) -> Schedule:
    """A solution's steps as what is saved and shared."""
    graph = profile.graph
    timeline = simulate(profile, steps, budget_bytes)
    return Schedule(
        name=graph.name,
        fingerprint=graph.fingerprint,
        structure=graph.structure,
        operators=graph.traced_count,
        operator_digests=graph.operator_digests,
        inputs=graph.inputs,
        choices=Choices.of_steps(graph, steps),
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
        source=profile.source,
    )


def optimize(
    model: "nn.Module",
    example_inputs: "Inputs",
    budget: str | int | float,
    *,
    device: str | None = None,
    optimizer: str | None = None,
    accumulate: bool = False,
    tolerance: float = 0.0,
    layout: str | None = None,
    implementations: str = ALL,
    reserved: bool = False,
    time_limit: float = 60.0,
    solver: str = "SCIP",
    seed: int = 0,
    starts: "Iterable[Schedule]" = (),
    runs_here: bool = False,
) -> Schedule:
    """Trace a model, price its operators and solve for a schedule within a budget.

    Args and errors are those of `trace`, `profile` and `solve`. Without a `layout`, one that changes the order
    of sums is tried too where `tolerance` allows that, and the faster schedule returned. `runs_here` solves for the
    operators that run where the model is, though costs are estimated for another device.
    """
    from monetlite.planning.layouts import layouts_to_try, solve_layouts
    from monetlite.tracing import trace
    from monetlite.tracing.build import on_its_gpu

    runs_on = None if runs_here else device
    with on_its_gpu(model, example_inputs):
        profiles = [
            price(
                trace(model, example_inputs, device=runs_on, layout=chosen),
                device,
                optimizer=optimizer,
                accumulate=accumulate,
                tolerance=tolerance,
            )
            for chosen in layouts_to_try(layout, tolerance)
        ]
    with interrupts_kept():
        schedule = solve_layouts(
            profiles,
            budget,
            tolerance=tolerance,
            layout=layout,
            implementations=implementations,
            reserved=reserved,
            time_limit=time_limit,
            solver=solver,
            seed=seed,
            starts=starts,
        )
    if outside := unplanned_loss(profiles[0].graph, schedule.budget_bytes):
        warnings.warn(outside, stacklevel=2)
    return schedule


def _checked_tolerance(tolerance: float) -> float:
    if not 0 <= tolerance < 1:
        raise ModelError(
            f"tolerance {tolerance} is not a fraction; 0 asks for the same bits, 1e-5 allows sums in another order"
        )
    return tolerance


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
