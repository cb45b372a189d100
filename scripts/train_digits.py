"""Train a ResNet on scikit-learn's handwritten digits, plainly and within 60% of the memory, from one seed.

    python scripts/train_digits.py [--budget 60%] [--epochs 2] [--batch 64] [--size 32] [--plot curves.png]

The 1,797 images of 8×8 pixels ship with scikit-learn (nothing is downloaded) and are enlarged. Both runs see
the same batches; with schedules that only store, recompute and overwrite, their losses are the same numbers.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import monetlite
from monetlite.core.units import format_bytes
from monetlite.models import build_model
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.tracing.step_inputs import resident_bytes

HELD_OUT = 297


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits as (N, 3, size, size) images in [0, 1] and (N,) labels, in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    enlarged = functional.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    return enlarged.expand(-1, 3, -1, -1), torch.tensor(digits.target)[order]


def small_image_resnet(size: int) -> nn.Module:
    """ResNet-18 with ten classes and the stem people use for small images: 3×3, stride 1, no pooling."""
    model: Any = build_model("resnet18", batch=1, input_size=(size, size)).model
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.fc.in_features, 10)
    made: nn.Module = model
    return made


class Run:
    """A model in training, with what it has measured of itself."""

    def __init__(self, name: str, model: nn.Module, rate: float) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        self.losses: list[float] = []
        self.times_ms: list[float] = []
        self.peak_bytes = 0

    def step(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(pixels), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.optimizer.step()
        self.times_ms.append((time.perf_counter() - start) * 1000)
        self.losses.append(loss.item())

    def measure_peak(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        """Peak of a training step on a copy, so that the run itself is not disturbed."""
        other = copy.deepcopy(self.model)

        def step() -> None:
            loss = functional.cross_entropy(other(pixels), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it

        step()
        for parameter in other.parameters():
            parameter.grad = None
        self.peak_bytes = resident_bytes(other, [pixels]).total + peak_growth_bytes(step)

    def accuracy(self, pixels: torch.Tensor, labels: torch.Tensor) -> float:
        self.model.eval()
        with torch.no_grad():
            found = torch.cat([self.model(part).argmax(1) for part in torch.split(pixels, 64)])
        self.model.train()
        return (found == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--plot", type=Path, help="write the two loss curves to this image (needs matplotlib)")
    args = parser.parse_args()

    pixels, labels = images(args.size)
    train_pixels, train_labels = pixels[HELD_OUT:], labels[HELD_OUT:]
    torch.manual_seed(0)
    model = small_image_resnet(args.size)
    example = train_pixels[: args.batch].contiguous()
    schedule = monetlite.optimize(model, example, args.budget, time_limit=args.time_limit)
    print(
        f"schedule: peak {format_bytes(schedule.peak_bytes)} of {format_bytes(schedule.plain_peak_bytes)} plain, "
        f"predicted overhead {schedule.overhead:+.1%}, gap {schedule.gap:.1%}"
    )
    plain = Run("plain", copy.deepcopy(model), args.rate)
    scheduled = Run("monetlite", monetlite.MONeTWrapper(copy.deepcopy(model), schedule), args.rate)
    runs = (plain, scheduled)
    for run in runs:
        run.measure_peak(example, train_labels[: args.batch])
    order = torch.Generator().manual_seed(1)
    for epoch in range(args.epochs):
        for batch in torch.split(torch.randperm(len(train_labels), generator=order), args.batch):
            for run in runs:
                run.step(train_pixels[batch].contiguous(), train_labels[batch])
        print(f"epoch {epoch + 1}: " + ", ".join(f"{run.name} loss {run.losses[-1]:.6f}" for run in runs))

    print(f"\n{'':12}{'accuracy':>10}{'peak':>12}{'step':>12}{'last loss':>12}")
    for run in runs:
        accuracy = run.accuracy(pixels[:HELD_OUT], labels[:HELD_OUT])
        print(
            f"{run.name:12}{accuracy:>10.1%}{format_bytes(run.peak_bytes):>12}"
            f"{statistics.median(run.times_ms):>9.0f} ms{run.losses[-1]:>12.6f}"
        )
    worst = max(abs(mine - theirs) for mine, theirs in zip(scheduled.losses, plain.losses, strict=True))
    print(f"largest difference between the two loss curves over {len(plain.losses)} steps: {worst:.1e}")
    if args.plot:
        plot(runs, args.plot)


def plot(runs: tuple[Run, ...], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        label = f"{run.name}: peak {format_bytes(run.peak_bytes)}"
        axes.plot(run.losses, style, label=label, linewidth=2 if style == "-" else 1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"loss curves in {path}")


if __name__ == "__main__":
    main()
