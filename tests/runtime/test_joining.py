"""Pieces of a step joined to one: legal steps of each, and the memory of all."""

import torch
from step_lists import free_profile
from torch import nn

import monetlite
from monetlite.core.graph import Phase, Resident
from monetlite.core.joining import LetGo, OutsideCode, Piece, join
from monetlite.core.simulate import simulate
from monetlite.core.steps import check_legal, plain_steps


def mlp():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))


NO_CODE = (OutsideCode(),) * 3


def joined(outside=NO_CODE):
    """Two perceptrons in a row, as two pieces."""
    graph = monetlite.trace(mlp(), torch.randn(32, 16, requires_grad=True))
    profile = free_profile(graph)
    (gradient,) = (
        ref.value
        for operator in graph.operators
        if operator.name.startswith("deliver")
        for ref in operator.implementations[0].call.tensors()
        if ref.spec.shape == (32, 16)
    )
    pieces = [Piece(profile=profile, handed_back={}), Piece(profile=profile, handed_back={gradient: 1})]
    resident = Resident(parameters=2 * graph.resident.parameters)
    return graph, join("both", pieces, outside, resident=resident, inputs={})


def test_steps_of_joined_pieces_are_legal_steps_of_each():
    graph, both = joined()
    steps = plain_steps(both.profile.graph)
    assert both.in_order(steps) == steps
    first, second = both.split(steps)
    for own in (first, second):
        check_legal(graph, own)
        assert [index for index, _ in own] == [index for index, _ in plain_steps(graph)]
    assert both.pieces == 2
    # A re-run that the search puts into the backward part of the other piece comes first in its own.
    operators = both.profile.graph.operators
    gelu = next(index for index, item in enumerate(operators) if item.family == "gelu")
    turn = next(at for at, (index, _) in enumerate(steps) if operators[index].phase is Phase.BACKWARD)
    early = (*steps[: turn + 2], (gelu, 0), *steps[turn + 2 :])
    moved = both.split(both.in_order(early))[0]
    loss = next(at for at, (index, _) in enumerate(moved) if graph.operators[index].family == "monetlite.loss")
    assert moved[loss + 1][0] == both.origin[gelu][1]
    check_legal(graph, moved)


def test_memory_of_joined_pieces_is_the_sum_of_what_is_alive():
    """What the first of two equal pieces keeps in plain training is there while the second runs."""
    graph, both = joined()
    alone = simulate(free_profile(graph), plain_steps(graph))
    forward = [item for item in graph.operators if item.phase is Phase.FORWARD and not item.optional]
    kept = alone.memory_bytes[len(forward) - 1]
    peak = simulate(both.profile, plain_steps(both.profile.graph)).peak_bytes
    inside = kept - graph.resident.total
    assert peak >= 2 * graph.resident.parameters + 2 * inside
    with_code = joined([OutsideCode(kept_bytes=1000, forward_bytes=1500, backward_bytes=10**6)] * 3)[1]
    steps = plain_steps(with_code.profile.graph)
    timeline = simulate(with_code.profile, steps)
    assert timeline.peak_bytes >= 3000 + 10**6
    names = [with_code.profile.graph.operators[index].name for index, _ in steps]
    first = names.index("outside 0")
    assert timeline.memory_bytes[first] == timeline.resident_bytes + 1500


def memory_at(both):
    """The memory of plain training's steps, by the operators' names."""
    steps = plain_steps(both.profile.graph)
    names = [both.profile.graph.operators[index].name for index, _ in steps]
    return dict(zip(names, simulate(both.profile, steps).memory_bytes, strict=True))


def test_what_the_forward_pass_lets_go_is_gone_before_the_loss():
    kept = [OutsideCode(kept_bytes=1000), OutsideCode(), OutsideCode(backward_bytes=5000)]
    released = [*kept[:2], OutsideCode(backward_bytes=5000, released_bytes=1000)]
    before, after = (memory_at(joined(outside)[1]) for outside in (kept, released))
    lighter = {name for name in before if after[name] == before[name] - 1000}
    assert lighter == set(list(before)[list(before).index("piece2.loss") :])
    assert all(after[name] == before[name] for name in before.keys() - lighter)


def test_what_code_outside_hands_to_a_piece_is_there_until_it_is_let_go_and_no_plan_reads_it():
    graph, both = joined()
    first = graph.operators[0].implementations[0]
    (name,) = (ref.node for ref in first.call.tensors() if ref.spec.shape == (32, 16))
    reading = [
        f"piece2.{operator.name}"
        for operator in graph.operators
        if operator.implementations[0].call is not None
        and any(ref.node == name for ref in operator.implementations[0].call.tensors())
    ]
    plain, names = memory_at(both), list(memory_at(both))
    for takers, last in (((), "outside 2"), (((1, name),), reading[-1])):
        handed = (1000, LetGo(until=2, takers=takers))
        code = OutsideCode(handed=(handed,), forward_bytes=1000)
        memory = memory_at(joined([NO_CODE[0], code, NO_CODE[2]])[1])
        there = {item for item in names if memory[item] == plain[item] + 1000}
        assert there == set(names[names.index("outside 1") : names.index(last) + 1])
    assert names.index(reading[-1]) > names.index("piece2.loss")


def test_what_runs_earlier_in_pieces_finds_what_it_reads():
    """A copy that is first made in another piece's backward part is made in its own forward part.

    There, what it reads is not overwritten.
    """
    both = joined()[1]
    graph = both.profile.graph
    at = {operator.name: index for index, operator in enumerate(graph.operators)}

    def by(name, way):
        names = [item.name for item in graph.operators[at[name]].implementations]
        return at[name], names.index(way)

    changed = dict([by("piece1.1", "inplace"), by("piece1.1.backward", "from_bfloat16")])
    steps = [(index, changed.get(index, choice)) for index, choice in plain_steps(graph)]
    turn = steps.index((at["piece2.3.backward"], 0))
    steps[turn:turn] = [(at["piece1.0"], 0), (at["piece1.1.bfloat16"], 0)]
    check_legal(graph, steps)
    ordered = both.in_order(steps)
    check_legal(graph, ordered)
    assert (at["piece1.1"], 0) in ordered
    assert ordered.index((at["piece1.1.bfloat16"], 0)) < ordered.index((at["piece2.0"], 0))
