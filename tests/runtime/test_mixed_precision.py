"""Half precision in the ways people use it, and what surrounds a step: the same training."""

import copy

import pytest
import torch
from small_models import TinyCNN, assert_same, step, twin
from step_lists import free_profile, recompute_everything, schedule_of
from thoroughness import often
from torch import nn

import monetlite


def wrap(model, inputs):
    graph = monetlite.trace(model, inputs)
    return monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), recompute_everything(graph)))


class Block(nn.Module):
    """Convolutions and batch norm, without dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.second(torch.relu(self.first(x))))).mean((2, 3))


def test_a_model_in_bfloat16():
    model, x = Block().bfloat16(), (torch.randn(4, 3, 8, 8).bfloat16(),)
    assert_same(step(wrap(twin(model), x), x), step(model, x))


def test_a_model_in_channels_last():
    layout = torch.channels_last
    model, x = TinyCNN().to(memory_format=layout), (torch.randn(4, 3, 12, 12).contiguous(memory_format=layout),)
    wrapped = wrap(twin(model), x)
    for _ in range(2):
        assert_same(step(wrapped, x), step(model, x))
    assert all(item.grad.stride() == item.stride() for item in wrapped.parameters())


@pytest.mark.parametrize("dtype", often([torch.bfloat16, torch.float16], torch.float16))
def test_gradient_scaling_under_autocast(dtype):
    model, x = Block(), torch.randn(4, 3, 8, 8)
    with torch.autocast("cpu", dtype):
        graph = monetlite.trace(model, x)
    assert graph.autocast == str(dtype).removeprefix("torch.")
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    wrapped = monetlite.MONeTWrapper(twin(model), with_autocast(schedule, graph))
    scales = []
    for network in (wrapped, model):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = network(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    for one, other in zip(wrapped.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def with_autocast(schedule, graph):
    from dataclasses import replace

    return replace(schedule, autocast=graph.autocast)


@pytest.mark.parametrize("fused", [{"foreach": True}, {"fused": True}])
def test_optimizers_of_many_tensors_at_once(fused):
    model, x = TinyCNN(), torch.randn(4, 3, 12, 12)
    wrapped = wrap(copy.deepcopy(model), x)
    for network in (wrapped, model):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, **fused)
        torch.manual_seed(0)
        for number in range(4):
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    for one, other in zip(wrapped.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
