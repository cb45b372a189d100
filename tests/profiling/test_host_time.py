"""A GPU waits for the host where operators are small: a step takes what the slower of the two takes."""

import json
from dataclasses import replace

import pytest
import torch
from step_lists import free_profile, recompute_everything
from torch import nn

import monetlite
from monetlite.core.costs import Cost, Profile, ProfileKind, load_profile
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind
from monetlite.core.options import SolvingOptions
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.profiling.cost_cache import CostCache
from monetlite.profiling.meters import CudaMeter
from monetlite.solving import solve_profile


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    return monetlite.trace(model, torch.randn(3, 6))


def profile_of(graph, forward_ms, backward_ms, again_ms=None):
    """Every operator takes the device a millisecond, and the host these."""
    profile = free_profile(graph)
    costs = tuple(
        tuple(
            replace(
                cost,
                host_ms=forward_ms if operator.phase == "forward" else backward_ms,
                recompute_host_ms=again_ms if operator.phase == "forward" else None,
            )
            for cost in each
        )
        for operator, each in zip(graph.operators, profile.costs, strict=True)
    )
    return replace(profile, costs=costs)


def test_each_part_of_a_step_takes_the_longer_of_device_and_host(graph):
    steps = plain_steps(graph)
    forward = sum(graph.operators[index].phase == "forward" for index, _ in steps)
    backward = len(steps) - forward
    assert simulate(profile_of(graph, 0.0, 0.0), steps).latency_ms == len(steps)
    assert simulate(profile_of(graph, 0.5, 3.0), steps).latency_ms == forward + 3 * backward
    assert simulate(profile_of(graph, 2.0, 0.1), steps).latency_ms == 2 * forward + backward


def test_re_runs_are_of_the_part_that_they_run_in(graph):
    steps = recompute_everything(graph)
    timeline = simulate(profile_of(graph, 0.0, 2.0, again_ms=5.0), steps)
    forward = sum(graph.operators[index].phase == "forward" for index, _ in plain_steps(graph))
    again = len(steps) - len(plain_steps(graph))
    assert again > 0
    backward = len(steps) - forward - again
    assert timeline.latency_ms == forward + 2 * backward + 5 * again


def test_a_schedule_predicts_the_host_and_is_bounded_by_the_device(graph):
    device, host = (
        monetlite.solve(item, "100%", time_limit=1) for item in (free_profile(graph), profile_of(graph, 3.0, 3.0))
    )
    assert device.status == "optimal"
    assert host.latency_ms == 3 * device.latency_ms
    assert host.plain_latency_ms == 3 * device.plain_latency_ms
    assert host.lower_bound_ms <= device.latency_ms
    assert host.status == "feasible"


def one_operator(*costs):
    """A step of one operator, which has an implementation for each of the costs."""
    ways = tuple(Implementation(name=f"way{at}", reads=(), writes=(0,)) for at in range(len(costs)))
    operator = Operator(name="op", family="op", phase=Phase.FORWARD, implementations=ways)
    output = Value(name="v", kind=ValueKind.OUTPUT, size_bytes=1)
    graph = OperatorGraph(name="one", operators=(operator,), values=(output,), resident=Resident())
    return Profile(graph=graph, device="a GPU", kind=ProfileKind.MEASURED, costs=(costs,))


def test_no_schedule_is_slower_than_one_that_is_known():
    """The device's least time may be the host's most."""
    plain, fast, hosted = (
        Cost(latency_ms=device_ms, workspace_bytes=0, host_ms=host_ms)
        for device_ms, host_ms in ((10, 0), (9, 30), (12, 11))
    )
    assert monetlite.solve(one_operator(plain, fast), "200%", time_limit=1).latency_ms == 10
    profile = one_operator(replace(plain, host_ms=20), fast, hosted)
    assert monetlite.solve(profile, "200%", time_limit=1).latency_ms == 20
    options = SolvingOptions(time_limit=1)
    assert solve_profile(profile, 100, options, starts=[((0, 2),)]).latency_ms == 12


def test_files_say_it_and_may_lack_it(graph, tmp_path):
    profile = profile_of(graph, 0.25, 0.5, again_ms=0.75)
    profile.save(tmp_path / "with.json")
    assert load_profile(tmp_path / "with.json").costs == profile.costs
    free_profile(graph).save(tmp_path / "without.json")
    assert "host_ms" not in (tmp_path / "without.json").read_text()
    assert load_profile(tmp_path / "without.json").costs[0][0].host_ms == 0.0


def test_costs_in_the_cache_from_before_have_none(cache_folder):
    cache = CostCache({"device": "a GPU"})
    cost = Cost(latency_ms=1.0, workspace_bytes=2, host_ms=0.5)
    cache.put("new", cost)
    cache.put("cpu", replace(cost, host_ms=0.0))
    cache.save()
    assert json.loads(cache.path.read_text())["costs"] == {"new": [1.0, 2, 0.5], "cpu": [1.0, 2]}
    again = CostCache({"device": "a GPU"})
    assert again.get("new") == cost
    assert again.get("cpu").host_ms == 0.0


def test_the_host_is_timed_without_the_gpu(monkeypatch):
    """The GPU is idle when the call is handed to it, and nothing waits for the result."""
    did = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: did.append("wait"))
    assert object.__new__(CudaMeter).host_ms(lambda: did.append("call")) < 1.0
    assert did[:4] == ["wait", "call", "wait", "call"]
    assert did[-1] == "wait"
