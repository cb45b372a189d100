"""The text of `monetlite show --kind tradeoff`, and its facts for `--json`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import Analysis
from monetlite.reporting.text_solve import smallest_in_words
from monetlite.reporting.text_tables import figures_table

if TYPE_CHECKING:
    from monetlite.planning.tradeoff import Tradeoff, TradeoffPoint  # imports the search

OURS = "monetlite"


def tradeoff_rows(tradeoff: "Tradeoff") -> Iterator[dict[str, Any]]:
    """Every point: its method, budget, peak and step time, and the bound if there is one."""

    def row(
        name: str,
        point: "TradeoffPoint | None",
        budget_bytes: int | None,
        lower_bound_ms: float | None = None,
        status: str | None = None,
    ) -> dict[str, Any]:
        return {
            "method": name,
            "budget_bytes": budget_bytes,
            "peak_bytes": None if point is None else point.peak_bytes,
            "latency_ms": None if point is None else point.latency_ms,
            "overhead": None if point is None else tradeoff.overhead(point.latency_ms),
            "lower_bound_ms": lower_bound_ms,
            "status": status,
        }

    yield row("plain training", tradeoff.plain, None)
    yield row("this schedule", tradeoff.own, None)
    for item in tradeoff.budgets:
        yield row(OURS, item.best, item.budget_bytes, item.lower_bound_ms, str(item.status))
    for name, points in tradeoff.others.items():
        for point in points:
            yield row(name, point, point.budget_bytes)


def single_points(tradeoff: "Tradeoff") -> dict[str, "TradeoffPoint"]:
    """Points that stand alone, by name: plain training, the schedule, and baselines that take no budget."""
    alone = {
        name: point for name, points in tradeoff.others.items() for point in points if point.budget_bytes is None
    }
    return {"plain training": tradeoff.plain, "this schedule": tradeoff.own, **alone}


def tradeoff_facts(tradeoff: "Tradeoff") -> dict[str, Any]:
    """The same for `--json`, with the smallest budget and the time limits."""
    return {
        "smallest_proven_bytes": tradeoff.smallest_proven_bytes,
        "smallest_reached_bytes": tradeoff.smallest_reached_bytes,
        "time_limit_s": tradeoff.time_limit,
        "baseline_time_limit_s": tradeoff.baseline_seconds,
        "points": list(tradeoff_rows(tradeoff)),
    }


def tradeoff_table(tradeoff: "Tradeoff") -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns, and a row for each budget: the overhead, the bound on it, and the baselines' overhead within it."""
    names = [name for name, points in tradeoff.others.items() if any(point.budget_bytes for point in points)]

    def within(name: str, budget_bytes: int) -> "TradeoffPoint | None":
        return next((point for point in tradeoff.others[name] if point.budget_bytes == budget_bytes), None)

    rows = [
        (
            format_bytes(item.budget_bytes),
            f"{item.budget_bytes / tradeoff.plain.peak_bytes:.0%}",
            "nothing found" if item.best is None else format_ms(item.best.latency_ms),
            overhead_in_words(tradeoff, item.best),
            f"{tradeoff.overhead(item.lower_bound_ms):+.1%}",
            *(overhead_in_words(tradeoff, within(name, item.budget_bytes)) for name in names),
        )
        for item in tradeoff.budgets
    ]
    return ["budget", "of plain", "step", "overhead", "at least", *names], rows


def overhead_in_words(tradeoff: "Tradeoff", point: "TradeoffPoint | None") -> str:
    return "" if point is None else f"{tradeoff.overhead(point.latency_ms):+.1%}"


def print_tradeoff(console: Console, analysis: Analysis, tradeoff: "Tradeoff") -> None:
    """The table of budgets, and points that have none."""
    title = f"{analysis.title}: step time over plain training's, costs {analysis.costs}"
    console.print(title, style="bold", markup=False)
    console.print(figures_table(*tradeoff_table(tradeoff)))
    lines = [f"plain training: {format_bytes(tradeoff.plain.peak_bytes)}, {format_ms(tradeoff.plain.latency_ms)}"]
    lines += [
        f"{name}: {format_bytes(point.peak_bytes)}, {overhead_in_words(tradeoff, point)}"
        for name, point in single_points(tradeoff).items()
        if point is not tradeoff.plain
    ]
    console.print("\n" + "; ".join(lines))
    console.print(f"smallest budget: {smallest_in_words(tradeoff)}")
