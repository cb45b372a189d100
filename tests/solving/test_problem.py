"""The flat form of a profile."""

import random

import numpy
import pytest
from random_graphs import random_profile

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.annealing.compiled import (
    GROUP_OPTIONS,
    GROUP_OPTIONS_AGAIN,
    GROUP_OPTIONS_END,
    GROUP_READS,
    GROUP_READS_END,
    LATENCY,
    OPERATOR_GROUPS,
    OPERATOR_GROUPS_END,
    OPTION_EXTRA,
    OPTION_IMPLEMENTATION,
    OPTION_OVERWRITES,
    OPTION_OVERWRITES_END,
    OVERFLOW,
    PEAK,
    new_scratch,
)
from monetlite.solving.annealing.flat_problem import (
    LEAN_FACTOR,
    decode,
    encode,
    flatten,
    keep_everything,
    read_least,
)
from monetlite.solving.problem import Problem


def two_operators(implementations: list[tuple[Implementation, Cost]], *, size_bytes: int = 10) -> Profile:
    """An operator that makes value 0, and a backward one with these implementations that makes value 1."""
    operators = (
        Operator(
            name="make",
            family="make",
            phase=Phase.FORWARD,
            implementations=(Implementation(name="default", reads=(), writes=(0,)),),
        ),
        Operator(
            name="use",
            family="use",
            phase=Phase.BACKWARD,
            implementations=tuple(implementation for implementation, _ in implementations),
        ),
    )
    values = (
        Value(name="made", kind=ValueKind.ACTIVATION, size_bytes=size_bytes),
        Value(name="gradient", kind=ValueKind.PARAM_GRAD, size_bytes=3),
    )
    graph = OperatorGraph(name="two", operators=operators, values=values, resident=Resident(parameters=5))
    costs = ((Cost(latency_ms=1.0, workspace_bytes=0),), tuple(cost for _, cost in implementations))
    return Profile(graph=graph, device="cpu", kind=ProfileKind.MEASURED, costs=costs)


def implementation(
    name: str,
    latency_ms: float,
    workspace_bytes: int,
    *,
    reads: tuple[int, ...] = (0,),
    overwrites: tuple[int, ...] = (),
) -> tuple[Implementation, Cost]:
    return (
        Implementation(name=name, reads=reads, writes=(1,), overwrites=overwrites),
        Cost(latency_ms=latency_ms, workspace_bytes=workspace_bytes),
    )


def offered(profile: Profile, operator: int, *, again: bool = False) -> list[set[str]]:
    """Names of the implementations that are left in each group of an operator."""
    tables = flatten(Problem.of(profile)).tables
    groups = range(tables.operators[operator, OPERATOR_GROUPS], tables.operators[operator, OPERATOR_GROUPS_END])
    start, end = (GROUP_OPTIONS_AGAIN, GROUP_OPTIONS_END) if again else (GROUP_OPTIONS, GROUP_OPTIONS_AGAIN)
    return [
        {
            profile.graph.operators[operator].implementations[choice].name
            for choice in tables.options[tables.groups[g, start] : tables.groups[g, end], OPTION_IMPLEMENTATION]
        }
        for g in groups
    ]


def test_dominated_implementations_are_left_out() -> None:
    profile = two_operators(
        [
            implementation("slow and small", 5.0, 1),
            implementation("fast and large", 1.0, 9),
            implementation("slower and as large", 2.0, 9),
            implementation("twin of the first", 5.0, 1),
        ]
    )
    assert offered(profile, 1) == [{"slow and small", "fast and large"}]


def test_what_is_read_makes_groups() -> None:
    profile = two_operators([implementation("a", 5.0, 1), implementation("b", 9.0, 9, reads=())])
    assert offered(profile, 1) == [{"a"}, {"b"}]


def test_in_place_stays_beside_what_beats_it_only_where_memory_is_plenty() -> None:
    profile = two_operators([implementation("a", 1.0, 0), implementation("in place", 2.0, 0, overwrites=(0,))])
    assert offered(profile, 1) == [{"a", "in place"}]
    tables = flatten(Problem.of(profile)).tables
    row = next(row for row in tables.options if row[OPTION_OVERWRITES] != row[OPTION_OVERWRITES_END])
    assert row[OPTION_EXTRA] == -10
    profile = two_operators([implementation("a", 1.0, -10), implementation("in place", 2.0, 0, overwrites=(0,))])
    assert offered(profile, 1) == [{"a"}]


def test_overwriting_what_is_not_read_or_held_is_never_legal() -> None:
    profile = two_operators([implementation("a", 9.0, 0), implementation("b", 1.0, 0, reads=(), overwrites=(0,))])
    assert offered(profile, 1) == [{"a"}]
    assert flatten(Problem.of(profile)).group_of[1] == {0: 0}


def test_costs_of_first_runs_and_later_ones_are_apart() -> None:
    one, other = implementation("a", 1.0, 0)[0], implementation("b", 2.0, 0)[0]
    profile = two_operators(
        [
            (one, Cost(latency_ms=1.0, workspace_bytes=0, recompute_latency_ms=9.0)),
            (other, Cost(latency_ms=2.0, workspace_bytes=0)),
        ]
    )
    assert offered(profile, 1) == [{"a"}]
    assert offered(profile, 1, again=True) == [{"b"}]


