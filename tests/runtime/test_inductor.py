"""Programs compiled by Inductor: the same training but for rounding, and a refusal where that can't be."""

import pytest
import torch
from small_models import assert_same, step, tiny_transformer, twin
from step_lists import free_profile, recompute_everything, schedule_of
from torch import nn

import monetlite
from monetlite.errors import ModelError

CLOSE = 1e-4


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[module for _ in range(4) for module in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x):
        return self.layers(x)


def test_training_is_plain_training_but_for_rounding():
    model, x = Deep(), (torch.randn(32, 64),)
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule, compile=True)
    for _ in range(2):
        assert_same(step(wrapper, x), step(model, x), within=CLOSE)


def test_a_transformer():
    model, inputs = tiny_transformer("llama")
    wrapper = monetlite.MONeTWrapper(
        twin(model),
        budget="110%",
        device="rtx-4090",
        time_limit=1,
        implementations="default",
        compile=True,
    )
    assert_same(step(wrapper, inputs), step(model, inputs), within=1e-3)


def test_random_numbers_that_are_drawn_again_are_refused():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(4, 8)
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    with pytest.raises(ModelError, match="Inductor can't compile"):
        monetlite.MONeTWrapper(model, schedule, compile=True)(x)
