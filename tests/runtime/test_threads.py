"""A wrapped model that several threads train."""

from concurrent.futures import ThreadPoolExecutor

import torch
from small_models import twin
from torch import nn

import monetlite


def test_the_first_steps_in_several_threads():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    schedule = monetlite.optimize(model, torch.randn(6, 4), "100%", device="t4", time_limit=1)
    wrapper, inputs = monetlite.MONeTWrapper(twin(model), schedule), torch.randn(3, 6, 4)
    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(lambda x: wrapper(x).square().mean(), inputs))
    assert [loss.item() for loss in losses] == [model(x).square().mean().item() for x in inputs]
