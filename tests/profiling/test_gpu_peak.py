"""Memory of a GPU that several measure at a time, by an allocator that stands in for torch's."""

import pytest
import torch

from monetlite.profiling.allocated import AllocatedGrowth
from monetlite.profiling.memory_records import MemoryRecord, peak_growth_bytes


class Allocator:
    def __init__(self):
        self.now = self.most = 1000

    def take(self, size):
        self.now += size
        self.most = max(self.most, self.now)

    def pass_by(self, size):
        self.take(size)
        self.take(-size)


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    answers = {
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "memory_stats": lambda _: {"requested_bytes.all.current": made.now, "requested_bytes.all.peak": made.most},
        "reset_peak_memory_stats": lambda _: vars(made).update(most=made.now),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return made


def test_what_began_earlier_knows_the_peak_before_another_began(allocator):
    first = AllocatedGrowth("cuda")
    allocator.pass_by(500)
    second = AllocatedGrowth("cuda")
    allocator.pass_by(200)
    assert peak_growth_bytes(lambda: allocator.pass_by(100), "cuda") == 100
    allocator.take(50)
    assert second.end() == (50, 200)
    assert first.end() == (50, 500)


def test_a_recorded_step_knows_the_peak_before_another_model_s_step_began(allocator):
    record = MemoryRecord("cuda")
    record.mark("step")
    allocator.pass_by(500)
    AllocatedGrowth("cuda")
    record.mark("forward 0")
    allocator.pass_by(30)
    record.mark("end", last=True)
    assert [mark.peak_bytes for mark in record.end()] == [1000, 1500, 1030]


def test_operators_that_are_measured_are_no_part_of_a_recorded_step(allocator):
    record = MemoryRecord("cuda")
    record.mark("step")
    peak_growth_bytes(lambda: allocator.pass_by(500), "cuda")
    record.mark("end", last=True)
    assert not record.end()
