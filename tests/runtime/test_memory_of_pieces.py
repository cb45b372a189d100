"""Memory between pieces is counted as long as it is there: predicted peaks of steps are those that are measured."""

import copy
import gc
import itertools

import pytest
import torch
from models_in_pieces import QUICK
from thoroughness import often
from torch import nn
from torch._dynamo import graph_break

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import InfeasibleBudget
from monetlite.runtime import step_record


class ReadsCodes(nn.Module):
    """An encoder whose codes have no gradient, so that its activations go before the decoder runs."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())))
        self.embed, self.decoder = (
            nn.Embedding(64, 64),
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)),
        )

    def forward(self, x):
        codes = self.encoder(x)
        graph_break()
        return self.decoder(self.embed(codes.argmax(-1))).square().mean()


@torch.compiler.disable
def shifted(x):
    return x + 1.0


class SharesAHead(nn.Module):
    """A head that reads several copies, made between the pieces."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x):
        features, loss = self.body(x), 0.0
        for _ in range(4):
            features = self.head(shifted(features)).tanh()
            loss = loss + features.square().mean()
        return loss


class AddsPieces(nn.Module):
    """Sums of tensors of two pieces, whose gradients autograd hands on as they are.

    At each break the caller's frame holds the tensors until the forward pass ends; plain training does not.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            graph_break()
            x = x + y
            graph_break()
        return x.square().mean()


def train(model, x):
    for _ in range(12):
        default_loss(model(x)).backward()
        model.zero_grad()
        x.grad = None


def plain_bytes(model, x):
    return Trainee(copy.deepcopy(model), (x,), {}, default_loss, "cpu").memory().peak_bytes


@pytest.mark.parametrize(
    ("build", "shape", "part"),
    often(
        [(ReadsCodes, (256, 64), 1.0), (SharesAHead, (64, 32), 1.0), (AddsPieces, (256, 64), 1.3)],
        *[(ReadsCodes, (256, 64), 1.0), (SharesAHead, (64, 32), 1.0)],
    ),
)
def test_a_model_in_pieces_keeps_to_a_budget_near_plain_training_s_peak_and_takes_what_is_predicted(
    build, shape, part
):
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    budget_bytes = int(part * plain_bytes(model, x))
    wrapper = monetlite.MONeTWrapper(model, budget=budget_bytes, **QUICK)
    train(wrapper, x)
    measured_bytes = Trainee(wrapper, (x,), {}, default_loss, "cpu").memory().peak_bytes
    assert wrapper.schedule.peak_bytes == pytest.approx(measured_bytes, rel=0.01)
    assert measured_bytes <= budget_bytes


class RunsAPartAgain(nn.Module):
    """Layers before the first piece that run again in the backward pass, as `torch.utils.checkpoint`'s do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
        self.head = nn.Linear(64, 64)

    @torch.compiler.disable
    def first(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    def forward(self, x):
        return self.head(self.first(x)).square().mean()


def test_the_backward_part_of_the_first_code_counts():
    torch.manual_seed(0)
    model, x = RunsAPartAgain(), torch.randn(512, 64, requires_grad=True)
    budget_bytes = plain_bytes(model, x)
    wrapper = monetlite.MONeTWrapper(model, budget=budget_bytes, **QUICK)
    train(wrapper, x)
    measured_bytes = Trainee(wrapper, (x,), {}, default_loss, "cpu").memory().peak_bytes
    assert wrapper.schedule.peak_bytes == pytest.approx(measured_bytes, rel=0.01)
    small = monetlite.MONeTWrapper(copy.deepcopy(model), budget=int(0.8 * budget_bytes), **QUICK)
    with pytest.raises(InfeasibleBudget, match="outside 0, backward"):
        train(small, x)


@torch.compiler.disable
def left_behind(x):
    """Held until Python's garbage collector runs, as the frames that a capture leaves behind."""
    ring = [x]
    ring.append(ring)


class LeavesBehind(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            left_behind(y)
            x = x + y
        return x.square().mean()


@pytest.mark.thorough
def test_what_a_capture_leaves_behind_in_the_recorded_step_is_not_counted(monkeypatch):
    peaks = []
    for captures in (False, True):
        if captures:
            monkeypatch.setattr(step_record, "seconds_captured", map(float, itertools.count()).__next__)
        model, x = LeavesBehind(), torch.randn(512, 64)
        gc.collect()
        gc.disable()
        try:
            model = monetlite.within(model, budget="100%", **QUICK)
            for _ in range(3):
                model(x).backward()
        finally:
            gc.enable()
        peaks.append(monetlite.schedule_of(model).plain_peak_bytes)
    assert peaks[1] < peaks[0]
