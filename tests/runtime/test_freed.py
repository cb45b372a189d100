"""A model that nobody holds any longer is freed, with all that was made for it."""

import gc
import weakref

import pytest
import torch
from small_models import Reads
from thoroughness import often
from torch import nn

import monetlite
from monetlite.runtime.gradient_delivery import CapturedStep

PLANNING = {"device": "rtx-4090", "time_limit": 1}


def layers():
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64))


def wrapped(model, x, **options):
    return monetlite.MONeTWrapper(model, budget="200%", **PLANNING, **options)


def in_place(model, x):
    return monetlite.within(model, budget="200%", **PLANNING)


def waiting(model, x):
    return wrapped(model, x, wait=True)


def compiled(model, x):
    return wrapped(model, x, compile=True)


def solved(model, x):
    return monetlite.MONeTWrapper(model, monetlite.optimize(model, (x,), budget="200%", **PLANNING))


def by_torch_compile(model, x):
    return torch.compile(model, backend="monetlite", options={"budget": "200%", **PLANNING})


def trained(make, scheduled):
    """Train and forget; gives the model, the scheduled one and a result, weakly."""
    model, x = make(), torch.randn(8, 64)
    planned = scheduled(model, x)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        loss = planned(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weakref.ref(item) for item in (model, planned, loss)]


WAYS = wrapped, in_place, waiting, compiled, solved, by_torch_compile
WHOLE, IN_PIECES = [(layers, way) for way in WAYS], [(Reads, way) for way in WAYS if way is not solved]


@pytest.mark.parametrize(("make", "scheduled"), often(WHOLE + IN_PIECES, (Reads, in_place)))
def test_a_model_is_freed(make, scheduled):
    """Layers that are trained in place are freed in the next test, too."""
    held = [item for _ in range(2) for item in trained(make, scheduled)]
    gc.collect()
    assert not [found for item in held if (found := item()) is not None]


def test_a_backward_pass_works_once_the_model_is_freed():
    model, x = layers(), torch.randn(8, 64)
    planned, weight = in_place(model, x), model[0].weight
    planned(x).sum().backward()
    loss, known, weight.grad = planned(x).sum(), weakref.ref(model), None
    del model, planned
    gc.collect()
    assert known() is None
    loss.backward()
    assert torch.isfinite(weight.grad).all()


def test_programs_for_old_values_are_freed(monkeypatch):
    """TorchDynamo would keep each program for good, once its limit is reached."""
    monkeypatch.setattr("monetlite.runtime.scheduled_training.MAX_PROGRAMS", 3)

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.steps = nn.Linear(8, 8), 0

        def forward(self, x):
            self.steps += 1
            return self.layer(x) * self.steps

    planned, x = in_place(Counts(), None), torch.randn(4, 8)
    before = {id(item) for item in gc.get_objects() if type(item) is CapturedStep}
    for _ in range(10):
        planned(x).sum().backward()
    gc.collect()
    made = [item for item in gc.get_objects() if type(item) is CapturedStep and id(item) not in before]
    assert 1 <= len(made) <= 4
