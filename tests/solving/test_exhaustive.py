"""The exhaustive search against brute force."""

import random

import pytest
from oracle import fastest, judge
from random_graphs import random_profile
from thoroughness import often

from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.problem import Problem


@pytest.mark.parametrize("seed", often(range(40), *range(20)))
def test_optimum_is_that_of_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, forward_operators=rng.randint(1, 3), once_only=seed % 2 == 0)
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.status is Status.OPTIMAL
    assert smallest.smallest_reached_bytes is not None
    assert smallest.smallest_reached_steps is not None
    plain = simulate(profile, plain_steps(profile.graph))
    for budget in {smallest.smallest_reached_bytes, (smallest.smallest_reached_bytes + plain.peak_bytes) // 2}:
        found = exhaustive(Problem.of(profile), budget)
        assert found.status is Status.OPTIMAL
        assert found.steps is not None
        reruns = len(found.steps) - sum(not op.optional for op in profile.graph.operators)
        most = 3 if len(profile.graph.operators) <= 6 else 2 if len(profile.graph.operators) <= 8 else 1
        if reruns > most:
            continue
        assert found.latency_ms == pytest.approx(fastest(profile, budget, most), abs=1e-9)
        judged = judge(profile, found.steps)
        assert judged is not None
        assert judged[0] == pytest.approx(found.latency_ms)
        assert judged[1] <= budget


@pytest.mark.parametrize("seed", often(range(40), *range(20)))
def test_one_byte_below_the_smallest_peak_nothing_fits(seed: int) -> None:
    rng = random.Random(1000 + seed)
    profile = random_profile(rng, forward_operators=rng.randint(2, 5))
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.status is Status.OPTIMAL
    assert smallest.smallest_reached_bytes is not None
    assert smallest.smallest_proven_bytes == smallest.smallest_reached_bytes
    below = exhaustive(Problem.of(profile), smallest.smallest_reached_bytes - 1)
    assert below.status is Status.INFEASIBLE
    assert below.steps is None
    if seed % 4 == 0 and len(profile.graph.operators) <= 7:
        assert fastest(profile, smallest.smallest_reached_bytes - 1, most_reruns=2) == float("inf")


def test_gives_up_at_its_limit_with_a_bound() -> None:
    profile = random_profile(random.Random(3), forward_operators=8)
    smallest = exhaustive_smallest_peak(Problem.of(profile))
    assert smallest.smallest_reached_bytes is not None
    best = exhaustive(Problem.of(profile), smallest.smallest_reached_bytes)
    short = exhaustive(Problem.of(profile), smallest.smallest_reached_bytes, state_limit=3)
    assert best.status is Status.OPTIMAL
    assert short.status is Status.TIMEOUT
    assert short.steps is None
    assert 0 < short.lower_bound_ms <= best.latency_ms
