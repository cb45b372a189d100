"""Steps read from the relaxation: complete and in order, whatever the solution says."""

import random

import numpy as np
import pytest
from random_graphs import random_profile

from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.annealing.compiled import new_scratch
from monetlite.solving.annealing.flat_problem import decode, encode, flatten
from monetlite.solving.bounding.guide import guided_steps
from monetlite.solving.bounding.latency_bound import integer_bound, latency_bound
from monetlite.solving.bounding.relaxation import Relaxation
from monetlite.solving.bounding.zero_one import Floats
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.problem import Problem


@pytest.mark.parametrize("seed", range(30))
def test_any_solution_gives_steps_that_only_need_memory(seed: int) -> None:
    profile = random_profile(random.Random(seed), forward_operators=6)
    problem = Problem.of(profile)
    plain = simulate(profile, plain_steps(profile.graph))
    relaxation = Relaxation(problem, plain.peak_bytes // 2)
    solution = np.random.default_rng(seed).random(len(relaxation.program.cost_ms))
    steps = guided_steps(relaxation, solution)
    if steps is None:
        # Only something that can't be run again may be missing.
        assert any(not operator.rerunnable for operator in profile.graph.operators)
        return
    ran = [operator for operator, _ in steps]
    assert [operator for operator in dict.fromkeys(ran) if operator in problem.position] == list(problem.main)
    flat = flatten(problem)
    scratch = new_scratch(flat.value_count, flat.operator_count, 20 * flat.operator_count + 64)
    found = decode(flat, encode(flat, steps), scratch, 10**12, 1.0, 1.0)
    assert found is not None
    simulate(profile, found, 10**12)


@pytest.mark.thorough
def test_guides_are_often_the_optimum_itself() -> None:
    """On graphs this small the relaxation is close to the problem: a solution that is a schedule is optimal."""
    same = compared = 0
    for seed in range(16):
        profile = random_profile(random.Random(seed), forward_operators=6, zero_latencies=False)
        smallest = exhaustive_smallest_peak(Problem.of(profile), state_limit=20_000)
        if smallest.status is not Status.OPTIMAL or smallest.smallest_reached_bytes is None:
            continue
        plain = simulate(profile, plain_steps(profile.graph))
        budget_bytes = (smallest.smallest_reached_bytes + plain.peak_bytes) // 2
        bound = latency_bound(Relaxation(Problem.of(profile), budget_bytes), seconds=5)
        if bound.relaxation is None:
            continue
        solutions: list[Floats] = []
        integer_bound(bound.relaxation.program, seconds=5, on_solution=solutions.append)
        if not solutions:
            continue
        problem = Problem.of(profile)
        flat = flatten(problem)
        steps = guided_steps(bound.relaxation, solutions[-1])
        if steps is None:
            continue
        scratch = new_scratch(flat.value_count, flat.operator_count, 20 * flat.operator_count + 64)
        found = decode(flat, encode(flat, steps), scratch, budget_bytes, 1.0, 1e9)
        compared += 1
        if found is not None and simulate(profile, found).peak_bytes <= budget_bytes:
            optimum = exhaustive(Problem.of(profile), budget_bytes)
            assert simulate(profile, found).latency_ms >= optimum.latency_ms * (1 - 1e-9)
            same += simulate(profile, found).latency_ms == pytest.approx(optimum.latency_ms)
    assert compared >= 9
    assert same >= 0.3 * compared
