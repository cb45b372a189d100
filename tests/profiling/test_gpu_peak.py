"""Memory of a GPU that several measure at a time, by an allocator that stands in for torch's."""

import pytest
import torch

from monetlite.profiling.allocated import AllocatedGrowth
from monetlite.profiling.memory_records import MemoryRecord, peak_growth_bytes


class Allocator:
    kind, other = "requested_bytes", "allocated_bytes"

    def __init__(self):
        self.now = self.most = 1000

    def stats(self, _):
        counted = {f"{self.kind}.all.current": self.now, f"{self.kind}.all.peak": self.most}
        return counted | {f"{self.other}.all.current": 0, f"{self.other}.all.peak": 0}

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
        "get_allocator_backend": lambda: "native",
        "memory_stats": made.stats,
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


def test_an_allocator_that_does_not_count_requests(allocator, monkeypatch):
    allocator.kind, allocator.other = allocator.other, allocator.kind
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert peak_growth_bytes(lambda: allocator.pass_by(100), "cuda") == 100


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
