"""What memory is split into sums to what `simulate` says, step by step."""

import random

import pytest
import torch
from random_graphs import random_profile
from step_lists import free_profile, recompute
from torch import nn

import monetlite
from monetlite.core.graph import Phase, ValueKind
from monetlite.core.simulate import simulate
from monetlite.core.step_analysis import Holding, StepAnalysis
from monetlite.core.steps import plain_steps


@pytest.mark.parametrize("seed", range(60))
def test_the_parts_sum_to_what_simulate_says(seed):
    rng = random.Random(seed)
    profile = random_profile(rng)
    graph = profile.graph
    steps = recompute(
        graph,
        drop=lambda _: rng.random() < 0.5,
        choose=lambda index: rng.randrange(len(graph.operators[index].implementations)),
    )
    try:
        timeline = simulate(profile, steps)
    except monetlite.MonetliteError:
        timeline = simulate(profile, recompute(graph, drop=lambda _: rng.random() < 0.5))
    parts = StepAnalysis(profile=profile, timeline=timeline)
    assert [sum(here) for here in zip(*parts.bytes_of.values(), strict=True)] == list(timeline.memory_bytes)


def test_each_value_is_alive_from_its_writer_to_its_last_reader():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    graph = monetlite.trace(model, torch.randn(4, 8))
    profile = free_profile(graph)
    steps = recompute(graph, drop=lambda _: True)
    timeline = simulate(profile, steps)
    parts = StepAnalysis(profile=profile, timeline=timeline)
    assert len(steps) > len(plain_steps(graph))
    for stay in parts.lifetimes:
        assert graph.writer[stay.value] == steps[stay.begin][0]
        for read in stay.reads:
            index, choice = steps[read]
            assert stay.value in graph.operators[index].implementations[choice].reads
            assert stay.begin < read <= stay.end
        held = graph.values[stay.value].held
        assert stay.end == (len(steps) - 1 if held else max((stay.begin, *stay.reads)))
    begins = next(at for at, (index, _) in enumerate(steps) if graph.operators[index].phase is Phase.BACKWARD)
    assert parts.timeline.border == begins
    assert len({stay.backward for stay in parts.lifetimes}) == 2
    for stay in parts.lifetimes:
        assert stay.backward == (stay.begin >= begins)
        if graph.values[stay.value].kind in (ValueKind.ACTIVATION, ValueKind.INTERMEDIATE):
            assert parts.holding(stay) is (Holding.RECOMPUTED if stay.backward else Holding.STORED)
    assert all(parts.bytes_of[Holding.RECOMPUTED][at] == 0 for at in range(begins))
    assert any(parts.bytes_of[Holding.RECOMPUTED])


def test_what_is_always_there_is_counted_at_every_step():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    graph = monetlite.trace(model, torch.randn(4, 8))
    profile = free_profile(graph)
    parts = StepAnalysis(profile=profile, timeline=simulate(profile, plain_steps(graph)))
    weights = sum(item.nbytes for item in (*model.parameters(), *model.buffers()))
    assert set(parts.bytes_of[Holding.WEIGHTS]) == {weights}
    assert set(parts.bytes_of[Holding.INPUTS]) == {4 * 8 * 4}
    last = sum(item.nbytes for item in model.parameters())
    assert parts.bytes_of[Holding.WEIGHT_GRADIENTS][-1] == last
