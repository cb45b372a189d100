"""Plans within plans: legal on any step, as good as an exact recursion says, and where one level of them fails."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from random_graphs import random_blocks
from torch import nn

import monetlite
from monetlite.core.blocks import find_blocks
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import DELIVERY
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.solving.baselines import checkpointing_settings
from monetlite.solving.blocks.block_plans import PlanSearch
from monetlite.solving.blocks.deep_step import DeepStep, in_blocks
from monetlite.solving.blocks.layer_plans import LayerPlans
from monetlite.solving.blocks.nested_plans import MOST_UNITS, NestedPlans, nested_plans, unit_places
from monetlite.solving.smallest import smallest_budget

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


def planned(profile: Profile, seconds: float = 0.05) -> DeepStep | None:
    """A step with plans of each block; None if it has few of these."""
    deep = in_blocks(profile, seed=0)
    if deep is not None:
        deep.timeline_of = legal(profile)
        deep.sweep(1, seconds, lambda: False)
    return deep


def legal(profile: Profile) -> Callable[[tuple[Step, ...]], Timeline]:
    """`simulate`, where steps that are illegal end the test."""

    def timeline_of(steps: tuple[Step, ...]) -> Timeline:
        try:
            return simulate(profile, steps)
        except IllegalSchedule as error:
            raise AssertionError(str(error)) from error

    return timeline_of


@pytest.mark.parametrize("seed", range(40))
def test_any_step_is_legal(seed: int) -> None:
    profile = random_blocks(random.Random(seed), 7)
    deep = planned(profile)
    if deep is None:
        pytest.skip("of few blocks")
    nested = NestedPlans(deep)
    mandatory = {index for index, operator in enumerate(profile.graph.operators) if not operator.optional}
    plain = simulate(profile, plain_steps(profile.graph))
    seen = set()
    for percent in range(10, 101, 5):
        timeline = nested.within(plain.peak_bytes * percent // 100)
        if timeline is not None:
            assert mandatory <= {index for index, _ in timeline.steps}
            seen.add(timeline.steps)
    assert seen


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_what_an_exact_recursion_finds(seed: int) -> None:
    """Bytes are rounded up to levels: it is as fast as the recursion within a few percent less memory."""
    profile = random_blocks(random.Random(100 + seed), 6)
    deep = planned(profile)
    if deep is None:
        pytest.skip("of few blocks")
    nested = NestedPlans(deep)

    @functools.cache
    def least_ms(first: int, end: int, room: int) -> float:
        if first == end:
            return 0.0
        done = nested.later_bytes[end - 1] + int(nested.gradient_bytes[end])
        best = math.inf
        for plan in nested.plans[first]:
            if max(plan.forward_bytes + done, plan.backward_bytes + nested.later_bytes[first]) <= room:
                best = min(best, plan.time_ms + least_ms(first + 1, end, room - plan.kept_bytes))
        peak, passed_ms = 0, 0.0
        for cut in range(first + 1, end):
            way = nested.forward[cut - 1]
            peak = max(peak, int(nested.left_bytes[first, cut - 1]) + way.peak_bytes)
            passed_ms += way.first_ms if end == len(nested.places) else way.again_ms
            left = room - int(nested.left_bytes[first, cut])
            if peak + done <= room and left >= 0:
                best = min(best, passed_ms + least_ms(cut, end, left) + least_ms(first, cut, room))
        return best

    resident = profile.graph.resident.total
    plain = simulate(profile, plain_steps(profile.graph))
    compared = 0
    for percent in range(30, 101, 5):
        budget_bytes = plain.peak_bytes * percent // 100
        room = budget_bytes - resident
        expected_ms = least_ms(0, len(nested.places), int(0.93 * room))
        if math.isfinite(expected_ms):
            timeline = nested.within(budget_bytes)
            assert timeline is not None
            assert timeline.peak_bytes <= budget_bytes
            assert timeline.latency_ms <= expected_ms * (1 + 1e-9)
            compared += 1
    assert compared


def test_a_tower_fits_where_no_setting_does(tower: Profile) -> None:
    """The less memory, the more levels: from one run more to several."""
    plain = simulate(tower, plain_steps(tower.graph))
    settings = min(simulate(tower, steps).peak_bytes for steps in checkpointing_settings(tower))
    deep = planned(tower, 10.0)  # the search ends by itself, much sooner
    assert deep is not None
    nested = NestedPlans(deep)
    most: list[int] = []
    for part in (1.0, 0.9, 0.8):
        timeline = nested.within(int(part * settings))
        assert timeline is not None
        assert timeline.peak_bytes <= part * settings
        assert timeline.latency_ms < 2 * plain.latency_ms
        most.append(max(Counter(index for index, _ in timeline.steps).values()))
    assert most == sorted(most)
    assert most[-1] >= 3


def test_the_smallest_budget_is_below_that_of_settings(tower: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without annealing for the smallest peak, which finds as much for a step as small as this."""
    monkeypatch.setattr("monetlite.solving.smallest._lower_in_threads", lambda *of, **by: None)
    settings = min(simulate(tower, steps).peak_bytes for steps in checkpointing_settings(tower))
    found = smallest_budget(tower, seconds=30.0)  # the search ends by itself, much sooner
    assert found.smallest_reached_bytes is not None
    assert found.smallest_reached_bytes < 0.8 * settings


