"""Bounds are never above what the exhaustive search shows to be possible."""

import math
import os
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from random_graphs import random_profile, with_backward_ways

from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.bounding import peak_bound
from monetlite.solving.bounding.latency_bound import integer_bound, latency_bound
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.bounding.relaxation import Relaxation
from monetlite.solving.bounding.zero_one import dual_bound_ms
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.problem import Problem
from monetlite.solving.program import solve_program

GRAPHS = int(os.environ.get("MONETLITE_GRAPHS", "40"))
"""How many random graphs bounds are compared on with the optimum; thousands before a release."""


def test_a_solve_bounds_its_budgets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second of some thousand operators, as long as the search for the smallest budget may take."""
    bounded: list[object] = []
    inner = peak_bound.certain_lifetimes

    def lifetimes(problem: Problem) -> peak_bound.CertainLifetimes:
        bounded.append(problem)
        return inner(problem)

    monkeypatch.setattr(peak_bound, "certain_lifetimes", lifetimes)
    profile = random_profile(random.Random(3), forward_operators=40)
    problem = Problem.of(profile)
    assert smallest_budget_bound(problem) == smallest_budget_bound(problem)
    assert bounded == [problem]


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_bounds_hold_for_the_true_optimum(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, forward_operators=rng.randint(2, 6))
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.status is Status.OPTIMAL
    assert smallest.smallest_reached_bytes is not None
    assert smallest_budget_bound(Problem.of(profile)) <= smallest.smallest_reached_bytes
    plain = simulate(profile, plain_steps(profile.graph))
    for budget in {smallest.smallest_reached_bytes, (smallest.smallest_reached_bytes + plain.peak_bytes) // 2}:
        best = exhaustive(Problem.of(profile), budget)
        assert best.status is Status.OPTIMAL
        relaxation = Relaxation(
            Problem.of(profile),
            budget,
            checkpoint_limit=rng.choice([2, 3, 5, 60]),
            forward_limit=rng.choice([2, 3, None]),
            value_limit=rng.choice([2, 4, 400]),
        )
        bound = latency_bound(relaxation, seconds=10)
        assert Problem.of(profile).least_latency_ms <= bound.lower_bound_ms + 1e-9
        assert bound.lower_bound_ms <= best.latency_ms * (1 + 1e-9)
        if bound.relaxation is not None:
            cutoff = rng.choice([float("inf"), best.latency_ms])
            tight, _ = integer_bound(bound.relaxation.program, seconds=10, cutoff_ms=cutoff)
            assert bound.lower_bound_ms * (1 - 1e-5) <= tight <= best.latency_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold_where_backward_operators_overwrite_and_need_masks(seed: int) -> None:
    rng = random.Random(seed)
    problem = Problem.of(with_backward_ways(rng, random_profile(rng, forward_operators=rng.randint(3, 5))))
    smallest = exhaustive_smallest_peak(problem)
    assert smallest.smallest_reached_bytes is not None
    assert smallest_budget_bound(problem) <= smallest.smallest_reached_bytes
    plain = simulate(problem.profile, plain_steps(problem.graph))
    for budget in {smallest.smallest_reached_bytes, (smallest.smallest_reached_bytes + plain.peak_bytes) // 2}:
        best = exhaustive(problem, budget)
        assert best.status is Status.OPTIMAL
        bound = latency_bound(Relaxation(problem, budget, checkpoint_limit=rng.choice([2, 60])), seconds=10)
        tight, _ = integer_bound(bound.relaxation.program, seconds=10)
        assert max(bound.lower_bound_ms, tight) <= best.latency_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_bounds_hold_beside_costs_that_no_schedule_can_pay(seed: int) -> None:
    """Files of instances state that an operator can't be run again by what that costs."""
    rng = random.Random(seed)
    profile = random_profile(rng, forward_operators=rng.randint(3, 6))
    dear_ms = rng.choice([1e9, 1e12])
    costs = tuple(
        tuple(replace(cost, recompute_latency_ms=dear_ms) for cost in of) if rng.random() < 0.5 else of
        for of in profile.costs
    )
    problem = Problem.of(replace(profile, costs=costs))
    least = exhaustive_smallest_peak(problem).smallest_reached_bytes
    assert least is not None
    optimum_ms = exhaustive(problem, least).latency_ms
    assert optimum_ms is not None
    linear = latency_bound(Relaxation(problem, least), seconds=10)
    for cutoff_ms in (math.inf, optimum_ms, 1.1 * optimum_ms + 1):
        bound_ms, _ = integer_bound(linear.relaxation.program, seconds=10, cutoff_ms=cutoff_ms)
        assert bound_ms <= optimum_ms * (1 + 1e-9)
    if len(problem.graph.operators) <= 12:
        for solver in ("SCIP", "HIGHS"):
            found = solve_program(
                problem, least, seconds=20, passes=2, cutoff_ms=1.1 * optimum_ms + 1, solver=solver
            )
            assert found.lower_bound_ms <= optimum_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_any_multipliers_give_a_valid_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(random.Random(seed), forward_operators=5)
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.smallest_reached_bytes is not None
    best = exhaustive(Problem.of(profile), smallest.smallest_reached_bytes)
    program = Relaxation(Problem.of(profile), smallest.smallest_reached_bytes).program
    for _ in range(20):
        multipliers = rng.normal(size=len(program.limit)) * rng.choice([0.1, 1, 10])
        assert dual_bound_ms(program, multipliers) <= best.latency_ms
    assert dual_bound_ms(program, np.full(len(program.limit), np.nan)) == -np.inf


def test_bounds_are_sharp_where_everything_is_forced() -> None:
    """How often the bounds are exact on these graphs: fewer would mean that they got weaker."""
    exact = 0
    for seed in range(50):
        profile = random_profile(random.Random(seed), forward_operators=4)
        smallest = exhaustive_smallest_peak(Problem.of(profile))
        exact += smallest_budget_bound(Problem.of(profile)) == smallest.smallest_reached_bytes
    assert exact >= 37


def test_highs_writes_nothing_where_results_go():
    """Its version 1.16 greets on stdout, whatever it is told."""
    code = "import highspy; highspy.Highs().silent()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
