"""What each implementation for language models is worth: the smallest peak, and step times, with more and more of them.

    python scripts/ablation_language.py [--models llama qwen3 gemma2 t5 long] [--percent 60 50 40] [--device cpu]
        [--batch 4] [--length 256] [--time-limit 10] [--output FILE.md]

The models are those of `bench_language.py`. Each ablation is solved for the smallest peak, and for budgets in percent of
plain training's peak. On the CPU costs are measured, and each schedule's peak is, too, beside the predicted one.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench_language import LONG_WORDS, models
from table_report import add_output, write_table
from torch import nn

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.graph import ALL_OUTPUTS, AS_TRACED, LOSS_ONLY, TILED_LOSS, TILED_ROWS, Implementation
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps

TOLERANCE = 1e-5
CHAIN = "monetlite.row_chain"


def chains(*words: str) -> Callable[[Implementation], bool]:
    """Allow everything, but of row chains only what has no other words in its name."""

    def allowed(item: Implementation) -> bool:
        parts = {part for part in item.name.split("_") if not part.isdigit()}
        return item.call is None or item.call.target != CHAIN or parts <= set(words)

    return allowed


@dataclass(frozen=True)
class Ablation:
    """A layout, the outputs that are held, and the implementations that may run."""

    layout: str
    outputs: str = LOSS_ONLY
    allowed: Callable[[Implementation], bool] = lambda _: True


ABLATIONS = {
    "all outputs held": Ablation(AS_TRACED, ALL_OUTPUTS),
    "the loss alone": Ablation(AS_TRACED),
    "+ loss in tiles": Ablation(TILED_LOSS),
    "+ row chains, whole": Ablation(TILED_ROWS, allowed=chains("inplace")),
    "+ row chains, products kept": Ablation(TILED_ROWS, allowed=chains("inplace", "products")),
    "+ row chains in tiles": Ablation(TILED_ROWS),
}


def rows_of(name: str, model: nn.Module, args: argparse.Namespace) -> Iterator[str]:
    """The rows of the table for a model."""
    ids = torch.randint(3, LONG_WORDS if name == "long" else 30000, (args.batch, args.length))
    inputs = {"input_ids": ids, "labels": ids}
    traced_for = {} if args.device == "cpu" else {"device": args.device}
    plain_bytes = 0
    for title, ablation in ABLATIONS.items():
        graph = monetlite.trace(model, inputs, layout=ablation.layout, outputs=ablation.outputs, **traced_for)
        profile = monetlite.profile(graph, args.device, tolerance=TOLERANCE).restricted(ablation.allowed)
        plain_bytes = plain_bytes or simulate(profile, plain_steps(profile.graph)).peak_bytes
        cells = [f"{smallest(profile, args) / 1e6:.1f} MB"]
        for percent in args.percent:
            try:
                found = monetlite.solve(
                    profile, plain_bytes * percent // 100, tolerance=TOLERANCE, time_limit=args.time_limit
                )
            except InfeasibleBudget:
                cells.append("nothing fits")
                continue
            cells.append(
                f"{found.overhead:+.1%}" + (measured(model, found, inputs) if args.device == "cpu" else "")
            )
        yield f"| {name} | {title} | {len(graph.operators)} | " + " | ".join(cells) + " |"


def smallest(profile: Any, args: argparse.Namespace) -> int:
    """The smallest peak that the search finds."""
    try:
        return monetlite.solve(profile, 1, tolerance=TOLERANCE, time_limit=args.time_limit).peak_bytes
    except InfeasibleBudget as error:
        return error.reached_bytes or error.proven_bytes


def measured(model: nn.Module, schedule: Any, inputs: dict[str, torch.Tensor]) -> str:
    """The measured peak of a schedule against the predicted one."""
    trainee = Trainee(monetlite.MONeTWrapper(copy.deepcopy(model), schedule), (), inputs, default_loss, "cpu")
    return f", peak {trainee.memory().peak_bytes / schedule.peak_bytes - 1:+.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = models()
    parser.add_argument("--models", nargs="+", choices=made, default=["llama", "qwen3", "gemma2", "t5"])
    parser.add_argument("--percent", type=int, nargs="+", default=[60, 50, 40])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--time-limit", type=float, default=10)
    add_output(parser)
    args = parser.parse_args()

    def rows() -> Iterator[str]:
        for name in args.models:
            torch.manual_seed(0)
            yield from rows_of(name, made[name]().train(), args)

    write_table(
        "Implementations for language models, one by one",
        f"Costs of {args.device}; {args.batch} x {args.length} tokens; {args.time_limit:g} s to solve; tolerance "
        f"{TOLERANCE:g}. Step times are over plain training's, of the same layout, as predicted; budgets are of the "
        "first row's plain peak.",
        f"| model | implementations | operators | smallest peak | {' | '.join(f'{p}%' for p in args.percent)} |",
        rows(),
        args.output,
        left=2,
    )


if __name__ == "__main__":
    main()
