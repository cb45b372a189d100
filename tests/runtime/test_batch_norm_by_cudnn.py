"""Batch norm as a GPU's cuDNN runs it, on a CPU: the same operators, whose CPU kernels stand in for cuDNN's."""

import contextlib
from dataclasses import replace

import pytest
import torch
from small_models import TinyCNN, assert_same, step, twin
from step_lists import free_profile, recompute, schedule_of
from torch import nn
from torch._C import DispatchKey

import monetlite
from monetlite.core.simulate import simulate
from monetlite.tracing import whole_kernels

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@pytest.fixture
def by_cudnn(monkeypatch):
    """Has a CPU's captures take the way that a GPU's do."""
    native, cudnn = torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default

    untouched = native.py_kernels[DispatchKey.Autograd]

    def normalize(*arguments):
        *_, mean, _, training, _, _ = arguments
        by_cudnn = training and mean is not None
        return cudnn.py_kernels[DispatchKey.Autograd](*arguments)[:3] if by_cudnn else untouched(*arguments)

    @contextlib.contextmanager
    def kept_whole():
        with original():
            before = {key: native.py_kernels[key] for key in KEYS}
            native.py_kernels.update(dict.fromkeys(KEYS, normalize))
            native._dispatch_cache.clear()
            try:
                yield
            finally:
                native.py_kernels.update(before)
                native._dispatch_cache.clear()

    original = whole_kernels.kernels_kept_whole
    monkeypatch.setattr("monetlite.tracing.capture.kernels_kept_whole", kept_whole)


def layers():
    """Convolutions have no bias: in front of a normalisation, its gradient is nothing but rounding."""
    sizes = ((3, 8), (8, 4))
    pairs = [(nn.Conv2d(*size, 3, bias=False), nn.BatchNorm2d(size[1]), nn.ReLU()) for size in sizes]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def calls(graph):
    return [op.implementations[0].call.target for op in graph.operators if op.implementations[0].call is not None]


def test_a_graph_has_the_operators_that_run_cudnn(by_cudnn):
    graph = monetlite.trace(TinyCNN(), torch.randn(4, 3, 12, 12))
    assert "aten._batch_norm_with_update_functional.default" in calls(graph)
    assert "aten.batch_norm_backward.default" in calls(graph)
    assert not [name for name in calls(graph) if "native_batch_norm" in name]


def test_its_structure_is_that_of_a_cpus(request):
    """What cuDNN reserves for its gradient is a note: a schedule for one serves the other."""
    model, x = TinyCNN(), torch.randn(4, 3, 12, 12)
    here = monetlite.trace(model, x)
    request.getfixturevalue("by_cudnn")
    there = monetlite.trace(model, x)
    assert calls(here) != calls(there)
    assert here.structure == there.structure


@pytest.mark.parametrize("layout", ["as_traced", "channels_last"])
def test_a_recomputed_step_is_plain_trainings(by_cudnn, layout):
    model, x = layers(), (torch.randn(4, 3, 12, 12),)
    graph = monetlite.trace(model, *x, layout=layout)
    steps = recompute(graph, drop=lambda _: True)
    ran = [graph.operators[index].family for index, _ in steps]
    assert ran.count("batch_norm") > sum(op.family == "batch_norm" for op in graph.operators)
    schedule = replace(schedule_of(free_profile(graph), steps), layout=layout)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    found, expected = step(wrapper, x), step(twin(model), x)
    if layout == "as_traced":
        assert_same(found, expected)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-5)
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer)


@pytest.mark.thorough
def test_every_implementation_of_its_gradient(by_cudnn):
    model, x = layers()[:3], (torch.randn(4, 3, 9, 9),)
    graph = monetlite.trace(model, *x)
    at = next(index for index, op in enumerate(graph.operators) if op.family == "batch_norm_backward")
    names = [item.name for item in graph.operators[at].implementations]
    assert {"default", "inplace", "inplace_by_samples", "from_output"} <= set(names)
    for choice, name in enumerate(names):
        steps = recompute(graph, drop=lambda _: False, choose=lambda index, c=choice: c if index == at else 0)
        simulate(free_profile(graph), steps)
        wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps))
        tolerance = graph.operators[at].implementations[choice].tolerance
        assert_same(step(wrapper, x), step(twin(model), x), within=10 * tolerance), name


def test_frozen_and_without_statistics(by_cudnn):
    """A layer in evaluation mode, and one that keeps no statistics, have no effect that a capture could miss."""
    frozen = nn.BatchNorm2d(4).eval()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), frozen, nn.ReLU(), nn.BatchNorm2d(4, track_running_stats=False))
    x = (torch.randn(4, 3, 9, 9),)
    schedule = monetlite.optimize(model, x, "100%", device="rtx-4090", time_limit=1)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule)
    assert_same(step(wrapper, x), step(twin(model), x))
