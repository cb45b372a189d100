"""Side by side on this machine, in one run: plain training, checkpointing, and monetlite at the same peak.

    python scripts/bench_step.py [--model resnet50|gpt2 ...] [--repeats 7] [--time-limit 60] [--output FILE.md]

For each model: the wrapped step without budget pressure, what people use today (`torch.utils.checkpoint` on
every block, transformers' gradient checkpointing, torch.compile with a memory budget for activations), and
monetlite within the peak that each of these reaches, also with its programs compiled by Inductor. Peaks are those of a whole training step (weights and inputs
included), from allocation events; step times are medians of runs taken in turn, quoted as ratios to plain training.
"""

import argparse
import copy
import datetime
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monetlite
from monetlite.profiling.meters import meter_for
from monetlite.runtime.verify import Trainee, default_loss, step_times_ms
from monetlite.tracing import split_inputs


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


def _compiled(model: nn.Module, share: float) -> nn.Module:
    """A model compiled by torch within a share of the memory for activations that it takes by itself.

    Each has a backend of its own: Dynamo hands one program to models of one class with one backend, whatever the
    settings were that it was compiled with.
    """
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compile_fx(graph, inputs)

    compiled: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]  # a module is returned for a module
    return compiled


MODELS = {"resnet50": resnet50, "gpt2": gpt2}
CHECKPOINT = {
    "resnet50": "torch.utils.checkpoint, every block",
    "gpt2": "gradient_checkpointing_enable()",
}


def run(name: str, repeats: int, time_limit: float, shares: list[float]) -> list[str]:
    """Measure one model's contenders and return the rows of its table."""
    torch.manual_seed(0)
    model, inputs, checkpoint_model = MODELS[name]()
    args, kwargs = split_inputs(inputs)

    def contender(trained: nn.Module) -> Trainee:
        trainee = Trainee(trained, args, kwargs, default_loss, "cpu")
        trainee.step()
        return trainee

    contenders = {"plain": contender(copy.deepcopy(model))}
    checkpointed = copy.deepcopy(model)
    checkpoint_model(checkpointed)
    contenders[CHECKPOINT[name]] = contender(checkpointed)
    contenders |= {
        f"torch.compile, budget {share:g}": contender(_compiled(copy.deepcopy(model), share)) for share in shares
    }
    peaks = {label: trainee.peak_bytes() for label, trainee in contenders.items()}
    profile = monetlite.profile(monetlite.trace(model, inputs))
    budgets: dict[str, str | int] = {"monetlite, no pressure": "1000%"}
    budgets |= {f"monetlite at the peak of {label}": peak for label, peak in peaks.items() if label != "plain"}
    budgets |= {f"monetlite at {share}% of plain": peaks["plain"] * share // 100 for share in (50, 40)}
    wanted = [(label, budget, False) for label, budget in budgets.items()]
    if shares:
        wanted += [(f"{label}, compiled", budget, True) for label, budget in budgets.items()]
    for label, budget, compile in wanted:
        try:
            schedule = monetlite.solve(
                profile, budget, time_limit=time_limit, implementations="default" if compile else "all"
            )
        except monetlite.MonetliteError as error:
            print(f"{name}, {label}: {error}", flush=True)
            continue
        contenders[label] = contender(monetlite.MONeTWrapper(copy.deepcopy(model), schedule, compile=compile))
        peaks[label] = contenders[label].peak_bytes()
        print(
            f"{name}, {label}: predicted peak {schedule.peak_bytes / 2**20:.0f} MiB, measured "
            f"{peaks[label] / 2**20:.0f}; predicted overhead {schedule.overhead:+.1%}, gap {schedule.gap:.1%}",
            flush=True,
        )
    times = dict(zip(contenders, step_times_ms(list(contenders.values()), repeats), strict=True))
    plain_ms = statistics.median(times["plain"])
    rows = []
    for label, taken in times.items():
        median_ms = statistics.median(taken)
        rows.append(
            f"| {name} | {label} | {peaks[label] / 2**20:.0f} | {median_ms:.0f} | {median_ms / plain_ms:.3f} | "
            f"{min(taken) / plain_ms:.2f} to {max(taken) / plain_ms:.2f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="by default all of them")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument(
        "--share",
        type=float,
        nargs="*",
        default=[1.0, 0.5, 0.1],
        help="budgets of torch.compile; none to leave out all that is compiled",
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    rows = [row for name in args.model or MODELS for row in run(name, args.repeats, args.time_limit, args.share)]
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
            "| model | how | peak, MiB | step, ms | of plain | from least to most |",
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
