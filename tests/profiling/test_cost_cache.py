"""Costs that were measured while other programs ran don't stay."""

import warnings

import pytest
import torch
from torch import nn

import monetlite
from monetlite.core.costs import Cost
from monetlite.profiling import cost_cache, measured
from monetlite.profiling.cost_cache import CostCache


class SlowMeter:
    """Stands in for a device on which each call takes 10 ms, times how busy others keep it."""

    device = "cpu"

    def __init__(self):
        self.measured, self.busy = 0, 1.0

    def latency_ms(self, run, recent=None, room_bytes=0):
        run()
        self.measured += 1
        return 10.0 * self.busy

    def host_ms(self, run):
        return 0.0

    def growth_bytes(self, run):
        return 10**6

    def kept_bytes(self, runs):
        return 0

    def environment(self):
        return {"device": "a slow meter"}


@pytest.fixture
def meter(monkeypatch):
    found = SlowMeter()
    monkeypatch.setattr(measured, "meter_for", lambda device: found)
    monkeypatch.setattr(cost_cache, "_checked", set())
    return found


@pytest.fixture(scope="module")
def graph():
    return monetlite.trace(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid()), torch.randn(2, 8)
    )


def latencies(profile):
    return {cost.latency_ms for costs in profile.costs for cost in costs if cost.latency_ms}


def test_costs_from_a_busy_machine_are_measured_again_and_kept(graph, meter, caplog):
    caplog.set_level("INFO", "monetlite")
    meter.busy = 4.0
    assert latencies(monetlite.profile(graph, "cpu")) == {40.0}
    calls, meter.busy, meter.measured = meter.measured, 1.0, 0
    caplog.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latencies(monetlite.profile(graph, "cpu")) == {10.0}
        (told,) = caplog.messages
        assert told.startswith(f"{calls} costs that were measured earlier are measured again")
        assert meter.measured == calls + cost_cache.MIN_DISTURBED
        assert latencies(monetlite.profile(graph, "cpu")) == {10.0}
    assert caplog.messages == [told]


def test_costs_of_two_processes_are_kept_less_what_one_forgot(monkeypatch, tmp_path):
    monkeypatch.setenv("MONETLITE_CACHE", str(tmp_path))

    def cost(latency_ms):
        return Cost(latency_ms=latency_ms, workspace_bytes=0)

    first = CostCache({})
    first.put("old", cost(1.0))
    first.put("distrusted", cost(1.0))
    first.save()
    second = CostCache({})
    second.forget(["old", "distrusted"])
    second.put("old", cost(2.0))
    second.save()
    first.put("new", cost(3.0))
    first.save()
    kept = CostCache({})
    found = {name: kept.get(name) for name in ("old", "distrusted", "new")}
    assert found == {"old": cost(2.0), "distrusted": None, "new": cost(3.0)}


@pytest.mark.parametrize("busy", [0.7, 1.0, 4.0])
def test_costs_that_hold_or_are_better_than_now_stay(graph, meter, busy, caplog):
    caplog.set_level("INFO", "monetlite")
    monetlite.profile(graph, "cpu")
    meter.busy = busy
    assert latencies(monetlite.profile(graph, "cpu")) == {10.0}
    assert caplog.messages == []


def test_costs_are_checked_once_in_a_process(graph, meter):
    monetlite.profile(graph, "cpu")
    meter.measured = 0
    monetlite.profile(graph, "cpu")
    checked = meter.measured
    assert 0 < checked <= cost_cache.CHECKED
    monetlite.profile(graph, "cpu")
    assert meter.measured == checked


def test_a_call_that_no_longer_fits_beside_the_rest_keeps_its_cost(graph, meter, monkeypatch):
    monetlite.profile(graph, "cpu")

    def full(run, recent=None, room_bytes=0):
        raise MemoryError

    monkeypatch.setattr(meter, "latency_ms", full)
    assert latencies(monetlite.profile(graph, "cpu")) == {10.0}


def test_the_slowest_are_checked_and_quick_ones_never(monkeypatch):
    monkeypatch.setattr(cost_cache, "_checked", set())
    known = {f"call {number}": Cost(latency_ms=0.1 * number, workspace_bytes=0) for number in range(100)}
    asked = []

    def as_before(signature):
        asked.append(signature)
        return known[signature].latency_ms

    assert not cost_cache.measured_while_disturbed(known, as_before)
    assert asked == [f"call {number}" for number in range(99, 99 - cost_cache.CHECKED, -1)]
    asked.clear()
    quick = {signature: Cost(latency_ms=0.9, workspace_bytes=0) for signature in known}
    assert not cost_cache.measured_while_disturbed(quick, lambda _: 0.0)


def test_one_alone_may_be_chance(monkeypatch):
    monkeypatch.setattr(cost_cache, "_checked", set())
    known = {f"call {number}": Cost(latency_ms=30, workspace_bytes=0) for number in range(5)}
    assert not cost_cache.measured_while_disturbed(known, lambda signature: 1.0 if signature == "call 2" else 30.0)
