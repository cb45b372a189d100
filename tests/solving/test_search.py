"""The search against brute force: legal, within the budget, never better than the optimum, mostly equal."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import random_profile

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import baselines, solve_profile
from monetlite.solving.annealing.compiled import Integers
from monetlite.solving.annealing.lowest_peak import lower_peak
from monetlite.solving.annealing.search import search
from monetlite.solving.exhaustive import exhaustive, exhaustive_smallest_peak
from monetlite.solving.incumbent import Incumbent, Solution
from monetlite.solving.problem import Problem


def searched(profile: Profile, budget_bytes: int, **options: Any) -> Solution | None:
    """The result of a search alone; None if nothing was found."""
    incumbent = Incumbent(Problem.of(profile), budget_bytes, options.pop("report", None))
    search(incumbent, **options)
    solution = incumbent.solution()
    return None if solution.steps is None else solution


def lowered(profile: Profile, **options: Any) -> tuple[Solution, Integers]:
    """The result of annealing for the smallest peak alone, and its choices."""
    incumbent = Incumbent(Problem.of(profile), 10**15)
    choices = lower_peak(incumbent, **options)
    assert choices is not None
    return incumbent.solution(), choices


def chain(length: int, *, size_bytes: int = 8, latency_ms: float = 1.0) -> Profile:
    """A chain of forward operators; each backward operator reads the input of its own, and a gradient."""
    operators: list[Operator] = []
    values: list[Value] = []
    for position in range(length):
        reads = (position - 1,) if position else ()
        operators.append(_operator(f"forward{position}", Phase.FORWARD, reads, (position,)))
        values.append(Value(name=f"a{position}", kind=ValueKind.ACTIVATION, size_bytes=size_bytes))
    for position in reversed(range(length)):
        made = len(values)
        reads = (made - 1,) if position < length - 1 else (position,)
        operators.append(_operator(f"backward{position}", Phase.BACKWARD, (*reads, max(0, position - 1)), (made,)))
        values.append(Value(name=f"g{position}", kind=ValueKind.GRADIENT, size_bytes=size_bytes))
    graph = OperatorGraph(
        name="chain", operators=tuple(operators), values=tuple(values), resident=Resident(parameters=1)
    )
    costs = tuple((Cost(latency_ms=latency_ms, workspace_bytes=0),) for _ in operators)
    return Profile(graph=graph, device="cpu", kind=ProfileKind.MEASURED, costs=costs)


def _operator(name: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]) -> Operator:
    reads = tuple(dict.fromkeys(reads))
    implementations = (Implementation(name="default", reads=reads, writes=writes),)
    return Operator(name=name, family=phase.value, phase=phase, implementations=implementations)


def test_against_brute_force() -> None:
    worse = compared = 0
    for seed in range(25):
        rng = random.Random(seed)
        profile = random_profile(rng)
        smallest = exhaustive_smallest_peak(Problem.of(profile), state_limit=20_000)
        if smallest.status is not Status.OPTIMAL or smallest.smallest_reached_bytes is None:
            continue
        most_bytes = max(smallest.smallest_reached_bytes, simulate(profile, plain_steps(profile.graph)).peak_bytes)
        budget_bytes = rng.randint(smallest.smallest_reached_bytes, most_bytes)
        optimum = exhaustive(Problem.of(profile), budget_bytes, state_limit=20_000)
        if optimum.status is not Status.OPTIMAL:
            continue
        found = searched(profile, budget_bytes, seconds=0.2, seed=seed)
        compared += 1
        if found is None:
            worse += 1
            continue
        timeline = simulate(profile, found.steps, budget_bytes)
        assert (timeline.latency_ms, timeline.peak_bytes) == (found.latency_ms, found.peak_bytes)
        assert found.latency_ms >= optimum.latency_ms - 1e-9 * (1 + optimum.latency_ms)
        worse += found.latency_ms > optimum.latency_ms + 1e-9 * (1 + optimum.latency_ms)
    assert compared > 15
    assert worse <= 0.12 * compared


def test_smallest_peak_against_brute_force() -> None:
    worse = compared = 0
    for seed in range(100, 120):
        profile = random_profile(random.Random(seed))
        smallest = exhaustive_smallest_peak(Problem.of(profile), state_limit=20_000)
        if smallest.status is not Status.OPTIMAL or smallest.smallest_reached_bytes is None:
            continue
        found, _ = lowered(profile, seconds=0.4, seed=seed)
        compared += 1
        assert found.smallest_reached_steps is not None
        assert found.smallest_reached_bytes is not None
        assert simulate(profile, found.smallest_reached_steps).peak_bytes == found.smallest_reached_bytes
        assert found.smallest_reached_bytes >= smallest.smallest_reached_bytes
        worse += found.smallest_reached_bytes > smallest.smallest_reached_bytes
    assert compared > 12
    assert worse <= 0.15 * compared


def test_a_peak_that_is_small_enough_is_not_lowered_further() -> None:
    profile = chain(50)
    reached_bytes = lowered(profile, seconds=0.6)[0].smallest_reached_bytes
    assert reached_bytes is not None
    plain_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
    assert reached_bytes < plain_bytes // 2
    enough_bytes = (reached_bytes + plain_bytes) // 2
    found, _ = lowered(profile, seconds=20, enough_bytes=enough_bytes)
    assert found.smallest_reached_bytes is not None
    assert found.smallest_reached_bytes <= enough_bytes


@pytest.mark.parametrize("very_far", [False, True])
def test_a_budget_is_tight_where_the_first_schedule_is_very_far_from_the_bound(
    very_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Integers | None] = []
    monkeypatch.setattr("monetlite.solving.solver.search", lambda *_, tight, **by: asked.append(tight))
    monkeypatch.setattr("monetlite.solving.solver._VERY_FAR", 0.0 if very_far else math.inf)
    profile = random_profile(random.Random(3), forward_operators=40)
    budget_bytes = int(0.9 * simulate(profile, plain_steps(profile.graph)).peak_bytes)
    solve_profile(profile, budget_bytes, SolvingOptions(time_limit=2, gap=0.0))
    assert asked
    assert [tight is not None for tight in asked] == [very_far] * len(asked)


def test_a_search_within_a_tight_budget_begins_from_what_fits() -> None:
    profile = chain(50)
    lean, choices = lowered(profile, seconds=0.6)
    budget_bytes, steps = lean.smallest_reached_bytes, lean.smallest_reached_steps
    assert budget_bytes is not None
    assert steps is not None
    found = searched(profile, budget_bytes, seconds=0.6, tight=choices)
    assert found is not None
    assert found.steps is not None
    assert simulate(profile, found.steps, budget_bytes).latency_ms <= simulate(profile, steps).latency_ms


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), largest=st.sampled_from([1, 40, 10**12]), share=st.floats(0.3, 1.2))
def test_whatever_is_found_is_legal_and_fits(seed: int, largest: int, share: float) -> None:
    profile = random_profile(random.Random(seed), largest_bytes=largest)
    budget_bytes = max(1, int(simulate(profile, plain_steps(profile.graph)).peak_bytes * share))
    found = searched(profile, budget_bytes, seconds=0.1, seed=seed)
    if found is not None:
        timeline = simulate(profile, found.steps, budget_bytes)
        assert timeline.latency_ms == found.latency_ms


def test_as_good_as_every_baseline_and_start() -> None:
    for seed in range(6):
        profile = random_profile(random.Random(seed), 12)
        known = [
            plain_steps(profile.graph),
            baselines.sqrt_checkpointing(profile),
            baselines.segment_checkpointing(profile, [3, 6, 9]),
        ]
        for steps in known:
            timeline = simulate(profile, steps)
            found = searched(profile, timeline.peak_bytes, seconds=0.05, starts=[steps])
            assert found is not None
            assert found.latency_ms <= timeline.latency_ms


def test_recomputes_in_a_chain() -> None:
    profile = chain(9)
    plain = simulate(profile, plain_steps(profile.graph))
    budget_bytes = plain.peak_bytes * 2 // 3
    found = searched(profile, budget_bytes, seconds=0.5)
    optimum = exhaustive(Problem.of(profile), budget_bytes)
    assert optimum.status is Status.OPTIMAL
    assert found is not None
    assert plain.latency_ms < found.latency_ms == pytest.approx(optimum.latency_ms)


def test_zero_latencies_and_too_small_a_budget() -> None:
    profile = chain(6, latency_ms=0.0)
    plain = simulate(profile, plain_steps(profile.graph))
    found = searched(profile, plain.peak_bytes * 3 // 4, seconds=0.3)
    assert found is not None
    assert found.latency_ms == 0.0
    assert searched(profile, 9, seconds=0.1) is None


def test_without_backward_operators() -> None:
    full = chain(5)
    graph = replace(full.graph, operators=full.graph.operators[:5])
    profile = replace(full, graph=graph, costs=full.costs[:5])
    found = searched(profile, 100, seconds=0.1)
    assert found is not None
    assert found.steps == plain_steps(graph)


def test_improvements_are_reported_in_order_and_stopping_works() -> None:
    profile = chain(14)
    seen: list[Solution] = []
    budget_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes // 2
    found = searched(profile, budget_bytes, seconds=60, report=seen.append, should_stop=lambda: bool(seen))
    assert found is not None
    assert found.steps == seen[-1].steps
    assert [item.latency_ms for item in seen] == sorted((item.latency_ms for item in seen), reverse=True)


def test_the_same_seed_finds_the_same() -> None:
    profile = random_profile(random.Random(11), 4)
    budget_bytes = int(simulate(profile, plain_steps(profile.graph)).peak_bytes * 0.9)
    first, second = (searched(profile, budget_bytes, seconds=5, seed=3) for _ in range(2))
    assert (first and first.latency_ms) == (second and second.latency_ms)