def test_what_may_be_dropped() -> None:
    for seed in range(50):
        profile = random_profile(random.Random(seed))
        graph = profile.graph
        expected = {
            value
            for operator in graph.operators
            if operator.phase is Phase.FORWARD and operator.rerunnable
            for value in operator.writes
            if not graph.values[value].held
        }
        assert set(flatten(Problem.of(profile)).droppable.tolist()) == expected


def test_tiny_values_are_constants_only_beside_a_large_peak() -> None:
    profile = two_operators([implementation("a", 1.0, 0)], size_bytes=1)
    assert flatten(Problem.of(profile)).droppable.tolist() == [0]
    profile = two_operators([implementation("a", 1.0, 10**9)], size_bytes=1)
    assert flatten(Problem.of(profile)).droppable.tolist() == []


def test_reads_are_in_ascending_order_and_unique() -> None:
    tables = flatten(Problem.of(random_profile(random.Random(3), 5))).tables
    for group in tables.groups:
        reads = tables.lists[group[GROUP_READS] : group[GROUP_READS_END]].tolist()
        assert reads == sorted(set(reads))


@pytest.mark.parametrize("seed", range(120))
def test_kernel_and_simulate_agree(seed: int) -> None:
    """Random choices: whatever comes out is legal, and costs what `simulate` says."""
    rng = random.Random(seed)
    profile = random_profile(rng)
    problem = flatten(Problem.of(profile))
    scratch = new_scratch(problem.value_count, problem.operator_count, 400)
    for _ in range(20):
        choices = keep_everything(problem)
        choices[problem.droppable] = [rng.randrange(16) for _ in problem.droppable]
        for place in range(problem.value_count, len(choices)):
            part, operator = divmod(place - problem.value_count, problem.operator_count)
            most = (
                3,
                3,
                3,
                len(problem.tables.agenda) if profile.graph.operators[operator].phase is Phase.FORWARD else 1,
                4,
            )[part]
            choices[place] = rng.randrange(most) if rng.random() < 0.5 else 0
        budget_bytes = rng.randint(1, 2 * problem.plain_peak_bytes)
        steps = decode(problem, choices, scratch, budget_bytes, 1.0, rng.choice([0.001, 1.0, 1e6]))
        if steps is None:
            continue
        timeline = simulate(profile, steps)
        assert timeline.peak_bytes == scratch.totals[PEAK]
        assert timeline.latency_ms == pytest.approx(scratch.totals[LATENCY])
        assert sum(max(0, here - budget_bytes) for here in timeline.memory_bytes) == scratch.totals[OVERFLOW]


def test_steps_survive_the_way_through_a_choices() -> None:
    """What recomputes right where it is needed comes back with the same operators in the same order."""
    for seed in range(60):
        profile = random_profile(random.Random(seed))
        problem = flatten(Problem.of(profile))
        scratch = new_scratch(problem.value_count, problem.operator_count, 400)
        choices = keep_everything(problem)
        choices[problem.droppable] = [random.Random(seed).randrange(16) for _ in problem.droppable]
        steps = decode(problem, choices, scratch, 10**6, 1.0, 1.0)
        if steps is not None:
            back = decode(problem, encode(problem, steps), scratch, 10**6, 1.0, 1.0)
            assert back is not None
            assert simulate(profile, back).latency_ms <= simulate(profile, steps).latency_ms + 1e-9


def test_plain_training_survives_the_way_through_a_choices() -> None:
    for seed in range(60):
        profile = random_profile(random.Random(seed))
        problem = flatten(Problem.of(profile))
        scratch = new_scratch(problem.value_count, problem.operator_count, 400)
        steps = plain_steps(profile.graph)
        back = decode(problem, encode(problem, steps), scratch, 10**6, 1.0, 1.0)
        assert back is not None
        assert [operator for operator, _ in back] == [operator for operator, _ in steps]


def test_nothing_at_all() -> None:
    graph = OperatorGraph(name="empty", operators=(), values=(), resident=Resident(parameters=7))
    profile = Profile(graph=graph, device="cpu", kind=ProfileKind.ESTIMATED, costs=())
    problem = flatten(Problem.of(profile))
    assert problem.plain_peak_bytes == 7
    assert numpy.array_equal(problem.droppable, [])


def test_what_reads_least_is_legal_and_reads_no_more_than_any_other_that_is_about_as_fast() -> None:
    differed = 0
    for seed in range(60):
        profile = random_profile(random.Random(seed))
        problem = flatten(Problem.of(profile))
        scratch = new_scratch(problem.value_count, problem.operator_count, 400)
        steps = decode(problem, read_least(problem), scratch, 10**12, 1.0, 1.0)
        assert steps is not None
        simulate(profile, steps)
        kept = set(problem.droppable.tolist())

        def read_bytes(operator: int, choice: int, profile: Profile = profile, kept: set[int] = kept) -> int:
            reads = set(profile.graph.operators[operator].implementations[choice].reads)
            return sum(profile.graph.values[value].size_bytes for value in reads & kept)

        for operator, choice in steps:
            costs = profile.costs[operator]
            groups = problem.group_of[operator]
            fastest = {
                group: min(costs[other].latency_ms for other, of in groups.items() if of == group)
                for group in set(groups.values())
            }
            near = [
                other for other, group in groups.items() if fastest[group] <= LEAN_FACTOR * min(fastest.values())
            ]
            least = min(read_bytes(operator, other) for other in near)
            assert read_bytes(operator, choice) == least
            differed += read_bytes(operator, 0) > least
    assert differed > 20
