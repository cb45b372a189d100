"""A step traced in channels-last is the same step in another layout."""

import random

import pytest
import torch
from small_models import SmallCNN, step, twin
from step_lists import free_profile, recompute_at_random, schedule_of, with_random_implementations
from torch import nn

import monetlite
from monetlite.errors import ModelError, TraceError
from monetlite.models import build_model
from monetlite.schedule import plain_steps

WITHIN = 1e-3
"""Sums in another order, through several batch norms."""


def is_image(spec):
    return len(spec.shape) == 4 and spec.shape[1] > 1 and spec.shape[2] * spec.shape[3] > 1


def convolutions(graph):
    for operator in graph.operators:
        call = operator.implementations[0].call
        if call is not None and call.target.startswith("aten.convolution"):
            yield operator, call


class Upsampling(nn.Module):
    """Returns an image, and flattens another."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x):
        y = torch.relu(self.norm(self.down(x)))
        return torch.cat([self.up(y), x], 1), self.head(y.flatten(1))


MODELS = {
    "cnn": lambda: (SmallCNN(), (torch.randn(4, 3, 12, 12),)),
    "image out": lambda: (Upsampling(), (torch.randn(2, 3, 12, 12, requires_grad=True),)),
    "resnet18": lambda: (build_model("resnet18", batch=2, input_size=(64, 64)).model, (torch.randn(2, 3, 64, 64),)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_step_in_another_layout(kind):
    torch.manual_seed(0)
    model, inputs = MODELS[kind]()
    graph = monetlite.trace(model, inputs, layout="channels_last")
    assert graph.layout == "channels_last"
    for operator, call in convolutions(graph):
        image = next(ref for ref in call.tensors())
        if is_image(image.spec):
            assert image.spec.stride[1] == 1, operator.name
    expected = step(twin(model), inputs)
    rng = random.Random(3)
    some = graph.available("cpu").restricted(lambda item: item.tolerance == 0.0)
    for steps in (
        plain_steps(graph),
        with_random_implementations(some, recompute_at_random(some, rng), rng),
    ):
        wrapped = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(some), steps))
        found = step(wrapped, inputs)
        for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
            assert ours.stride() == theirs.stride()
        largest = max(item.abs().max() for item in expected.gradients.values() if item is not None)
        for name, gradient in expected.gradients.items():
            if gradient is not None:
                assert (found.gradients[name] - gradient).abs().max() <= WITHIN * largest, name
        for name, buffer in expected.buffers.items():
            torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.random_state, expected.random_state)


def test_conversions_are_few_and_are_operators_of_the_graph():
    model, inputs = MODELS["resnet18"]()
    graph = monetlite.trace(model, inputs, layout="channels_last")
    copies = [operator for operator in graph.operators if operator.family == "clone"]
    weights = [
        operator for operator in copies if operator.writes and graph.values[operator.writes[0]].kind == "param_grad"
    ]
    assert 1 <= len(copies) - len(weights) <= 3, [operator.name for operator in copies]


def test_a_model_that_is_channels_last_already_stays_as_it_is():
    model = SmallCNN().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
    graph = monetlite.trace(model, x, layout="channels_last")
    assert [operator.name for operator in graph.operators if operator.family == "clone"] == ["clone.backward"], (
        "the gradient of the pooled vector, expanded over the image, is the only one that is not"
    )


def test_a_model_without_images_is_left_alone():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)
    as_traced, converted = (monetlite.trace(model, x, layout=layout) for layout in ("as_traced", "channels_last"))
    assert as_traced.fingerprint == converted.fingerprint


def test_an_unknown_layout():
    with pytest.raises(TraceError, match="'columns' is neither"):
        monetlite.trace(nn.Linear(2, 2), torch.randn(1, 2), layout="columns")


def test_the_person_chooses_how_exact_it_has_to_be():
    """Nothing asked for: the same bits. A tolerance: whichever layout is faster, and verified to it."""
    torch.manual_seed(0)
    model, x = SmallCNN(channels=16), torch.randn(8, 3, 24, 24)
    exact = monetlite.optimize(model, x, "80%", time_limit=2)
    assert (exact.layout, exact.tolerance) == ("as_traced", 0.0)
    assert monetlite.verify(model, exact, x, repeats=1).exact
    loose = monetlite.optimize(model, x, "80%", time_limit=2, tolerance=1e-4)
    report = monetlite.verify(model, loose, x, repeats=1)
    assert report.passed, report.reasons
    assert loose.tolerance == 1e-4
    asked = monetlite.optimize(model, x, "90%", time_limit=2, layout="channels_last", tolerance=1e-5)
    assert asked.layout == "channels_last"
    assert asked.plain_peak_bytes == exact.plain_peak_bytes, "what plain training takes, in its own layout"
    with pytest.raises(ModelError, match="allow 1e-05 or more"):
        monetlite.optimize(model, x, "90%", time_limit=2, layout="channels_last")
