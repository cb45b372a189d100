"""A step traced in channels-last is the same step in another layout."""

import functools
import itertools
import os
import random

import pytest
import torch
from small_models import SmallCNN, assert_same, call, step, twin
from step_lists import (
    free_profile,
    recompute_at_random,
    recompute_everything,
    schedule_of,
    with_random_implementations,
)
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.errors import ModelError, TraceError
from monetlite.core.steps import plain_steps
from monetlite.models.convnets import BasicBlock, ResNet

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
    "resnet": lambda: (ResNet((1, 1, 1), block=BasicBlock, classes=10), (torch.randn(2, 3, 32, 32),)),
}


@functools.cache
def traced(kind):
    torch.manual_seed(0)
    model, inputs = MODELS[kind]()
    return model, inputs, monetlite.trace(model, inputs, layout="channels_last")


@pytest.mark.parametrize("kind", often(MODELS, "image out"))
def test_the_same_step_in_another_layout(kind):
    model, inputs, graph = traced(kind)
    assert graph.layout == "channels_last"
    for operator, kernel in convolutions(graph):
        image = next(ref for ref in kernel.tensors())
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
    _, _, graph = traced("resnet")
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
    with pytest.raises(TraceError, match="'columns' is unknown"):
        monetlite.trace(nn.Linear(2, 2), torch.randn(1, 2), layout="columns")


@pytest.mark.thorough  # test_cli.py has the same choices in commands
def test_the_person_chooses_how_exact_it_has_to_be():
    """Nothing asked for: the same bits. A tolerance: whichever layout is faster, and verified to it."""
    torch.manual_seed(0)
    model, x = SmallCNN(), torch.randn(4, 3, 12, 12)
    exact = monetlite.optimize(model, x, "100%", time_limit=0.5)
    assert (exact.layout, exact.tolerance) == ("as_traced", 0.0)
    assert monetlite.verify(model, exact, x, repeats=1).exact
    loose = monetlite.optimize(model, x, "100%", time_limit=0.5, tolerance=1e-4)
    report = monetlite.verify(model, loose, x, repeats=1)
    assert report.passed, report.reasons
    assert loose.tolerance == 1e-4
    asked = monetlite.optimize(model, x, "100%", time_limit=0.5, layout="channels_last", tolerance=1e-5)
    assert asked.layout == "channels_last"
    assert asked.plain_peak_bytes == exact.plain_peak_bytes, "what plain training takes, in its own layout"
    with pytest.raises(ModelError, match="allow 1e-05 or more"):
        monetlite.optimize(model, x, "90%", time_limit=0.5, layout="channels_last")


class Seen(nn.Module):
    """Tensors that see an image in different ways."""

    def __init__(self, *ways):
        super().__init__()
        self.conv, self.ways = nn.Conv2d(3, 8, 3), ways

    def forward(self, x):
        image = self.conv(x)
        return [way(image) for way in self.ways]


def both(*ways):
    """What is seen, and what dropout makes of it."""
    return [*ways, *((lambda image, way=way: F.dropout(way(image), 0.4)) for way in ways)]


def permuted_and_cut(order, seed):
    rng = random.Random(seed)
    cuts = tuple(rng.choice([slice(None), slice(1, None), slice(None, -1), slice(None, None, 2)]) for _ in order)
    return lambda image: image.permute(order)[cuts]


