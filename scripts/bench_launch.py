"""What running a schedule adds to each operator: steps of models so small that launching is most of their time.

    python scripts/bench_launch.py [--model gpt2|linears|resnet50 ...] [--device cpu|cuda] [--repeats 60]
                                   [--output FILE.md]

Plain training, monetlite without budget pressure (every operator by its default implementation, in the captured
order), and the same capture run by PyTorch's own `aot_eager` backend. One thread on a CPU. Steps are taken in turn;
medians, and their ratios to plain training's.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from table_report import add_output, write_table
from torch import nn

import monetlite
from monetlite.tracing import split_inputs

WARM_UP = 10


class Small(NamedTuple):
    """A small model, its inputs by name, and what its parts are."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]
    text: str


def gpt2() -> Small:
    import transformers

    config = transformers.GPT2Config(n_layer=12, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(0, 64, (1, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    return Small(transformers.GPT2LMHeadModel(config), inputs, lambda output: output.loss, "12 layers of 32, 1×16")


def linears() -> Small:
    layers = [layer for _ in range(50) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return Small(nn.Sequential(*layers), {"input": torch.randn(2, 8)}, torch.sum, "50 × (Linear(8, 8), ReLU), 2×8")


def resnet50() -> Small:
    from monetlite.models import build_model

    built = build_model("resnet50", batch=2, input_size=(32, 32))
    (images,), _ = split_inputs(built.example_inputs)
    return Small(built.model, {"x": images}, torch.sum, "2×3×32²")


MODELS = {"gpt2": gpt2, "linears": linears, "resnet50": resnet50}


def step(model: nn.Module, small: Small, synchronize: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of a forward and a backward pass."""
    started = time.perf_counter()
    loss = small.loss(model(**small.inputs))
    synchronize()
    middle = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    synchronize()
    ended = time.perf_counter()
    model.zero_grad()
    return (middle - started) * 1e3, (ended - middle) * 1e3


def run(name: str, device: str, repeats: int) -> Iterator[str]:
    """The rows of a model's table."""
    torch.manual_seed(0)
    small = MODELS[name]()
    small = small._replace(
        model=small.model.to(device), inputs={key: item.to(device) for key, item in small.inputs.items()}
    )
    profile = monetlite.profile(monetlite.trace(small.model, small.inputs))
    schedule = monetlite.solve(profile, "1000%", implementations="default", time_limit=10)
    models: dict[str, Any] = {
        "plain": small.model,
        "monetlite, no pressure": monetlite.MONeTWrapper(copy.deepcopy(small.model), schedule),
        "aot_eager": torch.compile(copy.deepcopy(small.model), backend="aot_eager"),
    }
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[tuple[float, float]]] = {how: [] for how in models}
    for at in range(WARM_UP + repeats):
        for how, model in models.items():
            measured = step(model, small, synchronize)
            if at >= WARM_UP:
                times[how].append(measured)
    plain_ms = statistics.median(map(sum, times["plain"]))
    for how, taken in times.items():
        forward_ms, backward_ms = (statistics.median(part) for part in zip(*taken, strict=True))
        step_ms = statistics.median(map(sum, taken))
        yield (
            f"| {name} ({small.text}) | {how} | {forward_ms:.2f} | {backward_ms:.2f} | {step_ms:.2f} | "
            f"{step_ms / plain_ms:.2f} |"
        )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="by default all of them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=60)
    add_output(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_table(
        "Launching",
        f"Medians of {args.repeats} steps each, taken in turn.",
        "| model | how | forward, ms | backward, ms | step, ms | of plain |",
        (row for name in args.model or MODELS for row in run(name, args.device, args.repeats)),
        args.output,
        left=2,
        device=args.device,
    )


if __name__ == "__main__":
    main()
