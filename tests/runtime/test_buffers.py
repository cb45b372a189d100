"""Buffers that a step changes: where they are if nothing else reads them, always with plain training's contents."""

from typing import Any

import pytest
import torch
from small_models import SmallCNN, assert_same, step, twin
from step_lists import free_profile, recompute, schedule_of
from thoroughness import often
from torch import nn

import monetlite
from monetlite.runtime import buffers


class Buffers(nn.Module):
    """Buffers that are changed in several ways, each beside what the name says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        for name in ("alone", "read_before", "read_after", "returned", "twice", "doubled", "averaged", "smoothed"):
            self.register_buffer(name, torch.full((6,), 2.0))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))
        self.register_buffer("promoted", torch.tensor(1))
        self.register_buffer("turned", torch.ones(6, 2).t()[:, :3])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps += 1
        self.alone.mul_(1.5)
        x = self.layer(x) + self.read_before
        self.read_before.add_(1.0)
        self.read_after.sub_(0.25)
        x = torch.tanh(x * self.read_after)
        self.returned.add_(1.0)
        self.twice.add_(1.0)
        self.twice.mul_(2.0)
        self.doubled.add_(self.doubled)
        mean = x.detach().mean(0)
        self.averaged.mul_(0.9).add_(mean, alpha=0.1)
        self.smoothed.lerp_(mean, 0.1)
        self.seen.logical_or_(mean > 0)
        self.promoted.copy_(self.promoted + 0.75)
        self.turned.add_(1.0)
        return x, self.returned + 0.0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what the programs call that are compiled from here on."""
    names: list[str] = []

    def boxed(program: Any, *others: Any) -> Any:
        names.extend(str(node.target) for node in program.graph.nodes if node.op == "call_function")
        return original(program, *others)

    original = buffers.boxed
    monkeypatch.setattr(buffers, "boxed", boxed)
    return names


def scheduled(model: nn.Module, *inputs: torch.Tensor, dropping: bool = False, choose: Any = lambda _: 0) -> Any:
    graph = monetlite.trace(model, inputs)
    steps = recompute(graph, lambda _: dropping, lambda index: choose(graph.operators[index]))
    return monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))


@pytest.mark.parametrize("dropping", [False, True])
def test_buffers_are_those_of_plain_training(dropping: bool) -> None:
    model, inputs = Buffers(), (torch.randn(5, 6),)
    wrapper = scheduled(model, *inputs, dropping=dropping)
    for _ in range(3):
        assert_same(step(wrapper, inputs), step(model, inputs))


def test_what_nothing_else_reads_is_changed_where_it_is(ran: list[str]) -> None:
    model, inputs = Buffers(), (torch.randn(5, 6),)
    step(scheduled(model, *inputs), inputs)
    in_place = sorted(name for name in ran if name.partition(".")[2].endswith("_.Tensor") or "_." in name)
    assert in_place == ["aten.add_.Tensor", "aten.lerp_.Scalar", "aten.logical_or_.default", "aten.mul_.Tensor"]
    assert ran.count("aten.add.Tensor") >= 6, "what is read otherwise is computed anew"


@pytest.mark.parametrize(
    ("dropping", "in_place"), often([(False, False), (True, False), (True, True)], (True, True))
)
def test_running_statistics_are_those_of_plain_training(dropping: bool, in_place: bool, ran: list[str]) -> None:
    model, inputs = SmallCNN(), (torch.randn(4, 3, 12, 12),)

    def choose(operator: Any) -> int:
        names = [item.name for item in operator.implementations]
        return names.index("inplace") if in_place and operator.name == "bn2" and "inplace" in names else 0

    wrapper = scheduled(model, *inputs, dropping=dropping, choose=choose)
    for _ in range(3):
        assert_same(step(wrapper, inputs), step(model, inputs))
    assert not [name for name in ran if "functional" in name]
    assert ran.count("aten.add_.Tensor") == 2, "the batches that have been counted"
    assert ("batch_norm_in_buffers_" in " ".join(ran)) is in_place


def test_steps_may_overlap() -> None:
    """The first step's gradient reads nothing that the second step has changed."""
    model, inputs = SmallCNN(), torch.randn(4, 3, 12, 12)
    wrapper = scheduled(model, inputs)
    found, expected = [], []
    for module, results in ((wrapper, found), (model, expected)):
        torch.manual_seed(1)
        first, second = module(inputs).sum(), module(inputs * 2).square().sum()
        second.backward()
        first.backward()
        results += [*(item.grad for item in module.parameters()), *module.buffers()]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_one_normalisation_twice_in_a_step() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(torch.relu(self.norm(self.conv(x)))))

    model, inputs = Twice(), (torch.randn(4, 3, 6, 6),)
    wrapper = scheduled(model, *inputs)
    for _ in range(2):
        assert_same(step(wrapper, inputs), step(model, inputs))


def test_arguments_in_one_storage() -> None:
    """AOTAutograd hands the program what they share, and not the arguments."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            whole.add_(1.0)
            part.mul_(2.0)
            return self.layer(x)

    def counts() -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(6)
        return whole, whole[2:]

    model, x = Counting(), torch.randn(2, 4)
    wrapper = scheduled(model, x, *counts())
    found, expected = counts(), counts()
    for _ in range(2):
        wrapper(x, *found).sum().backward()
        model(x, *expected).sum().backward()
    assert torch.equal(found[0], expected[0])
