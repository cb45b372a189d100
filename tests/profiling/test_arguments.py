"""What is made up to measure a call is of the kind that steps have."""

import pytest
import torch
from torch import nn

import monetlite


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(1000, 64, mode=mode), nn.Linear(64, 1)

    def forward(self, words):
        return self.head(self.bags(words))


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return {"loss": nn.functional.unfold(self.conv(x), 3, padding=1).square().mean()}


def test_what_is_measured_is_what_runs():
    """The gradient of `unfold` is copied out of a storage that is nine times as large."""
    model, images = Patches(), torch.randn(8, 3, 64, 64)
    schedule = monetlite.optimize(model, images, "100%", device="cpu", time_limit=1)
    report = monetlite.verify(model, schedule, images, repeats=1)
    assert report.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.001)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_not_empty(mode):
    """The gradient of the largest copies what belongs to bags that have something in them."""
    model, words = Bags(mode), torch.randint(0, 1000, (4096, 8))
    schedule = monetlite.optimize(model, words, "105%", device="cpu", time_limit=1)
    report = monetlite.verify(model, schedule, words, repeats=1)
    assert report.passed, report.reasons
    assert report.peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.02)
