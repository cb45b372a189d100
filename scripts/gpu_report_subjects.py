"""Models, budgets and schedules of a GPU's report, by the options of its commands."""

import argparse
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_report_models import SMALL, SUBJECTS, Built

import monetlite
from monetlite.core.schedule import Schedule
from monetlite.planning.layouts import layouts_to_try


def built(name: str, args: argparse.Namespace, device: str) -> Built:
    """A model and its inputs on a device, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        model, inputs = SUBJECTS[name].build(args.small)
    return model.to(device), tuple(item.to(device) for item in inputs)


def tolerance_of(name: str, args: argparse.Namespace) -> float:
    asked: float = args.tolerance
    return max(SUBJECTS[name].tolerance, asked)


def layouts_of(name: str, args: argparse.Namespace) -> list[str]:
    return layouts_to_try(None, tolerance_of(name, args), args.compile)


def budgets_of(name: str, small: bool) -> tuple[str, ...]:
    return SMALL if small else SUBJECTS[name].budgets


def path_of(folder: Path, name: str, budget: str) -> Path:
    return folder / f"{name}_{budget.replace('%', 'pct')}.yaml"


def schedules_of(args: argparse.Namespace, name: str) -> Iterator[tuple[str, Schedule]]:
    for budget in budgets_of(name, args.small):
        if (path := path_of(args.schedules, name, budget)).exists():
            yield budget, monetlite.load_schedule(path)


def say(text: str) -> None:
    print(text, flush=True)


def tidy(device: str) -> None:
    """Free what a way to train has left."""
    gc.collect()
    if device == "cuda":
        with contextlib.suppress(RuntimeError):  # of a lost context
            torch.cuda.empty_cache()


def context_lost(device: str) -> bool:
    """True if CUDA no longer works in this process."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
