"""Results that PyTorch returns in too large a storage, which a step must not hold."""

import pytest
import torch
from small_models import assert_same, step, twin
from step_lists import free_profile, schedule_of
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.steps import plain_steps


class Losses(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layer, self.loss = nn.Linear(16, 16), loss

    def forward(self, x, target):
        return self.loss(torch.sigmoid(self.layer(x)), target)


LOSSES = [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss]


@pytest.mark.parametrize("loss", often(LOSSES, *LOSSES[::2]))
def test_a_loss_takes_the_memory_of_a_number(loss):
    model, inputs = Losses(loss), (torch.randn(64, 16), torch.rand(64, 16))
    graph = monetlite.trace(model, inputs)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), plain_steps(graph)))
    assert_same(step(wrapper, inputs), step(model, inputs))
    assert wrapper(*inputs).untyped_storage().nbytes() == 4
    assert model(*inputs).untyped_storage().nbytes() > 4, "which is why"


def test_folded_patches_are_let_go_of():
    class Fold(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return F.fold(self.layer(x), (10, 10), 3)

    model, inputs = Fold(), (torch.randn(1, 36, 64),)
    graph = monetlite.trace(model, inputs)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), plain_steps(graph)))
    assert_same(step(wrapper, inputs), step(model, inputs))
    output = wrapper(*inputs)
    assert output.untyped_storage().nbytes() == output.nbytes
