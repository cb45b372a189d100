"""Numbers that a model is called with, or has as attributes, and that change at every step."""

import itertools
import math
import os

import pytest
import torch
from small_models import assert_same, step, twin
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.runtime import scheduled_training
from monetlite.runtime.step_plans import StepPlans

PLANNING = {"budget": "200%", "device": "rtx-4090", "time_limit": 1}
THOROUGH = "MONETLITE_THOROUGH" in os.environ
VALUES = (0.1, 0.2314, 0.37, 0.4421, 0.58, 0.9)

BY_TENSORS = {
    "times": lambda h, number: h * number,
    "divided by": lambda h, number: (h / (number + 0.3)).softmax(-1),
    "divides": lambda h, number: number / (h * h + 1),
    "noise": lambda h, number: h + torch.randn_like(h) * number,
    "threshold": lambda h, number: torch.where(h > number, h, h * 0.1),
    "drawn": lambda h, number: h * (torch.rand_like(h) < number),
    "cosine": lambda h, number: h * (0.5 * (1 + math.cos(math.pi * number))),
    "root": lambda h, number: h * math.sqrt(number),
    "least": lambda h, number: h * min(number, 0.25),
    "temperature": lambda h, number: F.gumbel_softmax(h, tau=number),
    "in place": lambda h, number: h.clone().mul_(number),
}
"""Uses of a number for which one program serves all its values."""
BY_THEMSELVES = {
    "dropout": lambda h, number: F.dropout(h, number),
    "power": lambda h, number: (h * h + 1) ** number,
    "base": lambda h, number: (number + 1) ** h,
    "clamp": lambda h, number: h.clamp(-number, number),
    "slope": lambda h, number: F.leaky_relu(h, number),
    "size": lambda h, number: h + h[:, : int(number * 20) + 2].sum(-1, keepdim=True),
    "rounded down": lambda h, number: h * (1 + number // 0.1),
    "remainder": lambda h, number: h * (1 + number % 0.15),
    "side of a remainder": lambda h, number: h * (2 if number % 1.0 > 0.4 else 3),
    "text": lambda h, number: h * float(f"{number:.1f}"),
    "both": lambda h, number: F.dropout(h * number, number),
}
"""Uses for which each value is captured."""


class Scheduled(nn.Module):
    """Layers around a use of a number: that it is called with, or an attribute."""

    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use, self.number = nn.Linear(8, 8), nn.Linear(8, 8), use, 1.0

    def forward(self, x, number=None):
        return self.last(torch.tanh(self.use(self.first(x), self.number if number is None else number)))


@pytest.fixture
def captures(monkeypatch):
    """Notes each capture that ended in programs."""
    found, keep = [], StepPlans.keep

    def noted(self, captured):
        found.append(captured)
        return keep(self, captured)

    monkeypatch.setattr(StepPlans, "keep", noted)
    return found


def trained(model, dtype, attribute, values=VALUES, **options):
    """Steps at all values; gives each after its step."""
    planned = monetlite.within(twin(model), **PLANNING, **options)
    for number in values:
        for item in (planned, model):
            item.number = number if attribute else 1.0
        inputs = (torch.randn(4, 8, dtype=dtype), *(() if attribute else (number,)))
        assert_same(step(planned, inputs), step(model, inputs))
        yield number


DTYPES = torch.float32, torch.float64, torch.bfloat16
OFTEN = [("times", torch.float32, False), ("divided by", torch.float32, True), ("noise", torch.float32, False)]


@pytest.mark.parametrize(
    ("use", "dtype", "attribute"), often(itertools.product(BY_TENSORS, DTYPES, [False, True]), *OFTEN)
)
def test_one_program_serves_all_values(captures, use, dtype, attribute):
    counts = [len(captures) for _ in trained(Scheduled(BY_TENSORS[use]).to(dtype), dtype, attribute)]
    assert counts[1] > counts[0]
    assert counts[1:] == [counts[1]] * (len(VALUES) - 1)


def test_one_program_serves_all_values_where_the_best_plan_is_waited_for(captures):
    counts = [len(captures) for _ in trained(Scheduled(BY_TENSORS["times"]), torch.float32, False, wait=True)]
    assert counts == [1, *[2] * (len(VALUES) - 1)]


@pytest.mark.parametrize(
    ("use", "attribute"),
    often(
        itertools.product(BY_THEMSELVES, [False, True]),
        *[("dropout", False), ("side of a remainder", False)],
    ),
)
def test_values_that_an_operator_has_to_know_are_captured_each(use, attribute):
    for _ in trained(Scheduled(BY_THEMSELVES[use]), torch.float32, attribute, VALUES if THOROUGH else VALUES[:4]):
        pass


PARTS = {
    "of a size": lambda x: len(x) / 2 % 1 > 0.3,
    "whole, of a size": lambda x: len(x) / 10 // 0.1 > 9.5,
    "of data": lambda x: x.sum().item() % 1.0 > 0.5,
    "whole, of data": lambda x: 1.0 // (x.mean().item() * 2) > 0,
}
"""Sides of a branch, by parts of fractions."""


class OnParts(nn.Module):
    """Branches on a part of a fraction."""

    def __init__(self, part):
        super().__init__()
        self.first, self.last, self.part = nn.Linear(8, 8), nn.Linear(8, 8), part

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * (2 if self.part(x) else 3))


