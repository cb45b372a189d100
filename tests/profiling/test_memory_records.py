"""Memory that torch allocates while a function runs, and records of a step's memory that are left open."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch

from monetlite.profiling import memory_records
from monetlite.profiling.memory_records import (
    MemoryRecord,
    is_profiling,
    may_profile,
    peak_growth_bytes,
    running_totals,
)
from monetlite.profiling.memory_use import high_water_growth_bytes

MIB = 2**20

EXITS = """
from monetlite.profiling.memory_records import MemoryRecord
record = MemoryRecord("cpu")
record.mark("step")
"""


def test_the_process_exits_as_ever():
    """While its profiler is on, torch crashes."""
    subprocess.run([sys.executable, "-c", EXITS], check=True)


def test_one_that_is_left_ends_when_it_is_asked_for_twice():
    record = MemoryRecord("cpu")
    record.mark("step")
    with pytest.raises(RuntimeError, match="profiler is on"):
        MemoryRecord("cpu")
    assert record.is_open
    other = MemoryRecord("cpu")
    assert not record.is_open
    assert not record.end()
    other.mark("step")
    kept = torch.empty(1000)
    other.mark("end")
    first, last = other.end()
    assert last.live_bytes - first.live_bytes == kept.nbytes
    assert may_profile()


def test_one_that_nobody_has_any_more_ends():
    record = MemoryRecord("cpu")
    assert is_profiling()
    del record
    assert not is_profiling()


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_threads_take_turns(thread, monkeypatch):
    """Two profilers at once crash the process."""
    monkeypatch.setattr(memory_records, "_WAIT_SECONDS", 0.1)
    record = thread.submit(MemoryRecord, "cpu").result()
    assert not may_profile()
    with pytest.raises(RuntimeError, match="another thread of this process measures a step"):
        running_totals(lambda: torch.empty(1000))
    monkeypatch.setattr(memory_records, "_WAIT_SECONDS", 60.0)
    ending = threading.Timer(0.2, lambda: thread.submit(record.end))
    ending.start()
    assert running_totals(lambda: torch.empty(1000)) == [4000, 0]
    assert not record.is_open
    ending.join()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_thread_that_ends_leaves_no_profiler_on(elsewhere, thread):
    """Even if another thread has ended its record, which can't stop the profiler."""
    record = thread.submit(MemoryRecord, "cpu").result()
    if elsewhere:
        record.end()
    assert not may_profile()
    thread.shutdown()
    assert may_profile()
    assert not record.is_open


def test_a_thread_profiles_again_where_another_one_ended_its_record(thread):
    record = thread.submit(MemoryRecord, "cpu").result()
    record.end()
    assert thread.submit(may_profile).result()
    assert may_profile()


def test_measuring_ends_it():
    record = MemoryRecord("cpu")
    record.mark("step")
    assert running_totals(lambda: torch.empty(1000)) == [4000, 0]
    assert not record.end()


def test_another_s_profiler_is_left_on():
    with torch.autograd.profiler.profile(use_cpu=True):
        assert not may_profile()
        assert not may_profile()
        assert is_profiling()
    assert may_profile()


def test_another_s_profiler_that_measuring_ends_is_told_of():
    with torch.autograd.profiler.profile(use_cpu=True):
        with pytest.warns(UserWarning, match="begin to profile after the first training step"):
            assert running_totals(lambda: torch.empty(1000)) == [4000, 0]
        assert not is_profiling()
    assert may_profile()


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_a_profiler_that_fails_is_in_nobodys_way(name, monkeypatch):
    profiler = MagicMock()
    getattr(profiler, name).side_effect = RuntimeError("no profiler")
    monkeypatch.setattr(memory_records, "memory_profiler", lambda: profiler)
    with pytest.raises(RuntimeError, match="no profiler"):
        running_totals(lambda: torch.empty(1000))
    assert may_profile()


def test_peak_growth_of_known_allocations():
    def function():
        first = torch.empty(3 * MIB, dtype=torch.uint8)
        second = torch.empty(5 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(2 * MIB, dtype=torch.uint8)
        del second, third
        return torch.empty(1 * MIB, dtype=torch.uint8)

    assert peak_growth_bytes(function) == 8 * MIB
    totals = [total // MIB for total in running_totals(function)]
    assert totals[:4] == [3, 8, 5, 7]
    assert totals[-2:] == [1, 0], "the result is let go of too"
    assert peak_growth_bytes(lambda: None) == 0


def test_a_block_from_before_is_not_taken_for_an_earlier_one_at_its_address():
    """Torch reports its free with the size of what was measured there before."""
    size, measured = 1 << 16, []
    running_totals(lambda: measured.extend(torch.empty(size, dtype=torch.uint8) for _ in range(20)))
    addresses = {item.data_ptr() for item in measured}
    measured.clear()
    others = [torch.empty(size, dtype=torch.uint8) for _ in range(20)]
    assert addresses & {item.data_ptr() for item in others}, "no address is used twice: this can't fail"
    assert not any(running_totals(others.clear))


def test_growth_is_measured_in_a_backward_pass_too():
    """Autograd runs backward on the calling thread or its own: allocations count either way."""
    x = torch.randn(MIB, requires_grad=True)
    growth = peak_growth_bytes(lambda: torch.tanh(x).sum().backward())
    assert 8 * MIB <= growth <= 13 * MIB


def test_the_high_water_mark_sees_memory_that_torch_does_not_report():
    growth = high_water_growth_bytes(lambda: bytearray(64 * MIB))
    if growth is None:
        pytest.skip("this system does not report a resettable high-water mark")
    assert 56 * MIB <= growth <= 80 * MIB
    assert peak_growth_bytes(lambda: bytearray(64 * MIB)) < MIB
