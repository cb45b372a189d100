"""`simulate` against a second derivation of the same rules, on random graphs and random schedules."""

import random

import pytest
from random_graphs import random_profile
from step_lists import (
    free_profile,
    live_before,
    recompute_at_random,
    recompute_everything,
    recompute_with_any_reads,
    schedule_of,
    with_random_implementations,
)

from monetlite.core.binding import bind
from monetlite.core.choices import Choices
from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.errors import IllegalSchedule, ScheduleMismatch
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind
from monetlite.core.simulate import simulate
from monetlite.core.steps import check_legal, check_order, plain_steps

HELD = {ValueKind.OUTPUT, ValueKind.TANGENT, ValueKind.PARAM_GRAD}


def judge(profile, steps):
    """(latency, memory at each step, what is live before it), or None if the steps are not legal.

    The rules, restated version by version: each write makes a version of a value, which lives from that step
    to its last read before the next write; what is held keeps its first storage to the end.
    """
    graph = profile.graph
    impls = [graph.operators[index].implementations[choice] for index, choice in steps]
    order = [index for index, _ in steps]
    mandatory = [i for i, op in enumerate(graph.operators) if op.phase is Phase.FORWARD and not op.optional]
    backward = [i for i, op in enumerate(graph.operators) if op.phase is Phase.BACKWARD]
    first = next((at for at, i in enumerate(order) if graph.operators[i].phase is Phase.BACKWARD), len(order))
    if [i for i in order if graph.operators[i].phase is Phase.BACKWARD] != backward:
        return None
    in_order = [i for i in order[:first] if not graph.operators[i].optional]
    if in_order[: len(mandatory)] != mandatory:
        return None
    if any(order.count(i) > 1 and not op.rerunnable for i, op in enumerate(graph.operators)):
        return None

    def reads(at, value):
        return value in impls[at].reads

    def writes(at, value):
        return value in impls[at].writes

    def next_write(at, value):
        return next((later for later in range(at + 1, len(steps)) if writes(later, value)), len(steps))

    def alive_before(at, value):
        """Whether a version of a value made before a step is still wanted at it or later."""
        made = [earlier for earlier in range(at) if writes(earlier, value)]
        if not made:
            return False
        if graph.values[value].kind in HELD:
            return True
        return any(reads(later, value) for later in range(at, min(next_write(made[-1], value) + 1, len(steps))))

    def read_later(at, value):
        """Whether the version of a value that a step reads is read after it."""
        until = next_write(at, value) if not writes(at, value) else at
        if graph.values[value].kind in HELD:
            return True
        return any(reads(later, value) for later in range(at + 1, min(until + 1, len(steps))))

    latency, memory, live_sets = 0.0, [], []
    for at, (index, choice) in enumerate(steps):
        live = {v for v in range(len(graph.values)) if alive_before(at, v)}
        if not set(impls[at].reads) <= live:
            return None
        if any(read_later(at, v) for v in impls[at].overwrites):
            return None
        cost = profile.costs[index][choice]
        again = index in order[:at]
        workspace = cost.workspace_bytes
        if again and cost.recompute_workspace_bytes is not None:
            workspace = cost.recompute_workspace_bytes
        latency += cost.recompute_latency_ms if again and cost.recompute_latency_ms is not None else cost.latency_ms
        present = live | set(impls[at].writes)
        total = sum(graph.values[v].size_bytes for v in present) + workspace
        total -= sum(graph.values[v].size_bytes for v in impls[at].overwrites)
        memory.append(graph.resident.total + total)
        live_sets.append(live)
    return latency, memory, live_sets


def judged(profile, steps):
    try:
        timeline = simulate(profile, steps)
    except IllegalSchedule:
        return None
    return timeline


def random_steps(profile, rng):
    graph = profile.graph
    kind = rng.randrange(4)
    if kind == 0:
        steps = plain_steps(graph)
    elif kind == 1:
        steps = recompute_everything(graph)
    elif kind == 2:
        steps = recompute_at_random(graph, rng, rng.random())
    else:
        return recompute_with_any_reads(graph, rng, rng.random())
    return with_random_implementations(graph, steps, rng)


