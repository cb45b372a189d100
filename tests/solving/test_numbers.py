"""Whatever the numbers: bytes or terabytes, nothing or equal latencies, one byte either side of feasible."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import judge
from random_graphs import random_profile

from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import Implementation, Operator, Phase, Resident, Value, ValueKind
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving import solve_profile
from monetlite.solving.exhaustive import exhaustive_smallest_peak
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem


def checked(profile: Profile, budget_bytes: int, solution: Solution) -> None:
    """What is returned is legal and as promised, by rules that share nothing with the solver."""
    if solution.steps is None:
        assert solution.status in (Status.INFEASIBLE, Status.TIMEOUT)
        return
    judged = judge(profile, solution.steps)
    assert judged is not None
    latency_ms, peak_bytes = judged
    assert peak_bytes <= budget_bytes
    assert latency_ms == pytest.approx(solution.latency_ms, rel=1e-9, abs=1e-300)
    assert solution.lower_bound_ms <= latency_ms * (1 + 1e-9)
    assert solution.smallest_proven_bytes <= peak_bytes


def stretched(profile: Profile, bytes_factor: int, time_factor: float, same_latency: float | None) -> Profile:
    """Sizes and latencies multiplied; all latencies the same where one is given."""

    def stretch(cost: Cost) -> Cost:
        again = cost.recompute_latency_ms
        needed = cost.recompute_workspace_bytes
        return Cost(
            latency_ms=cost.latency_ms * time_factor if same_latency is None else same_latency,
            workspace_bytes=cost.workspace_bytes * bytes_factor,
            recompute_latency_ms=None if again is None or same_latency is not None else again * time_factor,
            recompute_workspace_bytes=None if needed is None else needed * bytes_factor,
        )

    graph = profile.graph
    values = tuple(replace(value, size_bytes=value.size_bytes * bytes_factor) for value in graph.values)
    resident = Resident(parameters=graph.resident.total * bytes_factor)
    costs = tuple(tuple(stretch(cost) for cost in choices) for choices in profile.costs)
    return replace(profile, graph=replace(graph, values=values, resident=resident), costs=costs)


def beside(one: Profile, other: Profile) -> Profile:
    """Two steps that have nothing to do with each other, in one graph."""
    shift = len(one.graph.values)

    def moved(operator: Operator) -> Operator:
        ways = tuple(
            Implementation(
                name=way.name,
                reads=tuple(value + shift for value in way.reads),
                writes=tuple(value + shift for value in way.writes),
                overwrites=tuple(value + shift for value in way.overwrites),
            )
            for way in operator.implementations
        )
        return replace(operator, name=f"other_{operator.name}", implementations=ways)

    both = [*zip(one.graph.operators, one.costs, strict=True)]
    both += [(moved(operator), costs) for operator, costs in zip(other.graph.operators, other.costs, strict=True)]
    both.sort(key=lambda item: item[0].phase is Phase.BACKWARD)
    values = (
        *one.graph.values,
        *(Value(name=f"other_{v.name}", kind=v.kind, size_bytes=v.size_bytes) for v in other.graph.values),
    )
    graph = replace(one.graph, operators=tuple(operator for operator, _ in both), values=values)
    return replace(one, graph=graph, costs=tuple(costs for _, costs in both))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    bytes_factor=st.sampled_from([1, 2**20 + 1, 10**9 + 7, 2**41]),
    time_factor=st.sampled_from([1e-9, 1.0, 1e9]),
    same_latency=st.sampled_from([None, None, 0.0, 1.0]),
)
def test_one_byte_either_side_of_feasible(
    seed: int, bytes_factor: int, time_factor: float, same_latency: float | None
) -> None:
    profile = stretched(random_profile(random.Random(seed)), bytes_factor, time_factor, same_latency)
    smallest = exhaustive_smallest_peak(Problem.of(profile), state_limit=20_000)
    if smallest.status is not Status.OPTIMAL or smallest.smallest_reached_bytes is None:
        return
    for difference in (-1, 0, 1):
        budget_bytes = smallest.smallest_reached_bytes + difference
        solution = solve_profile(profile, budget_bytes, SolvingOptions(time_limit=1.0))
        checked(profile, budget_bytes, solution)
        assert (solution.steps is None) == (difference < 0)


@pytest.mark.thorough
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), largest=st.sampled_from([40, 10**13]), share=st.floats(0.5, 1.1))
def test_larger_graphs_of_any_size(seed: int, largest: int, share: float) -> None:
    """Beyond the exhaustive search: the other methods, with coefficients over thirteen orders of magnitude."""
    profile = random_profile(random.Random(seed), forward_operators=22, largest_bytes=largest)
    budget_bytes = max(1, int(share * simulate(profile, plain_steps(profile.graph)).peak_bytes))
    checked(profile, budget_bytes, solve_profile(profile, budget_bytes, SolvingOptions(time_limit=0.5, seed=seed)))


@pytest.mark.parametrize("seed", range(4))
def test_graphs_that_hang_together_by_nothing(seed: int) -> None:
    rng = random.Random(seed)
    profile = beside(random_profile(rng, forward_operators=3), random_profile(rng, forward_operators=3))
    budget_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes * 3 // 4
    checked(profile, budget_bytes, solve_profile(profile, budget_bytes, SolvingOptions(time_limit=1.0, seed=seed)))


def test_values_of_no_size_and_operators_that_write_nothing_big() -> None:
    profile = random_profile(random.Random(2), forward_operators=6)
    values = tuple(replace(value, size_bytes=0) for value in profile.graph.values)
    empty = replace(profile, graph=replace(profile.graph, values=values))
    plain = simulate(empty, plain_steps(empty.graph))
    solution = solve_profile(empty, plain.peak_bytes, SolvingOptions(time_limit=1.0))
    checked(empty, plain.peak_bytes, solution)
    assert solution.steps is not None
    assert any(value.kind is ValueKind.ACTIVATION for value in empty.graph.values)
