"""More memory is never slower, and what one budget proves holds for the others."""

import itertools
import random
from dataclasses import replace

import pytest
from random_graphs import random_profile

import monetlite
from monetlite.core.errors import DeviceError, ScheduleMismatch
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import solve_profile
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.problem import Problem
from monetlite.solving.sweep import sweep_profile


@pytest.mark.parametrize("seed", range(6))
def test_latencies_and_bounds_fall_as_budgets_rise(seed: int) -> None:
    profile = random_profile(random.Random(seed), forward_operators=4)
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.smallest_reached_bytes is not None
    plain = simulate(profile, plain_steps(profile.graph))
    middle = (smallest.smallest_reached_bytes + plain.peak_bytes) // 2
    budgets = [plain.peak_bytes, smallest.smallest_reached_bytes - 1, middle, smallest.smallest_reached_bytes]
    told: set[int] = set()
    solutions = sweep_profile(
        profile, budgets, SolvingOptions(time_limit=16), progress=lambda budget_bytes, _: told.add(budget_bytes)
    )
    assert set(solutions) == set(budgets)
    assert told >= set(budgets) - {smallest.smallest_reached_bytes - 1}
    assert solutions[smallest.smallest_reached_bytes - 1].status is Status.INFEASIBLE
    feasible = [solutions[budget] for budget in sorted(set(budgets)) if budget >= smallest.smallest_reached_bytes]
    for before, after in itertools.pairwise(feasible):
        assert before.latency_ms is not None
        assert after.latency_ms is not None
        assert after.latency_ms <= before.latency_ms
        assert after.lower_bound_ms <= before.lower_bound_ms
    for budget in set(budgets) - {smallest.smallest_reached_bytes - 1}:
        solution, optimum = solutions[budget], exhaustive(Problem.of(profile), budget)
        assert solution.lower_bound_ms <= optimum.latency_ms * (1 + 1e-9)
        assert solution.latency_ms == pytest.approx(optimum.latency_ms)
        assert solution.smallest_proven_bytes == smallest.smallest_reached_bytes


def test_a_start_is_never_lost() -> None:
    profile = random_profile(random.Random(3), forward_operators=30)
    plain = simulate(profile, plain_steps(profile.graph))
    thorough = monetlite.solve(profile, int(0.8 * plain.peak_bytes), time_limit=2)
    hasty = monetlite.solve(profile, int(0.9 * plain.peak_bytes), time_limit=0.01, starts=[thorough])
    assert hasty.latency_ms <= thorough.latency_ms
    other = random_profile(random.Random(4), forward_operators=5)
    with pytest.raises(ScheduleMismatch, match="for another graph"):
        monetlite.solve(other, "100%", starts=[thorough])


def test_starts_of_a_wider_tolerance_are_left_aside() -> None:
    profile = random_profile(random.Random(3), forward_operators=8)
    operators = tuple(
        replace(item, implementations=tuple(replace(way, tolerance=1e-5) for way in item.implementations))
        for item in profile.graph.operators
    )
    profile = replace(profile, graph=replace(profile.graph, operators=operators))
    wide = monetlite.solve(profile, "200%", time_limit=0.5, tolerance=1e-5)
    exact = monetlite.solve(profile, "200%", time_limit=0.5, starts=[wide])
    assert wide.choices.implementations
    assert not exact.choices.implementations
    assert wide.latency_ms < exact.latency_ms


def test_public_sweep_takes_what_solve_takes() -> None:
    profile = random_profile(random.Random(6), forward_operators=4)
    schedules = monetlite.sweep(profile, ["100%", 1, "90%"], time_limit=6)
    assert list(schedules) == ["100%", 1, "90%"]
    assert schedules[1] is None
    plain = simulate(profile, plain_steps(profile.graph))
    full = schedules["100%"]
    assert full is not None
    assert full.peak_bytes <= plain.peak_bytes
    assert full.latency_ms <= plain.latency_ms


def test_budgets_of_reserved_memory() -> None:
    profile = replace(random_profile(random.Random(6), forward_operators=4), device="rtx-3090")
    budget_bytes = 10**9
    alone = monetlite.solve(profile, budget_bytes, reserved=True, time_limit=1)
    assert alone.reserved_bytes is not None
    schedules = monetlite.sweep(profile, [1, budget_bytes], reserved=True, time_limit=2)
    assert schedules[1] is None
    found = schedules[budget_bytes]
    assert found is not None
    assert found.reserved_bytes == alone.reserved_bytes
    with pytest.raises(DeviceError):
        monetlite.sweep(replace(profile, device="cpu"), [budget_bytes], reserved=True)


def test_bounds_of_larger_budgets_serve_smaller_ones() -> None:
    """Alone, a hasty solve proves less than in a sweep with a budget that is solved to the end."""
    profile = random_profile(random.Random(9), forward_operators=4)
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.smallest_reached_bytes is not None
    solutions = sweep_profile(profile, [smallest.smallest_reached_bytes, 10**6], SolvingOptions(time_limit=6))
    alone = solve_profile(profile, 10**6, SolvingOptions(time_limit=3))
    assert solutions[smallest.smallest_reached_bytes].lower_bound_ms >= alone.lower_bound_ms
