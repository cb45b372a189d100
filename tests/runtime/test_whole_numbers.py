"""Whole numbers that a model counts with in its forward pass, or is called with."""

import itertools
import math

import pytest
import torch
from small_models import assert_same, step, twin
from thoroughness import often
from torch import nn

import monetlite
from monetlite.fx.torch_internals.torch_dynamo import seconds_captured

PLANNING = {"budget": "200%", "device": "rtx-4090", "time_limit": 1}
STEPS = 9


def alone(model, _x, _number):
    model.steps += 1


def two_of_each_other(model, _x, _number):
    model.steps += 1
    model.seen = model.seen + 2 * model.steps


def with_sizes(model, x, _number):
    model.seen += x.shape[0]


def in_a_dict(model, _x, _number):
    model.calls["forward"] += 1


def an_argument(model, _x, number):
    model.seen = number * 3


def a_layer_of_it(model, _x, _number):
    model.layer[1].steps += 1


COUNTING = {
    use.__name__: use for use in (alone, two_of_each_other, with_sizes, in_a_dict, an_argument, a_layer_of_it)
}


class Counts(nn.Module):
    def __init__(self, count, use=lambda h, _: h):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8))
        self.count, self.use = count, use
        self.steps = self.seen = self.layer[1].steps = 0
        self.calls = {"forward": 0}

    def forward(self, x, number):
        self.count(self, x, number)
        return {"loss": self.use(self.layer(x), self.steps).square().mean(), "steps": self.steps}


@pytest.fixture
def captures(monkeypatch):
    """What is handed to the compiler of programs: a list that grows with each capture."""
    found, build = [], monetlite.runtime.step_plans.build_graph
    monkeypatch.setattr(
        "monetlite.runtime.step_plans.build_graph",
        lambda *args, **options: found.append(1) or build(*args, **options),
    )
    return found


def trained(model, **options):
    """A model with a plan beside a plain one, step by step; gives the number of the step."""
    planned = monetlite.MONeTWrapper(twin(model), **options)
    for number in range(STEPS):
        inputs = (torch.randn(4 + number % 2, 8), number + 5)
        assert_same(step(planned, inputs), step(model, inputs))
        ours, theirs = planned.model, model
        assert (ours.steps, ours.seen, ours.calls) == (theirs.steps, theirs.seen, theirs.calls)
        assert ours.layer[1].steps == theirs.layer[1].steps
        yield number


@pytest.mark.parametrize("count", often(COUNTING, "alone"))
def test_counting_has_nothing_captured_again(captures, count):
    counts = [len(captures) for _ in trained(Counts(COUNTING[count]), **PLANNING)]
    assert counts[4:] == [counts[4]] * (STEPS - 4)


def test_a_schedule_that_was_solved_beforehand_serves_each_count(captures):
    model = Counts(alone)
    schedule = monetlite.optimize(twin(model), (torch.randn(5, 8), 1), **PLANNING)
    counts = [len(captures) for _ in trained(model, schedule=schedule)]
    assert counts[5:] == [counts[5]] * (STEPS - 5)


ON_COUNTS = {
    "times": lambda h, steps: h * steps,
    "on one side": lambda h, steps: h * 2 if steps > 4 else h,
    "in turn": lambda h, steps: h if steps % 3 else h.flip(0),
    "full like": lambda h, steps: h + torch.full_like(h, steps),
    "rows": lambda h, steps: h[: 1 + steps % 2],
}


@pytest.mark.parametrize("use", often(ON_COUNTS, "on one side"))
def test_a_count_that_tensors_depend_on_is_captured_as_often_as_needed(use):
    for _ in trained(Counts(alone, ON_COUNTS[use]), **PLANNING):
        pass


class InPieces(Counts):
    def forward(self, x, number):
        found = super().forward(x, number)
        return found if found["loss"].isfinite() else {"loss": found["loss"] * 0, "steps": 0}


@pytest.mark.thorough
@pytest.mark.parametrize("counted", [False, True])
def test_counting_has_no_piece_captured_again(counted):
    use = (lambda h, steps: h + h.mean() * min(1.0, steps / 7)) if counted else lambda h, _: h
    model, captured = InPieces(alone, use), []
    planned = monetlite.MONeTWrapper(twin(model), **PLANNING | {"budget": "300%"})
    for number in range(STEPS):
        inputs = torch.randn(4, 8), number + 5
        assert_same(step(planned, inputs), step(model, inputs))
        assert planned.model.steps == model.steps
        captured.append(seconds_captured())
    assert captured[4:] == [captured[4]] * (STEPS - 4)