ORDERS = list(itertools.permutations(range(4)))[:: 1 if "MONETLITE_THOROUGH" in os.environ else 5]
WAYS = {
    "permuted": both(*(lambda image, order=order: image.permute(order) for order in ORDERS)),
    "sliced": both(*(permuted_and_cut(order, seed) for seed, order in enumerate(ORDERS))),
    "of other ranks": both(
        lambda image: image.flatten(2).transpose(1, 2),
        lambda image: image.flatten(2),
        lambda image: image.permute(2, 0, 3, 1).flatten(2),
        lambda image: image[1],
        lambda image: image[:, 2:4].permute(1, 3, 0, 2)[1],
        lambda image: image.view(2, 2, 4, 6, 6).transpose(1, 2),
        lambda image: image.view(2, 2, 4, 2, 3, 6).permute(5, 0, 3, 1, 2, 4),
        lambda image: image.view(2, 2, 4, 2, 3, 6).permute(5, 0, 3, 1, 2, 4)[1:, :, :, :, ::2],
        lambda image: image.mean(1),
        lambda image: image.sum(2, keepdim=True),
    ),
    "in parts": both(
        lambda image: image.chunk(2, 1)[0],
        lambda image: image.chunk(2, 1)[1],
        lambda image: image.permute(0, 2, 3, 1).split(3, dim=2)[0],
        lambda image: image.unbind(1)[3],
        lambda image: image.chunk(2, 1)[1].view(2, 4, 36),
        lambda image: image[:, 1:5].view(2, 2, 2, 36),
    ),
    "repeated": both(
        lambda image: image.mean(1, keepdim=True).expand(2, 4, 6, 6),
        lambda image: image[:, :, :, :1].expand(2, 8, 6, 5).transpose(1, 3),
        lambda image: image[1].expand(3, 8, 6, 6),
        lambda image: image.mean(1).unsqueeze(3).expand(2, 6, 6, 3),
        lambda image: image.unfold(2, 3, 2),
    ),
    "by strides": both(
        lambda image: image.as_strided((2, 8, 36), (288, 36, 1)),
        lambda image: image.as_strided((2, 8, 4, 3), (288, 36, 10, 2)),
        lambda image: image[:, 2:4].as_strided((3, 5), (40, 2)),
        lambda image: image[:1, 2:3, :1, :1].as_strided((3, 5), (40, 2), 7),
        lambda image: image.chunk(2, 1)[1].transpose(1, 2).as_strided((2, 30), (300, 2)),
        lambda image: torch.as_strided_scatter(image, image[0, 0, :3] * 2, (3, 6), (50, 3), 11),
        lambda image: image.relu().as_strided((4, 36), (36, 1)),
    ),
    "random numbers like it": [
        lambda image: image * torch.rand_like(image),
        lambda image: image.transpose(2, 3) * torch.rand_like(image.transpose(2, 3)),
        lambda image: image[:, 1:3] * torch.randn_like(image[:, 1:3]),
        lambda image: image * torch.bernoulli(torch.sigmoid(image.permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
    ],
}


def strides(tensor):
    """Of the dimensions that have any."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("kind", often(WAYS, *list(WAYS)[:2]))
def test_elements_are_in_the_order_that_they_were_in_wherever_that_matters(kind):
    """The same elements are dropped, the same are found by strides, and outputs have the strides that they had."""
    torch.manual_seed(0)
    model, inputs = Seen(*WAYS[kind]), (torch.randn(2, 3, 8, 8),)
    graph = (
        monetlite.trace(model, inputs, layout="channels_last")
        .available("cpu")
        .restricted(lambda item: item.tolerance == 0.0)
    )
    images = list(convolutions(graph))
    assert images
    wrapped = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), recompute_everything(graph)))
    assert_same(step(wrapped, inputs), step(twin(model), inputs), within=1e-5)
    for ours, theirs in zip(call(wrapped, inputs), call(model, inputs), strict=True):
        assert strides(ours) == strides(theirs)


@torch.library.custom_op("monetlite_tests::in_memory", mutates_args=())
def in_memory(image: torch.Tensor) -> torch.Tensor:
    """Its elements in the order in which they lie in memory, as a kernel finds them that takes a pointer."""
    return image.detach().as_strided((image.numel(),), (1,)).clone()


@in_memory.register_fake
def _(image):
    return image.new_empty(image.numel())


in_memory.register_autograd(
    lambda ctx, gradient: gradient.view(ctx.shape),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
)


def test_an_operator_of_another_library_gets_the_layout_that_it_is_used_to():
    torch.manual_seed(0)
    model, inputs = Seen(lambda image: in_memory(image.relu()), torch.sin), (torch.randn(2, 3, 8, 8),)
    graph = monetlite.trace(model, inputs, layout="channels_last")
    wrapped = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), plain_steps(graph)))
    assert_same(step(wrapped, inputs), step(twin(model), inputs), within=1e-5)