@pytest.mark.parametrize("part", PARTS)
def test_a_branch_on_a_part_of_a_fraction_is_plain_training_s(part):
    model = OnParts(PARTS[part])
    planned = monetlite.within(twin(model), **PLANNING)
    sides = set()
    for number in (8, 6, 7, 10, 5, 9):
        x = torch.rand(number, 8, generator=torch.Generator().manual_seed(number))
        sides.add(model.part(x))
        assert_same(step(planned, (x,)), step(model, (x,)))
    assert len(sides) == 2 or part == "whole, of a size", "which torch takes for 10 with ten rows, and Python for 9"


def test_a_branch_on_a_number_is_captured_for_each_side(captures):
    model = Scheduled(lambda h, number: h * 2 if number > 0.4 else h * number)
    counts = [len(captures) for _ in trained(model, torch.float32, False)]
    assert counts[1] == counts[2] < counts[3] == counts[-1]


def test_numbers_vary_under_autocast(captures):
    model = Scheduled(BY_TENSORS["times"])
    with torch.autocast("cpu", torch.bfloat16):
        counts = [len(captures) for _ in trained(model, torch.float32, False)]
    assert counts[1:] == [counts[1]] * (len(VALUES) - 1)


def test_a_schedule_that_was_solved_for_one_number_serves_others():
    model = Scheduled(BY_TENSORS["times"])
    x = torch.randn(4, 8)
    schedule = monetlite.optimize(twin(model), (x, 1.0), **PLANNING)
    planned = monetlite.MONeTWrapper(twin(model), schedule)
    for number in VALUES[:3]:
        assert_same(step(planned, (x, number)), step(model, (x, number)))


def test_numbers_that_a_graph_computes_may_be_printed():
    class Prints(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            x = self.layer(x)
            print(f"mean {float(x.mean()):.3f}")  # noqa: T201  # as a model may
            return x

    model = Prints()
    planned = monetlite.within(twin(model), whole=True, **PLANNING)  # refuses what can't be captured whole
    for _ in range(3):
        inputs = (torch.randn(4, 8),)
        assert_same(step(planned, inputs), step(model, inputs))


@pytest.mark.parametrize(
    ("number", "warned"), often(itertools.product([int, float], [False, True]), (int, False), (float, True))
)
def test_a_number_that_is_captured_at_each_step_is_warned_of(monkeypatch, recwarn, number, warned):
    monkeypatch.setattr(scheduled_training, "MANY_CAPTURING", 3)
    model = Scheduled(BY_THEMSELVES["power"] if warned else lambda h, number: h * (number / 7))
    planned = monetlite.MONeTWrapper(twin(model), **PLANNING)
    for count in range(1, 6):
        inputs = (torch.randn(4, 8), number(count))
        assert_same(step(planned, inputs), step(model, inputs))
    told = [str(item.message) for item in recwarn if "for 3 different steps of this model" in str(item.message)]
    assert len(told) == warned
    assert all("without compile=True, a number" in text for text in told)


def test_a_number_that_is_whole_at_times_is_captured_for_each_kind(captures):
    """As `bn.momentum = 0`, by which code for SAM leaves running statistics as they are."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    planned = monetlite.within(twin(model), whole=True, **PLANNING)
    for number in (0.1, 0, 0.1, 0, 0.1):
        planned[1].momentum = model[1].momentum = number
        inputs = (torch.randn(4, 8),)
        assert_same(step(planned, inputs), step(model, inputs))
    assert len(captures) == 2
