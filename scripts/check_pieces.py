"""Train models that can't be captured whole, and check every promise that is made for them.

    python scripts/check_pieces.py [--model NAME ...] [--percent 90] [--time-limit 3] [--output FILE.md]

Each row is one model beside plain training from the same seeds: largest relative difference of any gradient or
buffer over six steps, whether the generator is left the same, and the measured peak against budget and prediction.
"""

import argparse
import copy
import datetime
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo import graph_break
from torch.nn import functional as F

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import MonetliteError
from monetlite.profiling.meters import meter_for

WIDTH, STEPS = 64, 6


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
        print(f"mean {float(x.mean()):.3f}", end="\r")
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
        kinds, back = tokens.unique(return_inverse=True)
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


def check(name: str, percent: float, time_limit: float) -> list[str]:
    """One row of the table."""
    build, example = MODELS[name]
    torch.manual_seed(0)
    model, args = build().train(), example()
    plain, measured = copy.deepcopy(model), copy.deepcopy(model)
    plain_bytes = Trainee(measured, args, {}, default_loss, "cpu").memory().peak_bytes
    budget_bytes = int(percent / 100 * plain_bytes)
    wrapper = monetlite.MONeTWrapper(model, budget=budget_bytes, time_limit=time_limit, wait=True)
    expected, ours = (Trainee(item, args, {}, default_loss, "cpu") for item in (plain, wrapper))
    difference, same_draws = 0.0, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(STEPS):
            one, other = expected.snapshot(seed), ours.snapshot(seed)
            difference = max(difference, _difference(one.gradients, other.gradients))
            difference = max(difference, _difference(one.buffers, other.buffers))
            same_draws &= torch.equal(one.random_state, other.random_state)
    for _ in range(2):  # a step that is being recorded ends
        ours.step()
    peak_bytes, schedule = ours.memory().peak_bytes, wrapper.schedule
    if schedule is None:
        return [name, "not planned", f"{difference:.0e}", *[""] * 4]
    off = schedule.peak_bytes / peak_bytes - 1
    kept = "yes" if peak_bytes <= budget_bytes else "NO"
    sizes = [f"{size / 2**10:.0f}" for size in (plain_bytes, budget_bytes, peak_bytes)]
    return [name, f"{difference:.0e}", "yes" if same_draws else "NO", *sizes, kept, f"{off:+.1%}"]


def _difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys(), set(one) ^ set(other)
    return max(
        (float((one[name] - other[name]).abs().max() / (one[name].abs().max() + 1e-30)) for name in one),
        default=0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--percent", type=float, default=97.0, help="budget, of plain training's peak")
    parser.add_argument("--time-limit", type=float, default=3.0)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    environment = meter_for("cpu").environment()
    lines = [
        f"# Models in pieces, {datetime.date.today()}",
        "",
        f"{environment['device']}, {environment['threads']} threads, torch {torch.__version__}, commit "
        f"{commit.stdout.strip()}. Written by `scripts/check_pieces.py`; {STEPS} steps each, budget "
        f"{options.percent:g}% of plain training's peak.",
        "",
        "| model | largest difference | same random numbers | plain, KiB | budget | measured | kept | predicted |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    print("\n".join(lines), flush=True)
    for name in options.model:
        try:
            row = check(name, options.percent, options.time_limit)
        except (MonetliteError, RuntimeError, AssertionError) as error:
            row = [name, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}", *[""] * 6]
        lines.append(f"| {' | '.join(row)} |")
        print(lines[-1], flush=True)
        torch._dynamo.reset()
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
