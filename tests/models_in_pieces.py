"""Models that TorchDynamo takes apart, for tests of their training in pieces."""

import torch
from torch import nn
from torch._dynamo import graph_break

from monetlite.runtime.pieces import PiecewiseTraining

QUICK = {"device": "rtx-3090", "time_limit": 0.3}


def mlp(width=16):
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, width))


class ReadsAMean(nn.Module):
    """A number in the middle, and a skip across it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x):
        x = self.first(x) + x
        return self.second(x * (2.0 if x.mean().item() > 1e9 else 0.5)) + x


class DropsLayers(nn.Module):
    """As many pieces as a random number says, in a loop that can't be captured."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), mlp()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            if torch.rand([]).item() >= 0.4:
                x = x + layer(x)
        return self.head(x)


class Recurrent(nn.Module):
    """An LSTM with dropout, by PyTorch's own kernels, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 16), mlp()
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden)


class ChangesInPlace(nn.Module):
    """A tensor that is changed in place between two breaks, and returned; a counter; a batch norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        hidden = self.norm(self.first(x))
        self.seen += 1
        graph_break()
        hidden.mul_(2).relu_()
        graph_break()
        return self.second(hidden), hidden


def trained(model, x):
    for _ in range(3):
        output = model(x)
        sum(item.sum() for item in (output if isinstance(output, tuple) else (output,))).backward()


def note_unplanned(monkeypatch):
    """A list that gets, for each step in pieces, the number of its runs that no plan has."""
    found, ends = [], PiecewiseTraining.forward_ends

    def noted(self):
        ends(self)
        found.append(self._step.unplanned_runs)

    monkeypatch.setattr(PiecewiseTraining, "forward_ends", noted)
    return found