def test_simulate_agrees_with_the_rules_on_legal_schedules():
    recomputed = overwritten = optional = 0
    for seed in range(250):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(2, 7))
        steps = random_steps(profile, rng)
        expected = judge(profile, steps)
        assert expected is not None, seed
        latency, memory, live = expected
        timeline = simulate(profile, steps)
        assert timeline.latency_ms == pytest.approx(latency, abs=1e-9)
        assert list(timeline.memory_bytes) == memory, seed
        assert timeline.peak_bytes == max(memory)
        assert live_before(profile.graph, timeline) == live, seed
        assert timeline.memory_bytes[timeline.peak_step] == timeline.peak_bytes
        recomputed += len(steps) > len({index for index, _ in steps})
        optional += any(profile.graph.operators[i].optional for i, _ in steps)
        overwritten += any(profile.graph.operators[i].implementations[c].overwrites for i, c in steps)
    assert recomputed > 50
    assert overwritten > 30
    assert optional > 15


def test_simulate_agrees_with_the_rules_on_damaged_schedules():
    """Steps dropped, repeated, swapped or run otherwise: the same are refused, the others cost the same."""
    refused = accepted = 0
    for seed in range(1500):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(2, 5))
        steps = list(random_steps(profile, rng))
        for _ in range(rng.choice([1, 1, 2])):
            at, other = rng.randrange(len(steps)), rng.randrange(len(steps))
            damage = rng.randrange(4)
            if damage == 0 and len(steps) > 1:
                del steps[at]
            elif damage == 1:
                steps.insert(at, steps[other % len(steps)])
            elif damage == 2:
                steps[at], steps[other] = steps[other], steps[at]
            else:
                index = steps[at][0]
                steps[at] = (index, rng.randrange(len(profile.graph.operators[index].implementations)))
        expected, timeline = judge(profile, steps), judged(profile, steps)
        assert (expected is None) == (timeline is None), seed
        try:
            check_legal(profile.graph, tuple(steps))
            assert expected is not None, seed
        except IllegalSchedule:
            assert expected is None, seed
        if expected is None:
            refused += 1
        else:
            accepted += 1
            assert list(timeline.memory_bytes) == expected[1], seed
    assert refused > 300
    assert accepted > 300


def test_choices_spell_out_the_steps_they_were_made_of():
    for seed in range(200):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(2, 7))
        steps = random_steps(profile, rng)
        choices = Choices.of_steps(profile.graph, steps)
        assert choices.steps(profile.graph) == steps, seed
        assert Choices.of_steps(profile.graph, choices.steps(profile.graph)) == choices


def test_stored_names_what_crosses_from_forward_to_backward():
    for seed in range(100):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(2, 6))
        graph, steps = profile.graph, random_steps(profile, rng)
        if not any(operator.phase is Phase.BACKWARD for operator in graph.operators):
            continue
        first = next(at for at, (i, _) in enumerate(steps) if graph.operators[i].phase is Phase.BACKWARD)
        _, _, live = judge(profile, steps)
        crossing = {graph.values[v].name for v in live[first] if graph.values[v].kind not in HELD}
        assert set(Choices.of_steps(graph, steps).stored) == crossing, seed


def test_plain_steps_run_everything_that_is_needed_once():
    for seed in range(100):
        profile = random_profile(random.Random(seed))
        steps = plain_steps(profile.graph)
        assert judge(profile, steps) is not None
        assert all(choice == 0 for _, choice in steps)
        ran = [index for index, _ in steps]
        assert len(ran) == len(set(ran))
        needed = {v for i in ran for v in profile.graph.operators[i].implementations[0].reads}
        for index, operator in enumerate(profile.graph.operators):
            assert (index in ran) == (not operator.optional or bool(needed & set(operator.writes)))


