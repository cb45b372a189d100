"""Announcements of a training step that plans: lines on stderr in a terminal, log lines elsewhere."""

import logging
import sys

from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes

_log = logging.getLogger("monetlite")


def tell(text: str) -> None:
    """Print a line where a person watches; log it at level INFO, as `monetlite`, where none does."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"monetlite: {text}\n")
    else:
        _log.info(text)


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
