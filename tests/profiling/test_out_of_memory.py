"""Measuring where memory is short: what doesn't fit is left out, what libraries keep is counted."""

import pytest
import torch
from torch import nn

import monetlite
from monetlite.core.costs import load_profile
from monetlite.core.errors import ProfileError
from monetlite.core.simulate import simulate
from monetlite.core.step_analysis import Holding, StepAnalysis
from monetlite.core.steps import plain_steps
from monetlite.profiling import measured
from monetlite.profiling.measured_calls import calls_to_measure

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB.\nSee above."
)
KEPT_BYTES = 8_519_680
"""What cuBLAS keeps for a thread on GPUs before Hopper."""


class SmallDevice:
    """Refuses the calls that it is told to refuse, by number."""

    device = "cpu"

    def __init__(self):
        self.refused = lambda number: False
        self.measured = 0
        self.kept = []

    def latency_ms(self, run, recent=None, room_bytes=0):
        run()
        self.measured += 1
        if self.refused(self.measured):
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return 1.0

    def host_ms(self, run):
        return 0.0

    def growth_bytes(self, run):
        return 10**9

    def kept_bytes(self, runs):
        for run in runs:
            run()
        self.kept.append(len(runs))
        return KEPT_BYTES if runs else 0

    def environment(self):
        return {"device": "a small device"}


@pytest.fixture
def small(monkeypatch):
    meter = SmallDevice()
    monkeypatch.setattr(measured, "meter_for", lambda _: meter)
    return meter


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    return monetlite.trace(model, torch.randn(2, 3, 12, 12))


def defaults(graph):
    """How many distinct calls the default implementations make, and all of them."""
    candidates = calls_to_measure(graph.available("cpu"))
    return {name for name, item in candidates.items() if item.needed}, list(candidates)


def test_alternatives_that_do_not_fit_are_left_out_and_said(graph, small, cache_folder):
    needed, order = defaults(graph)
    assert len(needed) < len(order), "there is no alternative: this can't fail"
    small.refused = lambda number: order[number - 1] not in needed
    with pytest.warns(UserWarning, match="ran out of memory while they were measured and are left out: ") as told:
        profile = monetlite.profile(graph, "cpu")
    (message,) = (str(item.message) for item in told if "ran out" in str(item.message))
    assert f"{len(order) - len(needed)} implementations" in message
    assert " and others." in message
    for operator, before in zip(profile.graph.operators, graph.operators, strict=True):
        assert operator.implementations[0] == before.implementations[0]
    ways = sum(len(operator.implementations) for operator in profile.graph.operators)
    assert ways < sum(len(operator.implementations) for operator in graph.available("cpu").operators)
    assert simulate(profile, plain_steps(profile.graph)).latency_ms > 0
    # Nothing is remembered of what did not fit: with more memory it is measured.
    small.refused = lambda number: False
    again = monetlite.profile(graph, "cpu")
    assert again.graph.operators == graph.available("cpu").operators


def test_a_default_that_does_not_fit_is_named_with_what_to_do(graph, small):
    needed, order = defaults(graph)
    first = next(number for number, name in enumerate(order, start=1) if name in needed)
    small.refused = lambda number: number == first
    with pytest.raises(ProfileError, match="does not fit into cpu's memory, alone: CUDA out of memory") as refused:
        monetlite.profile(graph, "cpu")
    assert "lower the batch" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_cublas_keeps_is_resident_for_each_thread_that_calls_it(small, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    profile = monetlite.profile(monetlite.trace(model, torch.randn(2, 8)), "cpu")
    assert small.kept == [2, 2], "addmm and mm, which may both run again in the backward part"
    assert profile.graph.resident.libraries == 2 * KEPT_BYTES
    plain = simulate(profile, plain_steps(profile.graph))
    assert plain.resident_bytes == profile.graph.resident.total > 2 * KEPT_BYTES
    held = StepAnalysis(profile=profile, timeline=plain).bytes_of
    assert min(held[Holding.WORKSPACE]) >= 2 * KEPT_BYTES
    assert [sum(step) for step in zip(*held.values(), strict=True)] == list(plain.memory_bytes)
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").graph.resident == profile.graph.resident


def test_a_step_without_matrix_products_keeps_nothing(graph, small):
    assert monetlite.profile(graph, "cpu").graph.resident.libraries == 0
    assert small.kept == [0, 0]
