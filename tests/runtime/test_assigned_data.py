"""Models that assign to `.data` of weights in the forward pass, as MoCo does: plain training's steps."""

import warnings

import pytest
import torch
from small_models import assert_same, step, twin
from torch import nn

import monetlite


def by_momentum(query, key):
    key.data = key.data * 0.9 + query.data * 0.1


def weighted(query, key):
    """An average by one function, under `torch.no_grad()`."""
    with torch.no_grad():
        key.data = torch.lerp(key.data, query.data, 0.1)


def in_two(query, key):
    key.data = key.data * 0.9
    key.data = key.data + query.data * 0.1


def read_later(query, key):
    """The old elements are read once more."""
    old = key.data
    key.data = key.data * 0.9 + query.data * 0.1
    query.data.add_(old * 0.01)


def shared(query, key):
    """Both have the same elements from now on, while one is trained."""
    key.data = query.data


def turned(query, key):
    """The same elements in another order of memory."""
    found = key.data * 0.9 + query.data * 0.1
    key.data = found.t().contiguous().t()


class Averages(nn.Module):
    def __init__(self, update, before=False):
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2))
        self.key.requires_grad_(False)
        self.update, self.before = update, before

    def forward(self, x):
        keys = self.key(x) if self.before else 0
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            self.update(query, key)
        return self.query(x) * (self.key(x) + keys)


def trained(model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(steps):
        torch.manual_seed(number)
        results = step(model, (torch.randn(16, 32),))
        optimizer.step()
        yield results, [item.detach().clone() for item in model.state_dict().values()]


UPDATES = (by_momentum, weighted, in_two, read_later, shared, turned)


@pytest.mark.parametrize(("update", "before"), [*((update, False) for update in UPDATES), (weighted, True)])
def test_weights_are_those_of_plain_training(update, before):
    plain = Averages(update, before)
    planned = monetlite.within(twin(plain), budget="300%", device="rtx-4090", time_limit=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what can't be captured
        for (ours, weights), (theirs, others) in zip(trained(planned), trained(plain), strict=True):
            assert_same(ours, theirs)
            assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize("update", [by_momentum, weighted, in_two])
def test_averages_are_captured_whole(update):
    model = Averages(update)
    monetlite.optimize(model, torch.randn(16, 32), budget="100%", device="rtx-4090", time_limit=0.3)
