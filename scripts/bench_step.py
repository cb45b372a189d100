"""Side by side on this machine, in one run: plain training, checkpointing, and monetlite at the same peak.

    python scripts/bench_step.py [--model resnet50|gpt2 ...] [--repeats 7] [--time-limit 60] [--output FILE.md]

For each model: the wrapped step without budget pressure, what people use today (`torch.utils.checkpoint` on
every block, transformers' gradient checkpointing), and monetlite within the peak that reaches. Peaks are
those of a whole training step (weights and inputs included), from allocation events; step times are medians
of runs taken in turn, quoted as ratios to plain training, with the spread of the paired ratios.
"""

import argparse
import copy
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monetlite
from monetlite.profiling.memory import peak_growth_bytes
from monetlite.profiling.meters import meter_for
from monetlite.runtime.verify import default_loss
from monetlite.tracing.build import resident_bytes


class Contender:
    """A model that takes training steps on fixed inputs."""

    def __init__(self, name: str, model: nn.Module, inputs: Any) -> None:
        self.name, self.model, self.inputs = name, model, inputs
        self.times_ms: list[float] = []
        self.peak_bytes = 0

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        output = self.model(**self.inputs) if isinstance(self.inputs, dict) else self.model(*self.inputs)
        default_loss(output).backward()

    def measure_peak(self) -> None:
        self.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        tensors = self.inputs.values() if isinstance(self.inputs, dict) else self.inputs
        self.peak_bytes = resident_bytes(self.model, tensors).total + peak_growth_bytes(self.step)

    def time(self) -> None:
        start = time.perf_counter()
        self.step()
        self.times_ms.append((time.perf_counter() - start) * 1000)


def resnet50() -> tuple[nn.Module, Any, Callable[[nn.Module], None]]:
    from monetlite.models import build_model

    built = build_model("resnet50", batch=16, input_size=(160, 160))
    return built.model, built.example_inputs, checkpoint_blocks


def checkpoint_blocks(model: nn.Module) -> None:
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for block in getattr(model, stage):
            block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def gpt2() -> tuple[nn.Module, Any, Callable[[nn.Module], None]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary = 10_000
    config = GPT2Config(
        n_layer=6,
        n_embd=384,
        n_head=6,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    tokens = torch.randint(0, vocabulary, (4, 256))
    model = GPT2LMHeadModel(config).train()
    return model, {"input_ids": tokens, "labels": tokens}, lambda model: model.gradient_checkpointing_enable()


MODELS = {"resnet50": resnet50, "gpt2": gpt2}


def run(name: str, repeats: int, time_limit: float) -> list[str]:
    """Measure one model's contenders and return the rows of its table."""
    torch.manual_seed(0)
    model, inputs, checkpoint_model = MODELS[name]()
    plain = Contender("plain", copy.deepcopy(model), inputs)
    checkpointed = Contender("checkpoint every block", copy.deepcopy(model), inputs)
    checkpoint_model(checkpointed.model)
    for contender in (plain, checkpointed):
        contender.measure_peak()
    profile = monetlite.profile(monetlite.trace(model, inputs))
    contenders = [plain, checkpointed]
    for label, budget in (
        ("monetlite, no pressure", "1000%"),
        ("monetlite at that peak", checkpointed.peak_bytes),
        ("monetlite at 50% of plain", plain.peak_bytes // 2),
        ("monetlite at 40% of plain", plain.peak_bytes * 2 // 5),
    ):
        try:
            schedule = monetlite.solve(profile, budget, time_limit=time_limit)
        except monetlite.MonetliteError as error:
            print(f"{name}, {label}: {error}")
            continue
        contender = Contender(label, monetlite.MONeTWrapper(copy.deepcopy(model), schedule), inputs)
        contender.measure_peak()
        print(
            f"{name}, {label}: predicted peak {schedule.peak_bytes / 2**20:.0f} MiB, measured "
            f"{contender.peak_bytes / 2**20:.0f}; predicted overhead {schedule.overhead:+.1%}, gap {schedule.gap:.1%}"
        )
        contenders.append(contender)
    for _ in range(repeats):
        for contender in contenders:
            contender.time()
    rows = []
    for contender in contenders:
        ratios = sorted(mine / theirs for mine, theirs in zip(contender.times_ms, plain.times_ms, strict=True))
        median_ms = statistics.median(contender.times_ms)
        rows.append(
            f"| {name} | {contender.name} | {contender.peak_bytes / 2**20:.0f} | {median_ms:.0f} | "
            f"{median_ms / statistics.median(plain.times_ms):.3f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="by default all of them")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    rows = [row for name in args.model or MODELS for row in run(name, args.repeats, args.time_limit)]
    environment = meter_for("cpu").environment()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    text = "\n".join(
        [
            f"# Training steps side by side, {datetime.date.today()}",
            "",
            f"{environment['device']}, {environment['threads']} threads, torch {environment['torch']}, "
            f"Python {platform.python_version()}, commit {commit or 'unknown'}. Written by `scripts/bench_step.py`; "
            f"{args.repeats} runs each, taken in turn.",
            "",
            "| model | how | peak, MiB | step, ms | of plain | paired ratios |",
            "| --- | --- | ---: | ---: | ---: | --- |",
            *rows,
            "",
        ]
    )
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
