"""The compiled allocator, and schedules whose tensors come to lie without gaps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_profile
from test_reserved import in_blocks
from thoroughness import some

import monetlite
from monetlite.allocator import Allocator, reserve
from monetlite.allocator.allocator import SMALL
from monetlite.allocator.reserved import requests_of
from monetlite.core.costs import Profile
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.solving.annealing.arranging import arrange
from monetlite.solving.annealing.compiled import (
    PART_AGAIN,
    PART_FIRST,
    new_scratch,
    reserved_bytes,
)
from monetlite.solving.annealing.flat_problem import decode, flatten, keep_everything
from monetlite.solving.problem import Problem


def on_paper(profile: Profile, steps: tuple[Step, ...]) -> int:
    """The same by `Allocator`: its large requests, for three steps."""
    allocator = Allocator(expandable=True)
    for _ in range(3):
        blocks = {}
        for number, size in requests_of(profile.graph, simulate(profile, steps)):
            if size > SMALL:
                blocks[number] = allocator.allocate(size)
            elif size == 0 and number in blocks:
                allocator.free(blocks.pop(number))
    return allocator.peak_reserved_bytes


@settings(deadline=None, max_examples=some(150))
@given(seed=st.integers(0, 2**32), block=st.sampled_from([1000, 2**19, 2**20 + 512, 7 * 2**20, 45 * 10**6 + 1]))
def test_compiled_as_on_paper(seed: int, block: int) -> None:
    rng = random.Random(seed)
    profile = in_blocks(random_profile(rng, rng.randint(2, 14)), block)
    flat = flatten(Problem.of(profile))
    scratch = new_scratch(flat.value_count, flat.operator_count, 20 * flat.operator_count + 64)
    choices = keep_everything(flat)
    choices[flat.droppable] = [rng.randrange(16) for _ in flat.droppable]
    for part in (PART_FIRST, PART_AGAIN):
        for operator, groups in enumerate(flat.group_of):
            if groups:
                chosen = rng.choice(list(groups.values()))
                choices[flat.value_count + part * flat.operator_count + operator] = chosen
    budget_bytes = rng.randint(1, 2 * flat.plain_peak_bytes)
    steps = decode(flat, choices, scratch, budget_bytes, 1.0, rng.choice([0.001, 1e6]))
    if steps is not None:
        assert reserved_bytes(flat.tables, scratch) == on_paper(profile, steps)


@pytest.mark.thorough
def test_what_is_arranged_gives_nothing_back(profile: Profile) -> None:
    """Within a limit for which schedules of that peak reserve too much, and hardly slower than those."""
    limit_bytes = 480 * 10**6
    found = monetlite.solve(profile, limit_bytes, time_limit=2)
    starts = [found.steps(profile.graph), plain_steps(profile.graph)]
    assert reserve(profile, starts[0], expandable=True).peak_bytes > limit_bytes
    steps = arrange(profile, starts, limit_bytes, seconds=6)
    assert steps is not None
    timeline = simulate(profile, steps, limit_bytes)
    assert reserve(profile, steps, expandable=True).peak_bytes <= limit_bytes
    within = reserve(profile, steps, expandable=True, limit_bytes=limit_bytes)
    assert within.fits
    assert not within.releases
    assert timeline.latency_ms <= 1.1 * found.latency_ms


@pytest.mark.thorough
def test_nothing_is_found_where_nothing_fits(profile: Profile) -> None:
    starts = [plain_steps(profile.graph)]
    assert arrange(profile, starts, profile.graph.resident.total + 30 * 10**6, seconds=0.5) is None
    assert arrange(profile, [], 10**9, seconds=0.5) is None
