"""Growth of allocated memory between two moments."""

import threading
import time

import pytest
import torch

import monetlite
from monetlite.profiling import allocated
from monetlite.profiling.allocated import AllocatedGrowth, allocated_bytes, measuring_nothing
from monetlite.profiling.measured import Measurement

needs_glibc = pytest.mark.skipif(allocated_bytes() is None, reason="glibc says what is allocated")
SIZE = 2**25


@needs_glibc
def test_what_is_allocated_and_freed_meanwhile_counts():
    growth = AllocatedGrowth("cpu")
    kept = torch.zeros(SIZE, dtype=torch.uint8)
    freed = torch.zeros(SIZE, dtype=torch.uint8)
    threading.Event().wait(0.05)
    del freed
    now, most = growth.end()
    assert now == pytest.approx(SIZE, rel=0.05)
    assert most == pytest.approx(2 * SIZE, rel=0.05)
    assert growth.end() is None
    del kept


@needs_glibc
def test_nothing_is_measured_where_that_is_asked_for():
    with measuring_nothing():
        growth = AllocatedGrowth("cpu")
    assert growth.end() is None
    assert AllocatedGrowth("cpu").end() is not None


@needs_glibc
def test_looks_that_take_long_are_late(monkeypatch):
    def slow():
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return allocated_bytes()

    for look, late in ((lambda: 1, False), (slow, True)):
        monkeypatch.setattr(allocated, "MAX_GAP_SECONDS", 10.0)
        monkeypatch.setattr(allocated, "allocated_bytes", look)
        growth = AllocatedGrowth("cpu")
        threading.Event().wait(0.02)
        growth.end()
        assert growth.was_late == late


@needs_glibc
def test_what_another_model_s_operators_take_while_they_are_measured_is_told_of_no_step():
    graph = monetlite.trace(torch.nn.Linear(8, 4), torch.randn(2, 8))
    for measure in (Measurement.run, lambda measurement: measurement.rough_profile(0.0)):
        growth = AllocatedGrowth("cpu")
        measure(Measurement(graph, "cpu"))
        assert growth.end() is None
