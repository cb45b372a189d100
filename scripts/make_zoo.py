"""Solve the schedules that come with monetlite, check each file, and write their index.

    python scripts/make_zoo.py [--only resnet50 ...] [--time-limit 60] [--again] [--table FILE.md]

A file that is there and passes `monetlite zoo check` is left as it is, so an interrupted run goes on where it
stopped; `--again` solves it once more, beginning from what it has, and keeps the faster one. Costs are estimated:
no GPU is needed, and the same code makes the same figures anywhere.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import monetlite
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.source import Dtype, ModelSource
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.zoo.check import Checked, Checker, build, traced
from monetlite.zoo.collection import Shelf

SCHEDULES = Path(__file__).resolve().parent.parent / "schedules"
PAPER_GB = (10, 9, 8, 7, 6, 5, 4, 3)
SHARES = ("80%", "60%", "50%", "40%")
PAPER_DEVICE, CARD = "p100", "rtx-3090"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A model for which schedules are wanted, and within which budgets, in any order."""

    source: ModelSource
    device: str
    budgets: tuple[str, ...]
    tolerance: float = 0.0


def images(model: str, batch: int, size: tuple[int, int] = (224, 224)) -> ModelSource:
    return ModelSource(model=model, batch=batch, input_size=size)


def tokens(model: str, batch: int, length: int, dtype: Dtype | None = None) -> ModelSource:
    return ModelSource(model=model, batch=batch, sequence_length=length, dtype=dtype)


# The paper's models and batches on the paper's GPU, within its budgets and less; then what people train, on a
# card that they have, at shares of what plain training takes.
PAPER = (
    images("resnet50", 184),
    images("googlenet", 320),
    images("unet", 11, (416, 608)),
    images("mobilenet_v2", 272),
    images("vgg16", 176),
)
TODAY = (
    images("resnet152", 128),
    images("hf:convnext", 224),
    images("hf:efficientnet-b0", 256),
    images("hf:vit", 192),
    images("hf:vit-large", 72),
    tokens("hf:bert", 48, 512),
    tokens("hf:bert-large", 24, 512),
    tokens("hf:gpt2", 16, 1024),
    tokens("hf:gpt2-medium", 8, 1024),
    tokens("hf:llama-1b", 4, 2048, "bfloat16"),
)
WANTED = (
    *(Wanted(source=source, device=PAPER_DEVICE, budgets=tuple(f"{gb}GB" for gb in PAPER_GB)) for source in PAPER),
    # Where the workspaces of convolutions decide what fits, parts of the batch fit more; sums are in another order then.
    *(
        Wanted(source=source, device=PAPER_DEVICE, budgets=tuple(f"{gb}GB" for gb in PAPER_GB), tolerance=1e-5)
        for source in PAPER
        if source.model in ("unet", "vgg16")
    ),
    *(Wanted(source=source, device=CARD, budgets=SHARES) for source in TODAY),
)


def make(wanted: Wanted, shelf: Shelf, checker: Checker, time_limit: float, again: bool) -> Iterator[str]:
    """Solve what is missing of one model, from the smallest budget up, each beginning from those before it."""
    graph = traced(wanted.source, device=wanted.device)
    profile = monetlite.profile(graph, wanted.device)
    plain_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
    title = f"{wanted.source.model} on {wanted.device}, plain {format_bytes(plain_bytes)}"
    found: list[Schedule] = []
    in_bytes = {budget: parse_budget(budget, plain_bytes) for budget in wanted.budgets}
    known = {item.schedule.budget_bytes: item.schedule for item in _there(wanted, shelf, checker) if item.schedule}
    for budget, budget_bytes in sorted(in_bytes.items(), key=lambda item: item[1]):
        there = known.get(budget_bytes)
        if budget_bytes >= plain_bytes and budget_bytes - plain_bytes > plain_bytes // 10:
            continue  # Far more than plain training needs.
        if there is not None and not again:
            found.append(there)
            continue
        starts = [*found, *([there] if there is not None else [])]
        try:
            schedule = monetlite.solve(
                profile, budget_bytes, tolerance=wanted.tolerance, time_limit=time_limit, starts=starts
            )
        except InfeasibleBudget as error:
            yield f"{title}: {budget}: {error}"
            continue
        schedule = replace(schedule, source=build(wanted.source).source)
        if there is not None and there.latency_ms <= schedule.latency_ms:
            bound_ms = max(there.lower_bound_ms, schedule.lower_bound_ms)
            schedule = replace(there, lower_bound_ms=min(bound_ms, there.latency_ms))
        found.append(schedule)
        entry = shelf.add(schedule)
        checked = checker.check(shelf.folder / entry.file, expected_name=entry.file)
        assert checked.passed, f"{entry.file}: {checked.problems}"
        yield f"{title}: {entry.file}: {schedule.overhead:+.1%}, gap {schedule.gap:.1%}, {schedule.seconds:.0f} s"


def _there(wanted: Wanted, shelf: Shelf, checker: Checker) -> Iterator[Checked]:
    """Sound files of a model that exist already."""
    source = build(wanted.source).source
    stem = wanted.source.model.replace(":", "-")
    for path in sorted((shelf.folder / wanted.device).glob(f"{stem}_*.yaml")):
        checked = checker.check(path, expected_name=f"{wanted.device}/{path.name}")
        if not checked.passed:
            print(f"{path}: {'; '.join(checked.problems)}; solved again", flush=True)
        elif (
            checked.schedule is not None
            and checked.schedule.source == source
            and checked.schedule.tolerance == wanted.tolerance
        ):
            yield checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="models, as they are named here")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--again", action="store_true", help="solve also what is there, and keep the faster")
    parser.add_argument("--folder", type=Path, default=SCHEDULES)
    args = parser.parse_args()
    shelf, checker = Shelf(args.folder), Checker()
    began = time.monotonic()
    for wanted in WANTED:
        if args.only and wanted.source.model not in args.only:
            continue
        for line in make(wanted, shelf, checker, args.time_limit, args.again):
            print(f"[{time.monotonic() - began:6.0f} s] {line}", flush=True)
    shelf.write_index(shelf.indexed_again())


if __name__ == "__main__":
    main()
