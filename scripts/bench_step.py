"""Side by side on this machine, in one run: plain training, checkpointing, and monetlite at the same peak.

    python scripts/bench_step.py [--model resnet50|gpt2 ...] [--repeats 7] [--time-limit 60] [--output FILE.md]

What `monetlite compare` leaves out: the step without budget pressure, and monetlite's programs compiled by Inductor.
For each model: checkpointing of every block, torch.compile with a memory budget for activations, and monetlite within
the peak that each of these reaches, run as it is and compiled. Peaks are those of a whole training step (weights and
inputs included), from allocation events; step times are medians of runs taken in turn, quoted as ratios to plain
training.
"""

import argparse
import functools
from typing import Any

import torch
from bench_compare import gpt2
from table_report import add_output, write_table
from torch import nn

import monetlite
from monetlite.checking.comparison.bench import Bench, Contender, Entrant
from monetlite.checking.comparison.peer_runs import Peer
from monetlite.checking.comparison.peers import by_blocks, inductor
from monetlite.checking.trainee import default_loss
from monetlite.tracing import split_inputs


def resnet50() -> tuple[nn.Module, Any]:
    from monetlite.models import build_model

    built = build_model("resnet50", batch=16, input_size=(160, 160))
    return built.model, built.example_inputs


MODELS = {"resnet50": resnet50, "gpt2": gpt2}


def run(name: str, repeats: int, time_limit: float, shares: list[float]) -> list[str]:
    """Measure one model's contenders and return the rows of its table."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    bench = Bench(model, *split_inputs(inputs), default_loss, "cpu")
    entrants: list[Entrant] = []

    def enter(contender: Contender) -> int:
        """A contender's peak in bytes; 0 if it fails."""
        entrant = bench.enter(contender)
        if entrant.run.failure:
            print(f"{name}, {entrant.run.title}: {entrant.run.failure}", flush=True)
            return 0
        entrants.append(entrant)
        return entrant.run.peak_bytes or 0

    plain_bytes = enter(Contender(peer=Peer.PLAIN))
    others = [*by_blocks(bench.plain, (1,)), *(inductor(bench.plain, shares) if shares else [])]
    peaks = {f"{contender.peer}, {contender.setting}": enter(contender) for contender in others}
    profile = monetlite.profile(monetlite.trace(model, inputs))
    budgets: dict[str, str | int] = {"no pressure": "1000%"}
    budgets |= {f"at the peak of {label}": peak for label, peak in peaks.items() if peak}
    budgets |= {f"at {share}% of plain": plain_bytes * share // 100 for share in (50, 40)}
    wanted = [(label, budget, False) for label, budget in budgets.items()]
    if shares:
        wanted += [(f"{label}, compiled", budget, True) for label, budget in budgets.items()]
    for label, budget, compiled in wanted:
        try:
            schedule = monetlite.solve(
                profile, budget, time_limit=time_limit, implementations="default" if compiled else "all"
            )
        except monetlite.MonetliteError as error:
            print(f"{name}, {label}: {error}", flush=True)
            continue
        wrap = functools.partial(monetlite.MONeTWrapper, schedule=schedule, compile=compiled)
        peak_bytes = enter(Contender(peer=Peer.MONETLITE, setting=label, prepare=wrap))
        print(
            f"{name}, {label}: predicted peak {schedule.peak_bytes / 2**20:.0f} MiB, measured "
            f"{peak_bytes / 2**20:.0f}; predicted overhead {schedule.overhead:+.1%}, gap {schedule.gap:.1%}",
            flush=True,
        )
    runs = [run for run in bench.time(entrants, repeats) if not run.failure]
    plain_ms = runs[0].step_ms
    return [
        f"| {name} | {run.title} | {(run.peak_bytes or 0) / 2**20:.0f} | {run.step_ms:.0f} | "
        f"{run.step_ms / plain_ms:.3f} | {min(run.times_ms) / plain_ms:.2f} to {max(run.times_ms) / plain_ms:.2f} |"
        for run in runs
    ]


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
    add_output(parser)
    args = parser.parse_args()
    write_table(
        "Training steps side by side",
        f"{args.repeats} runs each, taken in turn.",
        "| model | how | peak, MiB | step, ms | of plain | from least to most |",
        (row for name in args.model or MODELS for row in run(name, args.repeats, args.time_limit, args.share)),
        args.output,
        left=2,
    )


if __name__ == "__main__":
    main()
