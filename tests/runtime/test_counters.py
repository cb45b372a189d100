"""Whole numbers that a model counts with in its forward pass."""

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


@pytest.mark.parametrize("count", often(COUNTING, "alone", "with_sizes", "an_argument"))
def test_counting_has_nothing_captured_again(captures, count):
    counts = [len(captures) for _ in trained(Counts(COUNTING[count]), **PLANNING)]
    assert counts[4:] == [counts[4]] * (STEPS - 4)


def test_a_schedule_that_was_solved_beforehand_serves_each_count(captures):
    model = Counts(alone)
    schedule = monetlite.optimize(twin(model), (torch.randn(5, 8), 1), **PLANNING)
    counts = [len(captures) for _ in trained(model, schedule=schedule)]
    assert counts[5:] == [counts[5]] * (STEPS - 5)


@pytest.mark.parametrize(
    "use",
    [
        lambda h, steps: h * steps,
        lambda h, steps: h * 2 if steps > 4 else h,
        lambda h, steps: h if steps % 3 else h.flip(0),
        lambda h, steps: h + torch.full_like(h, steps),
        lambda h, steps: h[: 1 + steps % 2],
    ],
)
def test_a_count_that_tensors_depend_on_is_captured_as_often_as_needed(use):
    for _ in trained(Counts(alone, use), **PLANNING):
        pass


class InPieces(Counts):
    def forward(self, x, number):
        found = super().forward(x, number)
        return found if found["loss"].isfinite() else {"loss": found["loss"] * 0, "steps": 0}


def test_counting_has_no_piece_captured_again():
    model, captured = InPieces(alone), []
    planned = monetlite.MONeTWrapper(twin(model), **PLANNING | {"budget": "300%"})
    for number in range(STEPS):
        inputs = torch.randn(4, 8), number + 5
        assert_same(step(planned, inputs), step(model, inputs))
        assert planned.model.steps == model.steps
        captured.append(seconds_captured())
    assert captured[4:] == [captured[4]] * (STEPS - 4)