def chain():
    """f0 → f1 → loss → b1 → b0, where b1 reads f0's value and b0 can take over the gradient's memory."""
    kinds = (
        ValueKind.ACTIVATION,
        ValueKind.OUTPUT,
        ValueKind.TANGENT,
        ValueKind.GRADIENT,
        ValueKind.PARAM_GRAD,
    )
    values = tuple(
        Value(name=f"v{number}", kind=kind, size_bytes=10 ** (number + 1)) for number, kind in enumerate(kinds)
    )

    def operator(name, phase, reads, writes, overwrites=(), **how):
        items = [Implementation(name="default", reads=reads, writes=writes)]
        if overwrites:
            items.append(Implementation(name="inplace", reads=reads, writes=writes, overwrites=overwrites))
        return Operator(name=name, family=name, phase=phase, implementations=tuple(items), **how)

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    graph = OperatorGraph(
        name="chain",
        operators=(
            operator("f0", forward, (), (0,)),
            operator("f1", forward, (0,), (1,), overwrites=(0,), rerunnable=False),
            operator("loss", backward, (1,), (2,)),
            operator("b1", backward, (0, 2), (3,)),
            operator("b0", backward, (3,), (4,), overwrites=(3,)),
        ),
        values=values,
        resident=Resident(parameters=3, inputs=4),
    )
    costs = tuple(
        tuple(Cost(latency_ms=1.0, workspace_bytes=5) for _ in item.implementations) for item in graph.operators
    )
    return Profile(graph=graph, device="cpu", kind=ProfileKind.MEASURED, costs=costs)


def test_memory_of_a_chain_by_hand():
    profile = chain()
    plain = simulate(profile, [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)])
    assert plain.memory_bytes == (
        7 + 5 + 10,
        7 + 5 + 10 + 100,
        7 + 5 + 10 + 100 + 1000,
        7 + 5 + 10 + 100 + 1000 + 10_000,
        7 + 5 + 100 + 1000 + 10_000 + 100_000,
    )
    again = simulate(profile, [(0, 0), (1, 1), (2, 0), (0, 0), (3, 0), (4, 1)])
    assert again.memory_bytes == (
        7 + 5 + 10,
        7 + 5 + 100,
        7 + 5 + 100 + 1000,
        7 + 5 + 100 + 1000 + 10,
        7 + 5 + 10 + 100 + 1000 + 10_000,
        7 + 5 + 100 + 1000 + 100_000,
    )
    assert again.latency_ms == 6.0


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([(0, 0), (1, 0), (2, 0), (3, 0)], "b0 is never run"),
        ([(0, 0), (2, 0), (1, 0), (3, 0), (4, 0)], r"step 2 \(loss\): backward begins before f1 has run"),
        (
            [(1, 0), (0, 0), (2, 0), (3, 0), (4, 0)],
            r"step 1 \(f1\): the forward pass must run once, in order",
        ),
        ([(0, 0), (0, 0), (1, 0), (2, 0), (3, 0), (4, 0)], r"step 2 \(f0\): the forward pass must run once"),
        (
            [(0, 0), (1, 0), (2, 0), (4, 0), (3, 0)],
            r"step 4 \(b0\): backward operators must run once each, in order",
        ),
        (
            [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 0)],
            r"step 6 \(b0\): backward operators must run once each",
        ),
        ([(0, 0), (1, 0), (1, 0), (2, 0), (3, 0), (4, 0)], r"step 3 \(f1\): can't be run again"),
        (
            [(0, 0), (1, 1), (2, 0), (3, 0), (4, 0)],
            r"step 2 \(f1, inplace\): overwrites v0, which is read later",
        ),
        ([(0, 0), (1, 0), (2, 0), (3, 0), (4, 2)], r"step 5 \(b0\): there is no implementation 2"),
        ([(0, 0), (1, 0), (2, 0), (3, 0), (4, -1)], r"step 5 \(b0\): there is no implementation -1"),
        ([(0, 0), (1, 0), (2, 0), (3, 0), (9, 0)], "step 5: there is no operator 9"),
        ([(0, 0)], "f1 is never run"),
        ([], "f0 is never run"),
    ],
)
def test_illegal_schedules_are_named(steps, says):
    with pytest.raises(IllegalSchedule, match=says):
        simulate(chain(), steps)


