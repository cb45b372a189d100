"""Growth of allocated memory between two moments."""

import time

import pytest
import torch

import monetlite
from monetlite.profiling import allocated
from monetlite.profiling.allocated import AllocatedGrowth, allocated_bytes, measuring_nothing
from monetlite.profiling.measured import Measurement

needs_glibc = pytest.mark.skipif(allocated_bytes() is None, reason="glibc says what is allocated")
SIZE = 2**25


@pytest.fixture
def looked(monkeypatch):
    """Waits until the memory was looked at, however busy the machine is; `looked.by` is how."""

    def look():
        begun.append(None)
        return looked.by()

    def looked():
        """Wait for a look that begins from here on: the second one, which has ended when the third begins."""
        wanted, end = len(begun) + 3, time.monotonic() + 60
        while len(begun) < wanted:
            assert time.monotonic() < end
            time.sleep(0.001)

    begun, looked.by = [], allocated_bytes
    monkeypatch.setattr(allocated, "allocated_bytes", look)
    return looked


@needs_glibc
def test_what_is_allocated_and_freed_meanwhile_counts(looked):
    growth = AllocatedGrowth("cpu")
    kept = torch.zeros(SIZE, dtype=torch.uint8)
    freed = torch.zeros(SIZE, dtype=torch.uint8)
    looked()
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
def test_looks_that_take_long_are_late(looked, monkeypatch):
    def slow():
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return allocated_bytes()

    for look, late in ((lambda: 1, False), (slow, True)):
        monkeypatch.setattr(allocated, "MAX_GAP_SECONDS", 60.0)
        looked.by = look
        growth = AllocatedGrowth("cpu")
        looked()
        growth.end()
        assert growth.was_late == late


@needs_glibc
def test_what_another_model_s_operators_take_while_they_are_measured_is_told_of_no_step():
    graph = monetlite.trace(torch.nn.Linear(8, 4), torch.randn(2, 8))
    for measure in (Measurement.run, lambda measurement: measurement.rough_profile(0.0)):
        growth = AllocatedGrowth("cpu")
        measure(Measurement(graph, "cpu"))
        assert growth.end() is None
