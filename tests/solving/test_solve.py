"""The one entry point: what it promises is what `simulate` finds, and what is proven is true."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from random_graphs import random_profile

from monetlite.core.costs import Profile
from monetlite.core.errors import SolverError
from monetlite.core.graph import Resident
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.planning import budgets, layouts
from monetlite.planning.layouts import solve_layouts
from monetlite.solving import reserved_budget, solve_profile, solver
from monetlite.solving.clock import now
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem
from monetlite.solving.smallest import SMALL_OPERATORS
from monetlite.solving.solver import _PeakSolve, solve_peak


def scaled(profile: Profile, factor: int) -> Profile:
    """The same profile with every size multiplied."""
    graph = profile.graph
    values = tuple(replace(value, size_bytes=value.size_bytes * factor) for value in graph.values)
    resident = Resident(parameters=graph.resident.total * factor)
    costs = tuple(
        tuple(
            replace(
                cost,
                workspace_bytes=cost.workspace_bytes * factor,
                recompute_workspace_bytes=(
                    None if cost.recompute_workspace_bytes is None else cost.recompute_workspace_bytes * factor
                ),
            )
            for cost in choices
        )
        for choices in profile.costs
    )
    return replace(profile, graph=replace(graph, values=values, resident=resident), costs=costs)


@pytest.mark.parametrize("factor", [1, 10**9 + 7])
@pytest.mark.parametrize("seed", range(15))
def test_small_graphs_are_solved_to_optimality(seed: int, factor: int) -> None:
    profile = scaled(random_profile(random.Random(seed)), factor)
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.smallest_reached_bytes is not None
    best = exhaustive(Problem.of(profile), smallest.smallest_reached_bytes)
    solution = solve_profile(profile, smallest.smallest_reached_bytes, SolvingOptions(time_limit=20, gap=0.5))
    assert solution.status is Status.OPTIMAL
    assert solution.steps is not None
    assert solution.latency_ms == pytest.approx(best.latency_ms)
    timeline = simulate(profile, solution.steps, smallest.smallest_reached_bytes)
    assert (timeline.latency_ms, timeline.peak_bytes) == (solution.latency_ms, solution.peak_bytes)
    assert solution.lower_bound_ms <= timeline.latency_ms

    below = solve_profile(profile, smallest.smallest_reached_bytes - 1, SolvingOptions(time_limit=20))
    assert below.status is Status.INFEASIBLE
    assert below.steps is None
    assert below.latency_ms is None
    assert below.smallest_proven_bytes == below.smallest_reached_bytes == smallest.smallest_reached_bytes
    assert below.smallest_reached_steps is not None
    assert simulate(profile, below.smallest_reached_steps).peak_bytes == smallest.smallest_reached_bytes


def test_plenty_of_memory_is_optimal_at_once() -> None:
    profile = random_profile(random.Random(5), zero_latencies=False)
    solution = solve_profile(profile, 10**9, SolvingOptions(time_limit=20))
    assert solution.status is Status.OPTIMAL
    assert solution.latency_ms is not None
    assert solution.latency_ms <= simulate(profile, plain_steps(profile.graph)).latency_ms


def test_zero_latencies() -> None:
    profile = random_profile(random.Random(11))
    free = replace(
        profile,
        costs=tuple(
            tuple(replace(cost, latency_ms=0.0, recompute_latency_ms=None) for cost in choices)
            for choices in profile.costs
        ),
    )
    solution = solve_profile(free, 10**6, SolvingOptions(time_limit=10))
    assert solution.status is Status.OPTIMAL
    assert solution.latency_ms == 0.0


def test_progress_is_monotonic_and_starts_help() -> None:
    profile = random_profile(random.Random(8), forward_operators=12)
    smallest = exhaustive_smallest_peak(Problem.of(profile), seconds=1)
    assert smallest.smallest_reached_steps is not None
    assert smallest.smallest_reached_bytes is not None
    seen: list[Solution] = []
    solution = solve_profile(
        profile,
        smallest.smallest_reached_bytes,
        SolvingOptions(time_limit=1),
        starts=[smallest.smallest_reached_steps],
        progress=seen.append,
    )
    assert solution.steps is not None
    assert seen
    latencies = [math.inf if event.latency_ms is None else event.latency_ms for event in seen]
    assert latencies == sorted(latencies, reverse=True)
    assert all(0 <= event.gap <= 1 for event in seen)


def test_solving_ends_once_the_gap_is_proven() -> None:
    profile = random_profile(random.Random(8), forward_operators=30)
    assert len(profile.graph.operators) > SMALL_OPERATORS
    budget_bytes = int(0.8 * simulate(profile, plain_steps(profile.graph)).peak_bytes)
    seen: list[Solution] = []
    options = SolvingOptions(time_limit=300, gap=0.3)
    solution = solve_profile(profile, budget_bytes, options, progress=seen.append)
    assert solution.status is Status.FEASIBLE
    assert solution.gap <= 0.3
    assert solution.seconds < 200  # the limit is 300, and compiling the search may take 60
    assert solution.smallest_proven_bytes <= (solution.smallest_reached_bytes or 0) <= budget_bytes


def test_no_layout_is_solved_again_once_the_gap_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def solve(profile: Profile, *args: Any, **kwargs: Any) -> Any:
        solved.append(profile)
        return budgets.solve_budget(profile, *args, **kwargs)

    monkeypatch.setattr(layouts, "solve_budget", solve)
    profiles = [random_profile(random.Random(seed), forward_operators=4) for seed in (8, 22)]
    schedule = solve_layouts(profiles, "200%", SolvingOptions(time_limit=20))
    assert solved == profiles
    assert schedule.latency_ms == pytest.approx(schedule.lower_bound_ms)


def test_interrupt_returns_the_best_so_far() -> None:
    profile = random_profile(random.Random(8), forward_operators=12)
    calls = []

    def interrupt(event: Solution) -> None:
        calls.append(event)
        raise KeyboardInterrupt

    peak = simulate(profile, plain_steps(profile.graph)).peak_bytes
    solution = solve_profile(profile, peak, SolvingOptions(time_limit=20), progress=interrupt)
    assert calls
    assert solution.steps is not None
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)


def test_interrupt_ends_every_part_of_a_solve_for_reserved_memory() -> None:
    profile = replace(random_profile(random.Random(8), forward_operators=12), device="rtx-3090")
    seen = []

    def interrupt(event: Solution) -> None:
        seen.append(event)
        raise KeyboardInterrupt

    for budget_bytes in (simulate(profile, plain_steps(profile.graph)).peak_bytes, 10**9):
        seen.clear()
        solve_profile(profile, budget_bytes, SolvingOptions(time_limit=2, reserved=True), progress=interrupt)
        assert len(seen) == 1


def test_rounds_for_reserved_memory_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = replace(scaled(random_profile(random.Random(8), forward_operators=12), 10**6), device="rtx-3090")
    solved = []

    def solve(*args: Any, **kwargs: Any) -> Solution:
        solved.append(args)
        return solve_peak(*args, **kwargs)

    monkeypatch.setattr(reserved_budget, "solve_peak", solve)
    monkeypatch.setattr(reserved_budget, "_best_within", lambda *_: None)
    monkeypatch.setattr(reserved_budget, "least_limit", lambda *_: 0)
    peak = simulate(profile, plain_steps(profile.graph)).peak_bytes
    solve_profile(profile, peak, SolvingOptions(time_limit=0.1, reserved=True))
    assert len(solved) <= 4


def test_interrupt_ends_the_solves_of_all_layouts() -> None:
    profiles = [random_profile(random.Random(seed), forward_operators=12) for seed in (8, 9)]
    seen = []

    def interrupt(event: Solution) -> None:
        seen.append(event)
        raise KeyboardInterrupt

    schedule = solve_layouts(profiles, "200%", SolvingOptions(time_limit=20), progress=interrupt)
    assert schedule.fingerprint == profiles[0].graph.fingerprint
    assert len(seen) == 1


def test_bounds_are_of_all_layouts() -> None:
    slow, fast = (random_profile(random.Random(seed), forward_operators=4) for seed in (8, 22))

    def interrupt(event: Solution) -> None:
        if event.status is Status.OPTIMAL:
            raise KeyboardInterrupt

    options = SolvingOptions(time_limit=2)
    schedule = solve_layouts([slow, fast], "200%", options, progress=interrupt)
    assert schedule.fingerprint == slow.graph.fingerprint
    assert schedule.lower_bound_ms == Problem.of(fast).least_latency_ms < schedule.latency_ms
    assert schedule.status is Status.FEASIBLE

    too_large = replace(fast, graph=replace(fast.graph, resident=Resident(parameters=10**6)))
    schedule = solve_layouts([slow, too_large], "200%", options)
    assert schedule.status is Status.OPTIMAL
    assert schedule.lower_bound_ms == pytest.approx(schedule.latency_ms)


def test_a_failing_solver_leaves_what_the_search_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise SolverError("SCIP failed: out of memory")

    monkeypatch.setattr(solver, "solve_program", fails)
    profile = random_profile(random.Random(3), forward_operators=6)
    plain = simulate(profile, plain_steps(profile.graph))
    solve = _PeakSolve(profile, plain.peak_bytes, SolvingOptions(), now() + 10, None)
    solve.incumbent.offer(plain.steps, "plain")
    with pytest.warns(UserWarning, match="the search's alone: SCIP failed: out of memory"):
        solve._solve_program(seconds=1)
    assert solve.incumbent.steps == plain.steps
