"""Models that can't be captured whole, which `check_architectures.py` trains beside plain training."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo import graph_break
from torch.nn import functional as F

WIDTH = 64


def mlp(out: int = WIDTH, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, out))


class Parts(nn.Module):
    """Two or three perceptrons, for the models below to put together."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(dropout=0.1) for _ in range(parts))


class ReadsAMean(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.parts[0](x) + x
        return self.parts[1](x * (2.0 if x.mean().item() > 1e9 else 0.5)) + x


class InEveryLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadsAMean() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Routes(Parts):
    """A mixture of experts: each row goes to one of them, so their batches depend on the data."""

    def __init__(self) -> None:
        super().__init__(3)
        self.before, self.gate = mlp(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.before(x)
        weights = self.gate(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for number, part in enumerate(self.parts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, part(x[rows]) * weights[rows, number : number + 1])
        return out + x


class Prints(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.parts[0](x)
        print(f"mean {float(x.mean()):.3f}")
        return self.parts[1](x)


class LossInNumpy(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.parts[1](self.parts[0](x))
        ranks = torch.from_numpy(np.argsort(y.detach().numpy()[:, 0]).astype(np.float32))
        return {"loss": (y.square().mean(-1) * ranks).mean(), "y": y}


class LoopsByData(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(int(x.abs().sum().item()) % 3 + 2):
            x = self.parts[0](x) + x
            graph_break()
        return self.parts[1](x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)
        self.head = mlp(50)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden, _ = self.recurrent(self.embed(tokens))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


class GatedRecurrent(Recurrent):
    def __init__(self) -> None:
        super().__init__(nn.GRU)


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = mlp(20)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> Any:
        y = self.part(x).log_softmax(-1)
        frames = torch.full((x.shape[1],), x.shape[0])
        return {"loss": F.ctc_loss(y, targets, frames, torch.full((x.shape[1],), targets.shape[1]))}


class ChangesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, 256), nn.BatchNorm1d(256), nn.Linear(256, WIDTH)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.first(x))
        self.seen += 1
        graph_break()
        hidden.mul_(2).relu_()
        graph_break()
        return self.second(hidden), hidden


class UsesOutputsTwice(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        first = self.parts[0](x)
        graph_break()
        second = self.parts[1](first)
        graph_break()
        return second * first + self.parts[1](first + second)


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            if torch.rand([]).item() >= 0.3:
                x = layer(x)
        return self.head(x)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *block)
        self.second = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        if x.max() > 1e6:
            x = x / 2
        return self.head(self.second(x).mean((2, 3)))


class TiedAcross(nn.Module):
    """A weight that two pieces read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(50, WIDTH), mlp()

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        graph_break()
        x = self.middle(x) + x
        graph_break()
        return x @ self.embed.weight.t()


class Catches(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        x = self.parts[0](x)
        try:
            if x.sum() > 1e9:
                raise ValueError("large")
        except ValueError:
            x = x.clamp(max=1.0)
        return self.parts[1](x)


class SetsRequiresGrad(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        x.requires_grad_(True)
        y = self.parts[0](x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=False, retain_graph=True)
        return self.parts[1](y + slope.detach())


class ChecksFinite(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        for part in self.parts:
            x = part(x) + x
            if not bool(torch.isfinite(x).all()):
                print("not finite")
        return x


class Frozen(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.parts[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.parts[0](x)
        scale = x.std().item()
        return self.parts[1](x / (scale + 1e-6))


class Solves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        system = y.T @ y / len(y) + torch.eye(WIDTH)
        return self.second(torch.linalg.solve(system, y.T).T)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.part = nn.Embedding(50, WIDTH), mlp()

    def forward(self, tokens: torch.Tensor) -> Any:
        kinds, back = tokens.unique(return_inverse=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        return self.part(self.embed(kinds))[back]


def rows() -> tuple[torch.Tensor, ...]:
    return (torch.randn(256, WIDTH),)


def tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (16, 32)),)


MODELS: dict[str, tuple[type[nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "reads a mean": (ReadsAMean, rows),
    "in every layer": (InEveryLayer, rows),
    "routes": (Routes, rows),
    "prints": (Prints, rows),
    "loss in numpy": (LossInNumpy, rows),
    "loops by data": (LoopsByData, rows),
    "lstm": (Recurrent, tokens),
    "gru": (GatedRecurrent, tokens),
    "ctc": (Ctc, lambda: (torch.randn(64, 8, WIDTH), torch.randint(1, 20, (8, 10)))),
    "changes in place": (ChangesInPlace, rows),
    "outputs twice": (UsesOutputsTwice, rows),
    "layerdrop": (LayerDrop, lambda: (torch.randn(8, 32, WIDTH),)),
    "convolutional": (Convolutional, lambda: (torch.randn(8, 3, 32, 32),)),
    "tied across": (TiedAcross, tokens),
    "catches": (Catches, rows),
    "gradient inside": (SetsRequiresGrad, rows),
    "checks finite": (ChecksFinite, rows),
    "frozen": (Frozen, rows),
    "solves": (Solves, rows),
    "unique": (SparseEmbedding, tokens),
}
