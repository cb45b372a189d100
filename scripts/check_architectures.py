"""Train tiny models of many architectures beside plain training, and check every promise made for them.

    python scripts/check_architectures.py [--model NAME ...] [--percent 80] [--device cpu] [--output FILE.md]

The models are transformers' (language, vision, audio, several modalities) with tiny configurations and random
weights, the convolutional networks that monetlite brings, and models with breaks (`models_with_breaks.py`). Each
trains wholly captured or in pieces, within its budget, or is refused with a reason. Each step has data of its own.
`difference` is the largest of any gradient or buffer in four steps, relative to its largest entry (or to 1e-5 of the
largest of all, if that is more). On a GPU that of plain training from itself follows it, where some kernel adds up in
no fixed order. `step` is the median of five later steps, of plain training's, in turn.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Iterable

import numpy as np
import torch
from table_report import add_output, write_table
from tiny_architectures import BUILDERS

import monetlite
from monetlite.checking.trainee import Trainee, default_loss
from monetlite.core.errors import InfeasibleBudget, MonetliteError
from monetlite.fx.torch_internals import torch_pytree as pytree

STEPS = 4
NEGLIGIBLE = 1e-5
"""Part of the largest gradient, below which another one is noise."""


def check(name: str, percent: float, time_limit: float, device: str) -> list[str]:
    """A model's cells of the table."""
    torch.manual_seed(0)
    model, inputs = BUILDERS[name]()
    model, inputs = (
        model.train().to(device),
        pytree.tree_map_only(torch.Tensor, lambda item: item.to(device), inputs),
    )
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    plain = copy.deepcopy(model)
    plain_bytes = Trainee(copy.deepcopy(model), args, kwargs, default_loss, device).memory().peak_bytes
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while True:
            budget_bytes = int(percent / 100 * plain_bytes)
            wrapper = monetlite.MONeTWrapper(
                copy.deepcopy(model), budget=budget_bytes, time_limit=time_limit, wait=True
            )
            expected, ours = (Trainee(item, args, kwargs, default_loss, device) for item in (plain, wrapper))
            try:
                difference = f"{steps_difference(expected, ours):.0e}"
                break
            except InfeasibleBudget:
                if percent >= 110:
                    raise
                percent, plain = percent + 10, copy.deepcopy(model)
                torch._dynamo.reset()
    seconds = time.monotonic() - began
    if device == "cuda":
        twice = (Trainee(copy.deepcopy(model), args, kwargs, default_loss, device) for _ in range(2))
        if repeated := steps_difference(*twice):
            difference += f", itself {repeated:.0e}"
    for _ in range(8):  # until no step is being recorded, and no plan made
        draw_inputs(ours)
        ours.step()
    step = step_of_plain(expected, ours)
    peak_bytes, schedule = ours.memory().peak_bytes, wrapper.schedule
    said = [str(item.message) for item in told if "can't be captured whole" in str(item.message)]
    how = said[0].partition("in ")[2].partition(";")[0].partition(" of the")[0] if said else "whole"
    if schedule is None:
        return [name, "not planned", difference, "", "", "", "", f"{step:.2f}", f"{seconds:.0f}"]
    kept = "yes" if peak_bytes <= budget_bytes else "NO"
    off = schedule.peak_bytes / peak_bytes - 1
    return [
        name, how, difference, f"{percent:.0f}%", kept, f"{off:+.1%}",
        f"{schedule.overhead:+.1%}", f"{step:.2f}", f"{seconds:.0f}",
    ]  # fmt: skip


def draw_inputs(trainee: Trainee) -> None:
    """Other data of the same sizes: samples take turns, and numbers grow. Both trainees have the same tensors."""
    batch = len(trainee.inputs[0])
    with torch.no_grad():
        for tensor in trainee.inputs:
            if tensor.dim() > 0 and len(tensor) == batch:
                turned = tensor.roll(1, 0)
                tensor.copy_(turned * 1.01 if tensor.is_floating_point() else turned)


def step_of_plain(expected: Trainee, ours: Trainee) -> float:
    """Time of a step, of plain training's."""
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(5):
        draw_inputs(ours)
        for name, trainee in (("plain", expected), ("ours", ours)):
            began = time.perf_counter()
            trainee.step()
            if trainee.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return statistics.median(seconds["ours"]) / statistics.median(seconds["plain"])


def steps_difference(expected: Trainee, ours: Trainee) -> float:
    """Largest relative difference of gradients and buffers over some steps, which also leave the generator the same."""
    largest = 0.0
    for seed in range(STEPS):
        draw_inputs(ours)
        np.random.seed(seed)
        one = expected.snapshot(seed)
        np.random.seed(seed)  # wav2vec 2.0 draws its masks from it
        other = ours.snapshot(seed)
        assert torch.equal(one.random_state, other.random_state), "the generator differs"
        for theirs, mine in ((one.gradients, other.gradients), (one.buffers, other.buffers)):
            assert theirs.keys() == mine.keys(), sorted(set(theirs) ^ set(mine))[:3]
            most = {name: float(tensor.float().abs().max()) for name, tensor in theirs.items() if tensor.numel()}
            # A gradient that is zero but for rounding (that of a bias of keys) says nothing.
            least = NEGLIGIBLE * max(most.values(), default=0.0) or 1.0
            for name, scale in most.items():
                off = float((theirs[name].float() - mine[name].float()).abs().max())
                largest = max(largest, off / max(scale, least))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="*", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    add_options(parser)
    options = parser.parse_args()
    report("Architectures", options.model, options)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--percent", type=float, default=80.0, help="budget, of plain training's peak")
    parser.add_argument("--time-limit", type=float, default=3.0)
    add_output(parser)


def report(title: str, names: Iterable[str], options: argparse.Namespace) -> None:
    """Print the table of some models, and write it."""
    write_table(
        title,
        f"{STEPS} steps each. The budget is {options.percent:g}% of plain training's peak, or the first that fits in "
        "steps of 10%.",
        "| model | captured | difference | budget | kept | predicted | overhead | step | seconds |",
        (row(name, options.percent, options.time_limit, options.device) for name in names),
        options.output,
        left=2,
        device=options.device,
    )


def row(name: str, percent: float, time_limit: float, device: str) -> str:
    """One row of the table: of a model that trained, or with the reason why it did not."""
    torch._dynamo.reset()
    try:
        cells = check(name, percent, time_limit, device)
    except MonetliteError as error:
        cells = [name, f"refused: {str(error).splitlines()[0][:200]}", *[""] * 7]
    except Exception as error:
        cells = [name, f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}", *[""] * 7]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
