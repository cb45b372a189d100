"""The boolean program against the exhaustive search and brute force."""

import importlib.util
import math
import os
import random
import subprocess

import cvxpy
import pyscipopt
import pytest
from oracle import fastest
from random_graphs import random_profile
from thoroughness import often

from monetlite.core.errors import SolverError
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.problem import Problem
from monetlite.solving.program import solve_program


@pytest.mark.parametrize("seed", often(range(30), *range(15)))
def test_optimum_is_that_of_the_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, forward_operators=rng.randint(2, 4))
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.smallest_reached_bytes is not None
    plain = simulate(profile, plain_steps(profile.graph))
    for budget in {smallest.smallest_reached_bytes, (smallest.smallest_reached_bytes + plain.peak_bytes) // 2}:
        expected = exhaustive(Problem.of(profile), budget)
        solver = "SCIP" if seed % 3 else "HIGHS"
        result = solve_program(Problem.of(profile), budget, seconds=30, passes=2, solver=solver)
        assert result.status is Status.OPTIMAL
        assert result.steps is not None
        assert result.latency_ms == pytest.approx(expected.latency_ms, abs=1e-6)
        assert simulate(profile, result.steps, budget).latency_ms == pytest.approx(result.latency_ms)
        if result.lower_bound_ms is not None:
            assert result.lower_bound_ms <= expected.latency_ms
    below = solve_program(Problem.of(profile), smallest.smallest_reached_bytes - 1, seconds=30, passes=2)
    assert below.status is Status.INFEASIBLE
    assert below.steps is None


@pytest.mark.parametrize("seed", often(range(26), *range(13)))
def test_the_bound_holds_for_every_schedule(seed: int) -> None:
    """With few passes, any cutoff, and hardly any time, too: also for schedules that the template can't state."""
    rng = random.Random(seed)
    profile = random_profile(rng, forward_operators=rng.randint(2, 4), zero_latencies=seed % 2 == 0)
    problem = Problem.of(profile)
    smallest = exhaustive_smallest_peak(problem)
    assert smallest.smallest_reached_bytes is not None
    plain = simulate(profile, plain_steps(profile.graph))
    for budget in {smallest.smallest_reached_bytes, (smallest.smallest_reached_bytes + plain.peak_bytes) // 2}:
        optimum_ms = exhaustive(problem, budget).latency_ms
        assert optimum_ms is not None
        if len(profile.graph.operators) <= 8:
            optimum_ms = min(optimum_ms, fastest(profile, budget, most_reruns=2))
        result = solve_program(
            problem,
            budget,
            seconds=rng.choice([0.0, 30.0]),
            passes=rng.choice([1, 2]),
            cutoff_ms=rng.choice([math.inf, optimum_ms, 1.1 * optimum_ms]),
            solver=rng.choice(["SCIP", "HIGHS"]),
        )
        assert result.lower_bound_ms <= optimum_ms * (1 + 1e-9)


def test_an_interrupt_that_scip_takes_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(pyscipopt.scip.Model):
        def optimize(self) -> None:
            subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -INT {os.getpid()}"])
            super().optimize()

    monkeypatch.setattr(pyscipopt.scip, "Model", Interrupted)
    profile = random_profile(random.Random(8), forward_operators=24)
    peak_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
    with pytest.raises(KeyboardInterrupt):
        solve_program(Problem.of(profile), int(0.6 * peak_bytes), seconds=10, passes=2)


def test_a_solver_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise cvxpy.error.SolverError("no licence")

    monkeypatch.setattr("cvxpy.reductions.solvers.solving_chain.SolvingChain.solve_via_data", fail)
    with pytest.raises(SolverError, match="SCIP failed: no licence"):
        solve_program(Problem.of(random_profile(random.Random(1))), 10**6, seconds=1)


@pytest.mark.skipif(importlib.util.find_spec("gurobipy") is not None, reason="Gurobi is installed")
def test_a_solver_that_is_not_installed_is_refused() -> None:
    with pytest.raises(SolverError, match="gurobipy"):
        solve_program(Problem.of(random_profile(random.Random(0))), 10**6, seconds=1, solver="GUROBI")
