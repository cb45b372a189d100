"""Recorded steps of models in pieces that an exception, Ctrl-C or a person ends before their time."""

import functools
import weakref

import pytest
import torch
from models_in_pieces import QUICK
from small_models import Reads, assert_same, step, twin
from torch import nn
from torch._dynamo import graph_break

import monetlite
from monetlite.profiling.memory_records import is_profiling
from monetlite.runtime.step_record import StepRecord


class Fails(nn.Module):
    """An error between two pieces, when it is asked for."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(16, 64), nn.Linear(64, 16), False

    def forward(self, x):
        x = self.first(x)
        graph_break()
        if self.fails:
            raise ValueError("no more")
        return self.second(x)


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_a_recorded_step_that_fails_is_recorded_again():
    plain, x = Fails(), torch.randn(64, 16)
    model = monetlite.within(twin(plain), budget="120%", **QUICK)
    step(model, (x,))
    model.fails = True
    with pytest.raises(ValueError, match="no more"):
        model(x)
    assert not is_profiling()
    model.fails = False
    for seed in range(2):
        assert_same(step(model, (x,), seed), step(plain, (x,), seed))
    assert monetlite.schedule_of(model) is not None


@torch.compiler.disable
def outside(module, x):
    return module(x)


class EndsOutside(nn.Module):
    """Two pieces, and a layer behind them that isn't captured."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x):
        x = self.first(x)
        graph_break()
        return outside(self.last, self.second(x))


def refuse(gradient):
    raise ValueError("no more")


@pytest.mark.parametrize("name", ["second", "last"])
def test_a_recorded_step_whose_backward_pass_fails_is_recorded_again(name):
    plain, x = EndsOutside(), torch.randn(64, 16)
    model = monetlite.within(twin(plain), budget="120%", **QUICK)
    step(model, (x,))
    hook = getattr(model, name).weight.register_hook(refuse)
    with pytest.raises(ValueError, match="no more"):
        step(model, (x,))
    hook.remove()
    step(model, (x,))
    with pytest.warns(UserWarning, match="It trains in 2 pieces"):
        found = step(model, (x,))
    assert_same(found, step(plain, (x,)))


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_a_step_is_recorded_again_where_ctrl_c_loses_the_record(monkeypatch):
    model, x = monetlite.within(Fails(), budget="120%", **QUICK), torch.randn(64, 16)
    for _ in range(2):
        step(model, (x,))
    with monkeypatch.context() as patch:
        patch.setattr(StepRecord, "end", raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(model, (x,))
    for _ in range(2):
        step(model, (x,))
    assert monetlite.schedule_of(model) is not None


def raise_keyboard_interrupt(_record):
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*can't be captured whole")
def test_a_step_that_is_left_after_its_forward_pass_holds_up_no_other_model():
    left, other, x = Reads(), Reads(), torch.randn(64, 64)
    for model in (left, other):
        monetlite.within(model, budget="120%", **QUICK)
    step(left, (x,))
    output = left(x)
    assert is_profiling()
    held = _Held()
    output.grad_fn.register_prehook(functools.partial(_unchanged, held))
    graph = weakref.ref(held)
    del output, held
    assert graph() is None
    for seed in range(4):
        step(other, (x,), seed)
    assert monetlite.schedule_of(other) is not None
    assert monetlite.schedule_of(left) is None
    for seed in range(2):
        step(left, (x,), seed)
    assert monetlite.schedule_of(left) is not None


class _Held:
    """Something that an autograd graph holds."""


def _unchanged(_held, gradients):
    return gradients