BY_TENSORS = {
    "times": lambda h, n: h * n,
    "times, number first": lambda h, n: n * h,
    "divided by": lambda h, n: (h / n).softmax(-1),
    "divides": lambda h, n: n / (h * h + 1),
    "less": lambda h, n: (h - n).sigmoid(),
    "less, number first": lambda h, n: (n - h).sigmoid(),
    "more": lambda h, n: (n + h).sigmoid(),
    "compared": lambda h, n: torch.where(h * 9 < n, h, h * 0.1),
    "compared, number first": lambda h, n: torch.where(n >= h * 9, h, h * 0.1),
    "fraction": lambda h, n: h * (n / 7),
    "fraction, number first": lambda h, n: (n / 7) - h,
    "at most": lambda h, n: h * min(1.0, n / 40),
    "cosine": lambda h, n: h * (0.5 * (1 + math.cos(math.pi * n / 50))),
    "of a mean": lambda h, n: h + h.mean() * n,
    "fraction of a mean": lambda h, n: h + h.mean() * (n / 7),
    "by a mean": lambda h, n: h + (n / 7) / (h.mean() + 3),
    "in place": lambda h, n: h.clone().mul_(n),
    "in place by an operator": lambda h, n: twice_in_place(h, n),
    "full": lambda h, n: h + torch.full((8,), n),
    "full of fractions": lambda h, n: h * torch.full((8,), n / 3, dtype=h.dtype),
    "new full": lambda h, n: h * h.new_full((1, 8), n),
    "full like": lambda h, n: h * torch.full_like(h, n),
    "a tensor": lambda h, n: h * torch.tensor(n * 0.3),
    "whole numbers": lambda h, n: h * (torch.arange(8) * n),
    "whole numbers divided": lambda h, n: h * (torch.arange(8) / n),
    "two": lambda h, n: h * n + h * (n / 3) - (n + 1) * h.square(),
    "one, twice": lambda h, n: h * n + h.square() * n,
}
"""Uses of a whole number for which one program serves all its values."""
BY_THEMSELVES = {
    "power": lambda h, n: (h * h + 1) ** n,
    "dropout": lambda h, n: nn.functional.dropout(h, 1 / abs(n)),
    "clamp": lambda h, n: h.clamp(-abs(n) / 50, abs(n) / 50),
    "scaled": lambda h, n: torch.add(h, h, alpha=n),
    "whole numbers by a fraction": lambda h, n: h * (torch.arange(8) * (n / 3)),
    "in place on a mean": lambda h, n: h + h.mean().mul_(n / 3),
    "two numbers": lambda h, n: h * torch.full((abs(n),), n).sum(),
    "index": lambda h, n: h * torch.arange(100.0)[abs(n)],
}
"""Uses for which each value is captured."""


def twice_in_place(h, n):
    h = h.clone()
    h *= n
    h /= n + 4
    return h


class Called(nn.Module):
    """Layers around a use of a number: that it is called with, or an attribute."""

    def __init__(self, use):
        super().__init__()
        self.first, self.last, self.use, self.number = nn.Linear(8, 8), nn.Linear(8, 8), use, 2

    def forward(self, x, number=None):
        return self.last(torch.tanh(self.use(self.first(x), self.number if number is None else number).to(x.dtype)))


def captured_after(model, captures, dtype, attribute, numbers):
    """Steps at all numbers, each as in plain training; gives the number of captures after each."""
    planned = monetlite.within(twin(model), **PLANNING)
    for number in numbers:
        for item in (planned, model):
            item.number = number if attribute else 2
        inputs = (torch.randn(4, 8, dtype=dtype), *(() if attribute else (number,)))
        assert_same(step(planned, inputs), step(model, inputs))
        yield len(captures)


DTYPES = torch.float32, torch.float64, torch.bfloat16
OFTEN = [
    ("fraction, number first", torch.float32, False),
    ("fraction of a mean", torch.float32, True),
    ("full like", torch.float32, False),
    ("two", torch.float32, True),
    ("one, twice", torch.float32, False),
]


@pytest.mark.parametrize(
    ("use", "dtype", "attribute"), often(itertools.product(BY_TENSORS, DTYPES, [False, True]), *OFTEN)
)
def test_one_program_serves_all_numbers(captures, use, dtype, attribute):
    numbers = (5, 7, 12, -3, 33, 2, 19)
    model = Called(BY_TENSORS[use]).to(dtype)
    counts = list(captured_after(model, captures, dtype, attribute, numbers))
    assert counts[0] < counts[1]
    assert counts[1:] == [counts[1]] * (len(numbers) - 1)


@pytest.mark.parametrize("use", often(BY_THEMSELVES, "power", "in place on a mean"))
def test_numbers_that_an_operator_has_to_know_are_captured_each(captures, use):
    for _ in captured_after(Called(BY_THEMSELVES[use]), captures, torch.float32, False, (5, 7, 12)):
        pass


LARGE = {
    "divided": lambda h, n: h * n / 2**24,
    "less": lambda h, n: h * ((n - 2**24) / 7),
    "times": lambda h, n: h * n * 2.0**-60,
}


@pytest.mark.parametrize("use", often(LARGE, "divided", "less"))
def test_numbers_are_as_precise_as_in_plain_training(captures, use):
    """A number beyond 2^24 is none of float32, and one beyond 2^53 none of float64."""
    numbers = (5, 2**24 + 1, 2**24 + 3, 2**53 + 1)
    list(captured_after(Called(LARGE[use]), captures, torch.float32, False, numbers))


def test_a_number_varies_beside_sizes(captures):
    model = Called(BY_TENSORS["fraction"])
    planned = monetlite.within(twin(model), **PLANNING)
    counts = []
    for number in range(2, 14):
        inputs = torch.randn(3 + number % 5, 8), number
        assert_same(step(planned, inputs), step(model, inputs))
        counts.append(len(captures))
    assert counts[6:] == [counts[6]] * (len(counts) - 6)


def test_numbers_and_sizes_are_on_the_cpu_whatever_device_a_person_has_tensors_made_on(captures):
    """On a GPU, a number beside 16-bit tensors would be rounded to 16 bits, and reading sizes would wait for it."""
    model = Called(BY_TENSORS["fraction"])
    planned = monetlite.within(twin(model), **PLANNING)
    with torch.device("meta"):
        for number in range(2, 8):
            inputs = torch.randn(3 + number % 3, 8, device="cpu"), number
            assert_same(step(planned, inputs), step(model, inputs))