def test_a_mask_that_was_never_made():
    """An optional operator has to run before what reads its value."""
    found = 0
    for seed in range(100):
        rng = random.Random(seed)
        profile = random_profile(rng)
        graph, steps = profile.graph, recompute_with_any_reads(profile.graph, rng, 0.3)
        without = [step for step in steps if not graph.operators[step[0]].optional]
        if len(without) < len(steps):
            found += 1
            with pytest.raises(IllegalSchedule, match="which is not in memory there"):
                simulate(profile, without)
    assert found > 10


def test_a_budget_is_held_to_the_byte():
    profile = chain()
    steps = plain_steps(profile.graph)
    peak = simulate(profile, steps).peak_bytes
    simulate(profile, steps, budget_bytes=peak)
    with pytest.raises(IllegalSchedule, match=rf"b0.*{peak} bytes.*{peak - 1} bytes"):
        simulate(profile, steps, budget_bytes=peak - 1)


def test_check_order_takes_any_iterable():
    check_order(chain().graph, iter(range(5)))


def test_names_a_graph_does_not_have():
    profile = chain()
    graph = profile.graph
    schedule = schedule_of(profile, plain_steps(graph))
    for choices, says in (
        (Choices(before={"b1": (("f7", "default"),)}), "runs operator 'f7', which this model's step does not"),
        (Choices(before={"b7": (("f0", "default"),)}), "names operator 'b7', which this model's step does not"),
        (Choices(implementations={"f9": "default"}), "names operator 'f9'"),
        (
            Choices(implementations={"f1": "inplace"}),
            "not legal on this model: .*overwrites v0, which is read later",
        ),
        (
            Choices(before={"b1": (("f1", "default"),)}),
            r"not legal on this model: .*\(f1\): can't be run again",
        ),
        (Choices(before={"f1": (("b0", "default"),)}), "not legal on this model"),
    ):
        with pytest.raises(ScheduleMismatch, match=says):
            bind(with_choices(schedule, choices), graph)
    assert bind(schedule, graph) == plain_steps(graph)


def test_implementations_a_graph_does_not_have():
    """Exactly these steps are not to be had; a model runs the default ones, and says so."""
    profile = chain()
    graph = profile.graph
    schedule = schedule_of(profile, plain_steps(graph))
    for choices, says in (
        (Choices(implementations={"f1": "cudnn_17"}), "f1 as 'cudnn_17'; this graph offers default, inplace"),
        (Choices(before={"b1": (("f0", "fast"),)}), "f0 as 'fast'; this graph offers default"),
    ):
        changed = with_choices(schedule, choices)
        with pytest.raises(ScheduleMismatch, match=says):
            changed.steps(graph)
        with pytest.warns(UserWarning, match="they run by default instead"):
            steps = bind(changed, graph)
        assert all(choice == 0 for _, choice in steps)


def with_choices(schedule, choices):
    from dataclasses import replace

    return replace(schedule, choices=choices)


def test_fingerprints_tell_graphs_apart_and_costs_do_not_matter():
    graphs = [random_profile(random.Random(seed)).graph for seed in range(60)]
    assert len({graph.fingerprint for graph in graphs}) == len(graphs)
    again = random_profile(random.Random(5)).graph
    assert again.fingerprint == graphs[5].fingerprint
    assert free_profile(again).graph.structure == graphs[5].structure


def test_gap_and_overhead():
    schedule = schedule_of(chain(), plain_steps(chain().graph))
    assert schedule.gap == 1.0
    assert schedule.overhead == 0.0
