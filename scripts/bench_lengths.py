"""Training on lengths that vary, side by side: plain, checkpointing, and monetlite, all waiting included.

    python scripts/bench_lengths.py [--model llama|gpt2|lstm] [--steps 30] [--lengths uniform|log-normal]
        [--budget 80%] [--one-schedule] [--peaks 20] [--output FILE.md]

Each contender takes the same batches from the same seeds, each batch of one length. Its seconds are added up over the
whole run, first steps included. `--one-schedule` has monetlite run a schedule that was solved for the
longest length beforehand, too; its solving is not counted. At the end, the memory of some of the steps is measured.
"""

import argparse
import copy
import datetime
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import monetlite
from monetlite.checking.comparison.bench import environment
from monetlite.core.units import format_bytes, parse_budget
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.runtime.in_place import training_of
from monetlite.runtime.serving import own_bytes

SHORTEST, LONGEST = 32, 512


def llama() -> tuple[nn.Module, int, int]:
    """The model of 4 layers, 128 wide; its words, and the size of its batches."""
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        vocab_size=1000,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).train(), 1000, 8


def gpt2() -> tuple[nn.Module, int, int]:
    """6 layers, 384 wide."""
    config = transformers.GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=5000, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).train(), 5000, 2


class Tagger(nn.Module):
    """An LSTM between an embedding and a head: a model in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(1000, 128), nn.LSTM(128, 256, batch_first=True)
        self.head = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1000))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, _ = self.lstm(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def lstm() -> tuple[nn.Module, int, int]:
    """One layer, 256 wide."""
    return Tagger().train(), 1000, 8


MODELS = {"llama": llama, "gpt2": gpt2, "lstm": lstm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lengths", choices=["uniform", "log-normal"], default="uniform")
    parser.add_argument("--budget", default="80%")
    parser.add_argument("--time-limit", type=float, default=20)
    parser.add_argument("--one-schedule", action="store_true")
    parser.add_argument("--peaks", type=int, default=20, help="steps whose memory is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("monetlite").setLevel(logging.INFO)
    torch.manual_seed(args.seed)
    model, words, batch = MODELS[args.model]()
    generator = torch.Generator().manual_seed(args.seed)
    lengths = drawn(args.lengths, args.steps, generator)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, words, (batch, length), generator=generator)

    models: dict[str, Any] = {"plain": model}
    if hasattr(model, "gradient_checkpointing_enable"):
        models["checkpointing"] = copy.deepcopy(model)
        models["checkpointing"].gradient_checkpointing_enable({"use_reentrant": False})
    models["monetlite"] = copy.deepcopy(model)
    longest = tokens(max(lengths))
    budget_bytes = parse_budget(args.budget, measured_peaks(copy.deepcopy(model), [longest])[0])
    monetlite.within(models["monetlite"], budget=budget_bytes, time_limit=args.time_limit)
    if args.one_schedule:
        schedule = monetlite.optimize(
            model, {"input_ids": longest, "labels": longest}, budget_bytes, time_limit=args.time_limit
        )
        models["one schedule"] = monetlite.MONeTWrapper(copy.deepcopy(model), schedule)
    batches = [tokens(length) for length in lengths]
    seconds: dict[str, list[float]] = {}
    worst, programs, expected = 0.0, 0, {}
    for name, of in models.items():
        seconds[name] = []
        for number, given in enumerate(batches):
            torch.manual_seed(number)
            seconds[name].append(timed(partial(step, of, given)))
            if name == "plain" and number in compared(args.steps):
                expected[number] = [parameter.grad.clone() for parameter in of.parameters()]
            if name == "monetlite":
                programs = max(programs, *count_programs(of))
                worst = max(worst, difference(of, expected.get(number)))
        print(f"{name}: {sum(seconds[name]):.1f} s", flush=True)
    totals = {name: sum(items) for name, items in seconds.items()}
    peaks = {
        name: measured_peaks(of, [tokens(length) for length in lengths[: args.peaks]])
        for name, of in models.items()
    }
    where = "; ".join(f"{name} {value}" for name, value in environment("cpu").items())
    lines = [
        f"# {args.model}, {args.steps} {args.lengths} lengths of {min(lengths)} to {max(lengths)}, batches of {batch}",
        "",
        f"{datetime.date.today()}; {where}. Budget {args.budget} of plain training's peak at the longest; "
        f"{len(set(lengths))} different lengths{f', {programs} programs at most' if programs else ''}, largest difference of a gradient from plain training's {worst:.0e}.",
        "",
        "| | whole run, s | of plain | beyond plain, s | median step, of plain | largest peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, total in totals.items():
        ratios = sorted(one / plain for one, plain in zip(seconds[name], seconds["plain"], strict=True))
        lines.append(
            f"| {name} | {total:.1f} | {total / totals['plain']:.2f} | {total - totals['plain']:+.1f} "
            f"| {ratios[len(ratios) // 2]:.2f} | {format_bytes(max(peaks[name]))} |"
        )
    over = sum(peak > budget_bytes for peak in peaks["monetlite"])
    lines += [
        "",
        f"Of {args.peaks} steps, {over} took more than monetlite's budget of {format_bytes(budget_bytes)}.",
    ]
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


def drawn(kind: str, count: int, generator: torch.Generator) -> list[int]:
    """Lengths, each drawn by itself."""
    if kind == "uniform":
        return torch.randint(SHORTEST, 257, (count,), generator=generator).tolist()
    wanted = torch.exp(torch.randn(count, generator=generator) * 0.6 + torch.tensor(128.0).log())
    return wanted.round().clamp(SHORTEST, LONGEST).int().tolist()


def step(model: Any, given: torch.Tensor) -> None:
    model.zero_grad()
    model(input_ids=given, labels=given)["loss"].backward()


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def compared(steps: int) -> range:
    """Steps whose gradients are compared, ten or so."""
    return range(0, steps, max(1, steps // 10))


def difference(model: Any, expected: list[torch.Tensor] | None) -> float:
    """The largest difference of a gradient from an expected one, of the largest of its tensor."""
    return max(
        (
            float((one.grad - other).abs().max() / other.abs().max().clamp(min=1e-30))
            for one, other in zip(model.parameters(), expected or (), strict=False)
        ),
        default=0.0,
    )


def count_programs(model: Any) -> list[int]:
    """Programs for each captured step, of a model within a budget."""
    return [len(step.versions) for step in training_of(model).plans.varying.steps] or [0]


def measured_peaks(model: Any, batches: list[torch.Tensor]) -> list[int]:
    """The peaks of steps, weights and inputs included."""
    resident_bytes = own_bytes([*model.parameters(), *model.buffers()])
    return [peak_growth_bytes(partial(step, model, given)) + resident_bytes + given.nbytes for given in batches]


if __name__ == "__main__":
    main()