def test_the_smallest_budget_is_at_most_that_of_settings(tower: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monetlite.solving.smallest._nest_plans", lambda *of, **by: None)
    monkeypatch.setattr("monetlite.solving.smallest._lower_in_threads", lambda *of, **by: None)
    settings = min(simulate(tower, steps).peak_bytes for steps in checkpointing_settings(tower))
    assert smallest_budget(tower, seconds=30.0).smallest_reached_bytes == settings


def test_the_leanest_schedule_is_found_from_afar(tower: Profile) -> None:
    """A few programs of less and less room lead from plain training's peak to it."""
    deep = planned(tower, 10.0)  # the search ends by itself, much sooner
    assert deep is not None
    nested = NestedPlans(deep)
    plain_bytes = simulate(tower, plain_steps(tower.graph)).peak_bytes
    seen: list[int] = []

    def timeline_of(steps: tuple[Step, ...]) -> Timeline:
        timeline = simulate(tower, steps)
        seen.append(timeline.peak_bytes)
        return timeline

    deep.timeline_of = timeline_of
    leanest = nested.leanest(plain_bytes)
    assert leanest is not None
    assert leanest.peak_bytes == min(seen) < 0.35 * plain_bytes
    assert len(seen) <= 6


def test_plans_of_a_lower_peak_are_looked_for(tower: Profile) -> None:
    deep = DeepStep(tower, find_blocks(tower.graph), seed=0)
    search = PlanSearch(deep.cut.stretch(1, 3), seed=0)
    before = min(plan.peak_bytes for plan in search.plans)
    search.lower(2.0, lambda: False)
    assert min(plan.peak_bytes for plan in search.plans) < before


@pytest.mark.parametrize("blocks", [1, 4, MOST_UNITS, MOST_UNITS + 1, 2 * MOST_UNITS + 3, 4 * MOST_UNITS])
def test_parts_hold_each_block_once(blocks: int) -> None:
    places = unit_places(blocks)
    assert [start for start, _ in places] == [0, *(end for _, end in places[:-1])]
    assert places[-1][1] == blocks
    assert len(places) <= MOST_UNITS + 2


def test_nothing_is_nested_while_plans_are_missing(tower: Profile) -> None:
    assert nested_plans(DeepStep(tower, find_blocks(tower.graph), seed=0)) is None


def test_layers_are_planned_where_autograd_copies_gradients() -> None:
    """Two weights of each layer have the same gradient, of which autograd copies one."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x + (self.one + self.other)).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        graph = monetlite.trace(Model(), torch.empty(4096, WIDTH), device="rtx-3090")
    assert any(operator.writes for operator in graph.operators if operator.family == DELIVERY)
    profile = monetlite.profile(graph, device="rtx-3090", optimizer="adamw")
    plain_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
    plans = LayerPlans(profile, "layers", seconds=1.0, seed=0)
    for steps in (plans.within(int(0.8 * plain_bytes)), plans.leanest(plain_bytes)):
        assert steps is not None
        assert simulate(profile, steps).peak_bytes <= 0.8 * plain_bytes
