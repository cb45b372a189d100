"""The process that solves beside training: better schedules in turn, or the reason why there are none."""

import gc
import itertools
import time
import warnings

import pytest
import torch
from torch import nn

import monetlite
from monetlite.core.costs import Profile
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.planning.solving_process import BETTER, SolvingProcess


@pytest.fixture(scope="module")
def profile() -> Profile:
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return monetlite.profile(monetlite.trace(nn.Sequential(*layers), (torch.randn(64, 32),)), "rtx-3090")


def everything(process: SolvingProcess) -> list[Schedule]:
    """All that it hands over, until it ends."""
    found, end = [], time.monotonic() + 120
    while True:
        assert time.monotonic() < end
        ended = not process.running
        better = process.better()
        if better is not None:
            found.append(better)
        elif ended:
            return found
        else:
            time.sleep(0.05)


def test_each_schedule_is_better_than_the_one_before(profile: Profile):
    options = SolvingOptions(time_limit=1.0)
    start = monetlite.solve(profile, "70%", time_limit=0.2)
    process = SolvingProcess([profile], "70%", options, None, start)
    found = everything(process)
    assert process.failure is None
    assert found
    for item in found:
        timeline = simulate(profile, item.choices.steps(profile.graph), item.budget_bytes)
        assert timeline.latency_ms == pytest.approx(item.latency_ms)
    latencies = [start.latency_ms / (1 - BETTER), *(item.latency_ms for item in found)]
    assert all(later <= (1 - BETTER) * before * (1 + 1e-9) for before, later in itertools.pairwise(latencies))
    assert process.better() is None


@pytest.mark.thorough
def test_it_begins_from_the_schedule_that_there_is(profile: Profile):
    """With hardly any time, what it hands over is no worse than that."""
    start = monetlite.solve(profile, "70%", time_limit=2.0)
    found = everything(SolvingProcess([profile], "70%", SolvingOptions(time_limit=0.05), None, start))
    assert found[-1].latency_ms <= start.latency_ms


def test_it_leaves_nothing_behind(profile: Profile):
    start = monetlite.solve(profile, "70%", time_limit=0.2)
    process = SolvingProcess([profile], "70%", SolvingOptions(time_limit=60.0), None, start)
    folder = process._path
    assert folder.exists()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del process
        gc.collect()
    assert not told
    assert not folder.exists()


@pytest.mark.thorough
def test_it_says_why_there_is_none(profile: Profile):
    start = monetlite.solve(profile, "100%", time_limit=0.2)
    process = SolvingProcess([profile], "1%", SolvingOptions(time_limit=0.2), None, start)
    assert everything(process) == []
    assert process.failure is not None
    assert process.failure.startswith("budget ")
