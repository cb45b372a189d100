"""What each kind of implementation is worth: the same models at the same budgets, with more and more of them.

    python scripts/ablation.py [--model NAME ...] [--percent 60 50 40] [--time-limit 20] [--repeats 7]
        [--output FILE.md]

For each model and budget (in percent of plain training's peak) the program is solved with storage and
recomputation alone, then with one kind of implementation more at a time, then with all, and each schedule is run:
step time beside plain training's, predicted and measured, the steps taken in turn; and measured peak. A second
table has the smallest peak that is reached with each kind.
"""

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import monetlite
from monetlite.checking.trainee import Trainee, default_loss, step_times_ms
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.graph import CHANNELS_LAST, Implementation
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.models import build_model
from monetlite.planning.layouts import layouts_to_try, solve_layouts
from monetlite.profiling.meters import meter_for
from monetlite.tracing import split_inputs

TOLERANCE = 4e-3


def vision(name: str, batch: int, size: int) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        built = build_model(name, batch=batch, input_size=(size, size))
        return built.model, built.example_inputs

    return build


def gpt2() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=10000, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, 10000, (4, 256))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet50": vision("resnet50", 16, 160),
    "mobilenet_v2": vision("mobilenet_v2", 16, 160),
    "unet": vision("unet", 1, 384),
    "gpt2": gpt2,
}


def convolutions(item: Implementation) -> bool:
    return (
        not item.overwrites
        and item.call is not None
        and ("convol" in item.call.target or "weight_grad" in item.call.target or "input_grad" in item.call.target)
    )


def in_place(item: Implementation) -> bool:
    return bool(item.overwrites) and not from_output(item) and not packed(item)


def from_output(item: Implementation) -> bool:
    """From the output where the default takes the input, or the other way about."""
    return any(word in item.name for word in ("from_output", "from_input"))


def packed(item: Implementation) -> bool:
    """From something small: bits, bytes, bfloat16, the generator's state, indices alone; or rows at a time."""
    return any(word in item.name for word in ("mask", "offsets", "bfloat16", "state", "indices", "by_rows"))


def nothing(item: Implementation) -> bool:
    return False


def everything(item: Implementation) -> bool:
    return True


KINDS: dict[str, Callable[[Implementation], bool]] = {
    "storage + recompute": nothing,
    "+ convolutions": convolutions,
    "+ in place": in_place,
    "+ from output or input": from_output,
    "+ packed": packed,
    "all, layout as traced": everything,
    "all": everything,
}


@dataclass
class Row:
    model: str
    percent: int
    kind: str
    budget_bytes: int
    layout: str = ""
    predicted_overhead: float = float("nan")
    measured_overhead: float = float("nan")
    latency_error: float = float("nan")
    predicted_bytes: int = 0
    measured_bytes: int = 0
    difference: float = float("nan")
    infeasible: str = ""


def candidates(profiles: list[Profile], kind: str) -> list[Profile]:
    """The profiles that a kind of implementation may choose from: the other layout belongs to convolutions."""
    allowed = KINDS[kind]
    kept = profiles if kind in ("+ convolutions", "all") else profiles[:1]
    return [item.restricted(allowed) for item in kept]


