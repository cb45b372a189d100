"""Records of a step's memory that are left open."""

import subprocess
import sys

import pytest
import torch

from monetlite.profiling.memory_records import MemoryRecord, is_profiling, may_profile, running_totals

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
