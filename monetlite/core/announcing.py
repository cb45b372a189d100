"""Announcements of a training step that plans: lines on stderr in a terminal, log lines elsewhere; and warnings."""

import functools
import inspect
import logging
import sys
import warnings
from importlib import util

from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes

_log = logging.getLogger("monetlite")


def tell(text: str) -> None:
    """Print a line where a person watches; log it at level INFO, as `monetlite`, where none does."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"monetlite: {text}\n")
    else:
        _log.info(text)


def warn(text: str) -> None:
    """Warn, with the line of the person's code that called monetlite."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_between()):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


@functools.cache
def _between() -> tuple[str, ...]:
    """Folders and files that stand between a person's line and a warning: monetlite, torch and contexts."""
    found: list[str] = []
    for name in ("monetlite", "torch", "contextlib"):
        if (spec := util.find_spec(name)) is not None:
            found += spec.submodule_search_locations or [spec.origin or spec.name]
    return tuple(found)


def planned(schedule: Schedule) -> str:
    """A schedule in a few words: its overhead over plain training and its peak."""
    return (
        f"{schedule.overhead:+.1%} over plain training, {format_bytes(schedule.peak_bytes)} of "
        f"{format_bytes(schedule.budget_bytes)}"
    )


def bettered(before: Schedule, better: Schedule) -> str:
    """The schedule that takes another's place, in a few words."""
    if better.choices == before.choices:
        return f"plan, with measured costs: {planned(better)}"
    return f"better plan, from this step on: {planned(better)}"
