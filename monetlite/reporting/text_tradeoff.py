"""A trade-off as a table, as rows for a spreadsheet, and as data."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from monetlite.core.units import format_bytes, format_ms
from monetlite.planning.tradeoff import Tradeoff, TradeoffPoint
from monetlite.reporting.subject import Subject

OURS = "monetlite"


def tradeoff_rows(tradeoff: Tradeoff) -> Iterator[dict[str, Any]]:
    """Every point: whose it is, for which budget, its peak and step time, and the bound where there is one."""

    def row(name: str, point: TradeoffPoint | None, budget_bytes: int | None, **more: Any) -> dict[str, Any]:
        return {
            "method": name,
            "budget_bytes": budget_bytes,
            "peak_bytes": None if point is None else point.peak_bytes,
            "latency_ms": None if point is None else point.latency_ms,
            "overhead": None if point is None else tradeoff.overhead(point.latency_ms),
            "lower_bound_ms": more.get("lower_bound_ms"),
            "status": more.get("status"),
        }

    yield row("plain training", tradeoff.plain, None)
    yield row("this schedule", tradeoff.own, None)
    for item in tradeoff.budgets:
        yield row(OURS, item.best, item.budget_bytes, lower_bound_ms=item.lower_bound_ms, status=str(item.status))
    for name, points in tradeoff.others.items():
        for point in points:
            yield row(name, point, point.budget_bytes)


def tradeoff_facts(tradeoff: Tradeoff) -> dict[str, Any]:
    """The same for `--json`, with what is known about the smallest budget and the time that was given."""
    return {
        "smallest_proven_bytes": tradeoff.smallest_proven_bytes,
        "smallest_reached_bytes": tradeoff.smallest_reached_bytes,
        "time_limit_s": tradeoff.time_limit,
        "baseline_time_limit_s": tradeoff.baseline_seconds,
        "points": list(tradeoff_rows(tradeoff)),
    }


def print_tradeoff(console: Console, subject: Subject, tradeoff: Tradeoff) -> None:
    """A row for each budget: the overhead, the bound on it, and what baselines reach within it."""
    console.print(f"{subject.title}: step time over plain training's, {subject.costs}", style="bold", markup=False)
    names = [name for name, points in tradeoff.others.items() if any(point.budget_bytes for point in points)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("budget", "of plain", "step", "overhead", "at least", *names):
        table.add_column(column, justify="right", no_wrap=True)
    for item in tradeoff.budgets:
        within = {
            name: next((point for point in tradeoff.others[name] if point.budget_bytes == item.budget_bytes), None)
            for name in names
        }
        table.add_row(
            format_bytes(item.budget_bytes),
            f"{item.budget_bytes / tradeoff.plain.peak_bytes:.0%}",
            "nothing found" if item.best is None else format_ms(item.best.latency_ms),
            "" if item.best is None else f"{tradeoff.overhead(item.best.latency_ms):+.1%}",
            f"{tradeoff.overhead(item.lower_bound_ms):+.1%}",
            *("" if point is None else f"{tradeoff.overhead(point.latency_ms):+.1%}" for point in within.values()),
        )
    console.print(table)
    lines = [f"plain training: {format_bytes(tradeoff.plain.peak_bytes)}, {format_ms(tradeoff.plain.latency_ms)}"]
    for name, points in {"this schedule": (tradeoff.own,), **tradeoff.others}.items():
        lines += [
            f"{name}: {format_bytes(point.peak_bytes)}, {tradeoff.overhead(point.latency_ms):+.1%}"
            for point in points
            if point.budget_bytes is None
        ]
    console.print("\n" + "; ".join(lines))
    console.print(f"smallest budget: {smallest_in_words(tradeoff)}")


def smallest_in_words(tradeoff: Tradeoff) -> str:
    """What is known about the smallest feasible budget."""
    reached, proven = tradeoff.smallest_reached_bytes, tradeoff.smallest_proven_bytes
    if reached <= proven:
        return f"{format_bytes(reached)} (proven)"
    return f"{format_bytes(reached)} reached, {format_bytes(proven)} proven"


__all__ = ["OURS", "print_tradeoff", "smallest_in_words", "tradeoff_facts", "tradeoff_rows"]
