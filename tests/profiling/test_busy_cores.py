"""Costs that are measured while other programs hold the cores come with a warning."""

import warnings

import torch
from torch import nn

import monetlite
from monetlite.profiling import busy_cores


def told(graph):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        monetlite.profile(graph, "cpu")
    return [str(item.message) for item in warned if "hold the cores" in str(item.message)]


def test_a_busy_machine_is_told_of_where_something_is_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("MONETLITE_CACHE", str(tmp_path))
    graph = monetlite.trace(nn.Sequential(nn.Linear(7, 9), nn.ReLU()), torch.randn(5, 7))
    slowdowns = iter([1.0, 7.0])
    monkeypatch.setattr(busy_cores, "slowdown", lambda: next(slowdowns))
    (said,) = told(graph)
    assert "takes more than 3 times as long as on one" in said
    assert not told(graph), "all costs are known"
    assert next(slowdowns, None) is None


def test_the_slowdown_leaves_the_threads_as_they_were():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert busy_cores.slowdown() == 1.0
        torch.set_num_threads(2)
        assert busy_cores.slowdown() > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