def measure(name: str, percents: list[int], time_limit: float, repeats: int) -> tuple[list[Row], list[str]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    layouts = layouts_to_try(None, TOLERANCE)
    profiles = [monetlite.profile(monetlite.trace(model, inputs, layout=layout), "cpu") for layout in layouts]
    plain = simulate(profiles[0], plain_steps(profiles[0].graph))
    rows: list[Row] = []
    smallest: dict[str, int] = {}
    for kind in KINDS:
        reached = []
        for item in candidates(profiles, kind):
            try:
                monetlite.solve(item, 1, tolerance=TOLERANCE, time_limit=time_limit / 2)
            except InfeasibleBudget as error:
                reached.append(error.reached_bytes or plain.peak_bytes)
        # What storage and recomputation alone reach, every kind reaches; and "all", what any kind reaches.
        smallest[kind] = min([*reached, *(smallest.values() if kind == "all" else list(smallest.values())[:1])])
    for percent in percents:
        budget = plain.peak_bytes * percent // 100
        schedules: dict[str, Schedule] = {}
        for kind in KINDS:
            row = Row(name, percent, kind, budget)
            rows.append(row)
            try:
                schedules[kind] = solve_layouts(
                    candidates(profiles, kind), budget, SolvingOptions(tolerance=TOLERANCE, time_limit=time_limit)
                )
            except InfeasibleBudget as error:
                row.infeasible = f"{(error.reached_bytes or 0) / 2**20:.0f}"
        run(model, inputs, schedules, rows, repeats)
        for row in rows:
            if row.percent == percent:
                print(describe(row), flush=True)
    line = [name, f"{plain.peak_bytes / 2**20:.0f}", *(f"{smallest[kind] / 2**20:.0f}" for kind in KINDS)]
    print(line, flush=True)
    return rows, line


def run(model: nn.Module, inputs: Any, schedules: dict[str, Schedule], rows: list[Row], repeats: int) -> None:
    """Run plain training and every schedule in turn, and fill in what was measured."""
    args, kwargs = split_inputs(inputs)
    import copy

    plain = Trainee(copy.deepcopy(model), args, kwargs, default_loss, "cpu")
    plain.step()
    trainees = {
        kind: Trainee(monetlite.MONeTWrapper(copy.deepcopy(model), schedule), args, kwargs, default_loss, "cpu")
        for kind, schedule in schedules.items()
    }
    reports = {kind: monetlite.verify(model, schedule, inputs, repeats=1) for kind, schedule in schedules.items()}
    plain_ms, *scheduled_ms = map(statistics.median, step_times_ms([plain, *trainees.values()], repeats))
    times = dict(zip(trainees, scheduled_ms, strict=True))
    for row in rows:
        if row.kind in schedules and row.budget_bytes == next(iter(schedules.values())).budget_bytes:
            schedule, report = schedules[row.kind], reports[row.kind]
            step_ms = times[row.kind]
            row.layout = schedule.layout
            row.predicted_overhead = schedule.overhead
            row.measured_overhead = step_ms / plain_ms - 1
            # Of ratios to plain training: the machine as a whole may be faster or slower than when it was profiled.
            row.latency_error = (1 + schedule.overhead) / (step_ms / plain_ms) - 1
            row.predicted_bytes, row.measured_bytes = schedule.peak_bytes, report.peak_bytes
            row.difference = report.largest_difference


def describe(row: Row) -> str:
    head = f"| {row.model} | {row.percent}% | {row.kind} "
    if row.infeasible:
        return head + f"| | infeasible: {row.infeasible} MiB reached, of {row.budget_bytes / 2**20:.0f} | | | | | |"
    return (
        head + f"| {'channels-last' if row.layout == CHANNELS_LAST else 'as traced'} "
        f"| {row.predicted_overhead:+.1%} | {row.measured_overhead:+.1%} | {row.latency_error:+.1%} "
        f"| {row.measured_bytes / 2**20:.1f} | {row.measured_bytes / row.predicted_bytes - 1:+.2%} "
        f"| {row.difference:.0e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--percent", type=int, nargs="+", default=[60, 50, 40])
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    smallest: list[list[str]] = []
    for name in args.model or MODELS:
        found, line = measure(name, args.percent, args.time_limit, args.repeats)
        rows += found
        smallest.append(line)
    environment = meter_for("cpu").environment()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    text = "\n".join(
        [
            f"# What each kind of implementation is worth, {datetime.date.today()}",
            "",
            f"{environment['device']}, {environment['threads']} threads, torch {environment['torch']}, commit {commit}. "
            f"Written by `scripts/ablation.py`: {args.time_limit:.0f} s to solve; step times are medians of "
            f"{args.repeats}, all ways taken in turn (`monetlite.checking.trainee.step_times_ms`); budgets are percentages of plain training's peak; tolerance "
            f"{TOLERANCE}. Overheads are over plain training's step time; the prediction's error is of the ratio "
            "to plain training; differences are of gradients and buffers, relative (`monetlite.verify`).",
            "",
            "| model | budget | implementations | layout | overhead, predicted | measured | prediction's error "
            "| peak, MiB | against prediction | difference |",
            "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *map(describe, rows),
            "",
            "## The smallest peak reached, MiB",
            "",
            "| model | plain | " + " | ".join(KINDS) + " |",
            "| --- |" + " ---: |" * (1 + len(KINDS)),
            *("| " + " | ".join(line) + " |" for line in smallest),
            "",
        ]
    )
    if args.output:
        args.output.write_text(text)
        args.output.with_suffix(".json").write_text(json.dumps([row.__dict__ for row in rows], indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
