"""What `monetlite compare` says that a step does otherwise than plain training's."""

import copy

import pytest
import torch
from torch import nn

from monetlite.checking.comparison.exactness import Examiner
from monetlite.checking.trainee import Trainee


class Centred(nn.Module):
    """Its running mean is rounding errors: what it normalises has no mean."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.linear, self.norm, self.last = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        x = self.linear(x)
        mean = x.flip(0).cumsum(0)[-1] / len(x) if self.way == "reordered" else x.mean(0)
        if self.way == "shifted":
            mean = mean + 0.01
        centred = x - mean
        if self.way == "twice":
            self.norm(centred)
        return self.last(torch.relu(self.norm(centred)))


def trainee(model, inputs):
    return Trainee(model, (inputs,), {}, lambda output: output.square().mean(), "cpu")


@pytest.mark.parametrize(
    ("way", "faults"),
    [
        ("as it is", ()),
        ("reordered", ()),
        ("twice", ("statistics updated twice",)),
        ("shifted", ("other statistics",)),
    ],
)
def test_statistics_are_held_to_what_rounding_changes_in_this_model(way, faults):
    inputs = torch.randn(64, 8)
    plain = Centred("as it is")
    other = copy.deepcopy(plain)
    other.way = way
    examiner = Examiner(trainee(plain, inputs), 0, coarse=False)
    expected = examiner.reference.expected.buffers["norm.running_mean"]
    _, found = examiner.examine(trainee(other, inputs))
    assert found == faults
    assert expected.abs().max() < 1e-6
