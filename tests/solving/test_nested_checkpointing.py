"""Nested checkpointing over blocks: legal on any step, with as many runs and as little memory as it should have."""

import random
from collections import Counter

import pytest
import torch
from random_graphs import random_blocks
from torch import nn

import monetlite
from monetlite.core.blocks import find_blocks
from monetlite.core.costs import Profile
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.nested_checkpointing import nested_checkpointing, nested_settings

BLOCKS, WIDTH = 16, 64


@pytest.fixture(scope="module")
def tower() -> Profile:
    """Sixteen equal modules, each with more inside than what it hands on."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).tanh().sigmoid())

    with torch.device("meta"):
        graph = monetlite.trace(
            nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.empty(4096, WIDTH), device="rtx-3090"
        )
    return monetlite.profile(graph, device="rtx-3090").within(0.0)


@pytest.mark.parametrize("seed", range(40))
def test_any_step_is_legal(seed: int) -> None:
    profile = random_blocks(random.Random(seed), 6)
    graph, blocks = profile.graph, find_blocks(profile.graph)
    mandatory = {index for index, operator in enumerate(graph.operators) if not operator.optional}
    for parts in ((len(blocks),), (2,), (2, 2), (3, 2), (2, 2, 2)):
        steps = nested_checkpointing(graph, blocks, parts)
        simulate(profile, steps)
        assert mandatory <= {index for index, _ in steps}


def test_each_level_runs_a_block_once_more_and_keeps_less(tower: Profile) -> None:
    blocks = find_blocks(tower.graph)
    assert len(blocks) >= BLOCKS // 2
    plain = simulate(tower, plain_steps(tower.graph))
    found = {
        parts: simulate(tower, nested_checkpointing(tower.graph, blocks, parts))
        for parts in ((len(blocks),), (4,), (4, 4), (2, 2, 2, 2))
    }
    for parts, timeline in found.items():
        runs = Counter(index for index, _ in timeline.steps)
        most = max(runs[index] for block in blocks for index in block.forward)
        assert 2 <= most <= 1 + len(parts)
    assert found[4, 4].peak_bytes < found[4,].peak_bytes < plain.peak_bytes
    assert found[4, 4].peak_bytes < found[len(blocks),].peak_bytes
    assert found[len(blocks),].latency_ms < found[4, 4].latency_ms < found[2, 2, 2, 2].latency_ms


def test_settings_of_a_tower_are_all_different(tower: Profile) -> None:
    settings = list(nested_settings(tower))
    assert len(settings) == len(set(settings)) >= 6
    assert (
        min(simulate(tower, steps).peak_bytes for steps in settings)
        < 0.3 * simulate(tower, plain_steps(tower.graph)).peak_bytes
    )
