"""Gradients from a normalisation's output: where the weights rule them out, a step is run in another way."""

import functools
import itertools
import math
import os
import warnings

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, schedule_of
from thoroughness import often
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import monetlite
from monetlite.core.steps import plain_steps
from monetlite.operators.normalization import FROM_OUTPUT_TOLERANCE, MAX_RATIO, require_invertible
from monetlite.operators.program_calls import GuardFailed

FROM_OUTPUT = ("from_output_inplace", "from_output")


def normalised():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(6 * 100, 10),
        nn.LayerNorm(10),
        nn.Tanh(),
    )
    with torch.no_grad():
        for layer in (model[1], model[5]):
            layer.weight.uniform_(0.5, 2.0)
            layer.bias.normal_()
    return model, (torch.randn(4, 3, 12, 12),)


@functools.cache
def traced():
    model, inputs = normalised()
    return monetlite.trace(model, inputs)


def from_outputs(graph):
    """Plain training's steps, with every gradient of a normalisation taken from its output."""
    return tuple(
        next(
            (
                (index, at)
                for at, item in enumerate(graph.operators[index].implementations)
                if item.name == "from_output"
            ),
            (index, choice),
        )
        for index, choice in plain_steps(graph)
    )


def wrap(model, graph, steps=None):
    steps = from_outputs(graph) if steps is None else steps
    return monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))


@pytest.mark.parametrize("layout", often(["as_traced", "channels_last"], "channels_last"))
def test_gradients_from_the_output_are_within_their_tolerance(layout):
    model, inputs = normalised()
    graph = monetlite.trace(model, inputs, layout=layout)
    steps = from_outputs(graph)
    chosen = [(graph.operators[index], choice) for index, choice in steps]
    used = {operator.family for operator, choice in chosen if operator.implementations[choice].guard}
    assert used == {"batch_norm_backward", "layer_norm_backward"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(wrap(model, graph, steps), inputs)
    expected = step(twin(model), inputs)
    if layout == "channels_last":  # running statistics are sums, too
        for name, buffer in expected.buffers.items():
            torch.testing.assert_close(found.buffers.pop(name), buffer, rtol=1e-5, atol=1e-6)
        expected.buffers.clear()
    assert_same(found, expected, 10 * FROM_OUTPUT_TOLERANCE)


WEIGHTS = [(1, 1e-30), (5, math.nan)]
"""Each kind of normalisation. Another test has a weight of zero."""
ALL_WEIGHTS = list(itertools.product((1, 5), (0.0, 1e-30, math.nan)))


@pytest.mark.parametrize(("layer", "value"), ALL_WEIGHTS if "MONETLITE_THOROUGH" in os.environ else WEIGHTS)
def test_a_weight_that_rules_it_out_gives_plain_trainings_gradients_and_a_warning(layer, value):
    model, inputs = normalised()
    graph = traced()
    with torch.no_grad():
        model[layer].weight[2] = value
    wrapped = wrap(model, graph)
    with pytest.warns(UserWarning, match=rf"the weights of {layer}\.backward are zero") as caught:
        found = step(wrapped, inputs)
    assert len(caught) == 1
    expected = step(twin(model), inputs)
    for name, gradient in expected.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-3, atol=1e-5, equal_nan=True)
    assert torch.equal(found.random_state, expected.random_state)
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=0, atol=0, equal_nan=True)


def test_a_weight_that_comes_to_rule_it_out_while_training():
    """The guard looks at the weights of every step, and says so once."""
    model, inputs = normalised()
    graph = traced()
    wrapped = wrap(model, graph)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(*inputs).sum().backward()
    with torch.no_grad():
        wrapped.model[1].weight[0] = 1e-4
        wrapped.model[1].bias[0] = 1e-4 * MAX_RATIO * 2
    with pytest.warns(UserWarning, match=r"1\.backward"):
        wrapped(*inputs).sum().backward()
    reference = twin(wrapped.model)
    for candidate in (wrapped, reference):
        for parameter in candidate.parameters():
            parameter.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = step(wrapped, inputs)
    assert_same(found, step(reference, inputs), 10 * FROM_OUTPUT_TOLERANCE)


def test_what_the_default_needs_is_kept_even_where_it_was_overwritten():
    """Batch norm in place over its input, whose gradient then needs that input after all."""
    model, inputs = normalised()
    graph = traced().available("cpu")
    steps = []
    for index, choice in from_outputs(graph):
        names = [item.name for item in graph.operators[index].implementations]
        if graph.operators[index].family == "batch_norm":
            choice = names.index("inplace")
        steps.append((index, choice))
    monetlite.simulate(free_profile(graph), steps)
    with torch.no_grad():
        model[1].weight[0] = 0.0
    with pytest.warns(UserWarning, match=r"1\.backward"):
        found = step(wrap(model, graph, tuple(steps)), inputs)
    assert_same(found, step(twin(model), inputs), 10 * FROM_OUTPUT_TOLERANCE)


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_normalisations_are_looked_at_together():
    weights = [torch.rand(4, 2) + 0.5 if at % 2 else torch.rand(3) + 0.5 for at in range(40)]
    biases = [None if at % 3 else torch.randn_like(weight) for at, weight in enumerate(weights)]
    names = [f"norm{at}" for at in range(40)]
    with Launches() as seen:
        require_invertible(names, weights, biases)
    assert seen.count < 120, "views and zeros, and a few operators"
    weights[7][1, 1], weights[30][2] = 0.0, float("nan")
    biases[33][:] = 2 * MAX_RATIO * weights[33]
    with pytest.raises(GuardFailed) as failed:
        require_invertible(names, weights, biases)
    assert failed.value.operators == ["norm7", "norm30", "norm33"]


def test_torch_compile_takes_no_gradient_from_an_output():
    """It has no other program where weights rule that out."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
    model = nn.Sequential(convolution, norm, nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(8 * 256, 4))
    nn.init.zeros_(norm.weight)
    x = torch.randn(32, 3, 16, 16)
    options = {"budget": "90%", "device": "rtx-4090", "tolerance": FROM_OUTPUT_TOLERANCE, "time_limit": 0.5}
    compiled = twin(model)
    compiled.compile(backend="monetlite", options=options)
    assert_same(step(compiled, (x,)), step(model, (x,)), 10 * FROM_OUTPUT_TOLERANCE)
