"""Schedules of one priced step, for one budget or for several; traced in one layout of its images or in several."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from monetlite.core.announcing import warn
from monetlite.core.binding import bind, lacking
from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError, ScheduleMismatch
from monetlite.core.files.documents import common_fields
from monetlite.core.graph import AS_TRACED, COMPILED_LAYOUTS, LAYOUTS, uncompiled_layout
from monetlite.core.interrupts import end_early, ended_early, interrupts_kept
from monetlite.core.options import REORDERED_SUMS, SolvingOptions, solving_options
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.planning.advice import LeastPeak

if TYPE_CHECKING:
    from monetlite.solving.incumbent import Solution

TRIAL_SHARE = 0.15
"""Share of the time limit for which each layout is tried."""
TRIALS_SHARE = 0.6
"""Share of the time limit for which all are tried, at most."""


def solve(
    profile: Profile,
    budget: str | int | float,
    *,
    starts: Iterable[Schedule] = (),
    progress: "Callable[[Solution], None] | None" = None,
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
        **options: `tolerance`, `implementations`, `reserved`, `time_limit`, `solver` and `seed`, as in `optimize`.

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
    progress: "Callable[[int, Solution], None] | None" = None,
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
    from monetlite.solving.sweep import sweep_profile

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
    progress: "Callable[[Solution], None] | None" = None,
) -> Schedule:
    """Find the fastest schedule within a memory budget; args and errors as in `solve`."""
    from monetlite.solving import solve_profile

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


def layouts_to_try(layout: str | None, tolerance: float, compile: bool = False) -> list[str]:
    """The layouts that a person's choices leave open, beginning with the model's own, which is always priced.

    Args:
        layout, tolerance: as in `monetlite.optimize`.
        compile: each layout with its regions compiled, too.
    """
    if layout not in (None, AS_TRACED) and tolerance < REORDERED_SUMS:
        raise ModelError(
            f"layout {layout!r} adds in another order than the model as it is, which tolerance "
            f"{tolerance:g} rules out; allow {REORDERED_SUMS:g} or more"
        )
    if layout is None:
        wanted = [AS_TRACED] if tolerance < REORDERED_SUMS else list(LAYOUTS)
    else:
        wanted = [layout]
    compiled = [COMPILED_LAYOUTS[item] for item in wanted] if compile else []
    return list(dict.fromkeys((AS_TRACED, *wanted, *compiled)))


def solve_layouts(
    profiles: Sequence[Profile],
    budget: str | int | float,
    options: SolvingOptions,
    *,
    layout: str | None = None,
    starts: Iterable[Schedule] = (),
    progress: "Callable[[Solution], None] | None" = None,
) -> Schedule:
    """Solve one step that was traced in several layouts, for the fastest schedule of any.

    Each layout is solved for a short while; the better one then has the rest of the time. Ctrl-C ends it all early.
    The result's bounds are of all layouts.

    Args:
        profiles: of the same model, the first as plain training runs it: budgets in percent and overheads are
            relative to that one.
        budget, progress: as in `solve`.
        options: how each layout is solved; the time limit is of all of them together.
        layout: the only one to solve for, if given.
        starts: schedules to begin from; those for another graph are left aside.
    """
    from monetlite.solving.problem import Problem

    known = list(starts)
    plain = simulate(profiles[0], plain_steps(profiles[0].graph))
    budget_bytes = parse_budget(budget, plain.peak_bytes)
    # A layout that changes nothing is not among the profiles.
    wanted = [item for item in profiles if layout in (None, uncompiled_layout(item.graph.layout))]
    if not wanted:
        warn(f"layout {layout!r} changes nothing of this model, which is solved as it is")
        wanted = [profiles[0]]
    distinct = list({item.graph.fingerprint: item for item in reversed(wanted)}.values())[::-1]

    def run(item: Profile, seconds: float, found: Iterable[Schedule] = ()) -> Schedule:
        solved = solve_budget(
            item,
            budget_bytes,
            replace(options, time_limit=seconds),
            starts=[*found, *(start for start in known if start.structure == item.graph.structure)],
            progress=progress,
        )
        return replace(solved, plain_peak_bytes=plain.peak_bytes, plain_latency_ms=plain.latency_ms)

    if len(distinct) == 1:
        return run(distinct[0], options.time_limit)
    trial = options.time_limit * min(TRIAL_SHARE, TRIALS_SHARE / len(distinct))
    interrupted = ended_early()
    found: list[tuple[Schedule, Profile]] = []
    refused: list[tuple[InfeasibleBudget, Profile]] = []
    for item in distinct:
        try:
            found.append((run(item, trial), item))
        except InfeasibleBudget as error:
            refused.append((error, item))
        except KeyboardInterrupt:
            if not found:
                raise
            end_early()
        if ended_early() > interrupted:
            break
    remaining = options.time_limit - trial * len(distinct)
    if found:
        best, item = min(found, key=lambda pair: pair[0].latency_ms)
        solved = best if ended_early() > interrupted else run(item, remaining, [best])
    else:
        in_reach = [pair for pair in refused if pair[0].proven_bytes <= budget_bytes]
        refusal, item = min(in_reach or refused, key=lambda pair: pair[0].reached_bytes or pair[0].proven_bytes)
        if not in_reach or ended_early() > interrupted:
            raise refusal
        solved = run(item, remaining)
    # No layout has a faster schedule, nor a smaller budget.
    bounds_ms = {item.graph.fingerprint: Problem.of(options.allowed(item)).least_latency_ms for item in distinct}
    bounds_ms |= {
        other.graph.fingerprint: math.inf for error, other in refused if error.proven_bytes > budget_bytes
    }
    bounds_ms |= {one.fingerprint: one.lower_bound_ms for one in (*(one for one, _ in found), solved)}
    bound_ms = min(bounds_ms.values())
    sizes = [
        (solved.smallest_proven_bytes, solved.smallest_reached_bytes),
        *((one.smallest_proven_bytes, one.smallest_reached_bytes) for one, other in found if other is not item),
        *((error.proven_bytes, error.reached_bytes) for error, other in refused if other is not item),
    ]
    return replace(
        solved,
        lower_bound_ms=bound_ms,
        status=solved.status if bound_ms >= solved.lower_bound_ms else Status.FEASIBLE,
        smallest_proven_bytes=min(proven for proven, _ in sizes),
        smallest_reached_bytes=min((reached for _, reached in sizes if reached is not None), default=None),
    )


def as_schedule(profile: Profile, budget_bytes: int, solution: "Solution", tolerance: float) -> Schedule:
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
    from monetlite.solving.bounding.peak_bound import smallest_budget_bound
    from monetlite.solving.incumbent import Solution
    from monetlite.solving.problem import Problem

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


def _nothing_fits(profile: Profile, budget_bytes: int, solution: "Solution") -> InfeasibleBudget:
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
        least = LeastPeak.of_steps(profile, solution.smallest_reached_steps)
        reached = f"{format_bytes(least.peak_bytes)} ({least.peak_bytes} bytes), {least.place()}"
        problem += f"; the smallest peak reached is {reached}"
        advice = least.advice(budget_bytes)
    return InfeasibleBudget(
        f"{problem}.\n{advice}", budget_bytes=budget_bytes, proven_bytes=proven_bytes, reached_bytes=reached_bytes
    )
