"""The text of `monetlite check`: measured figures beside the promised ones, differences, and the verdict."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monetlite.checking.operator_differences import OperatorComparison, OperatorDifference
from monetlite.checking.report import Report, describe
from monetlite.core.costs import costs_in_words
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.text_tables import facts_table, figures_table

MAX_DIFFERENCES = 5
"""Gradients and buffers that are listed."""
MAX_NAMED = 3
"""Operators that are named in a sentence."""
_TOLD = (
    "passed exact largest_difference allowed_difference unrepeated random_state budget_bytes peak_bytes "
    "predicted_peak_bytes peak_error plain_peak_bytes predicted_plain_peak_bytes plain_peak_error reserved_bytes "
    "plain_reserved_bytes step_ms predicted_step_ms latency_error plain_step_ms predicted_plain_step_ms "
    "plain_latency_error overhead predicted_overhead overhead_error device same_shapes differences"
)


def report_facts(report: Report) -> dict[str, Any]:
    """The figures of a verification, for `--json`: bytes, milliseconds, and fractions.

    Figures that are not known or not compared are None.
    """
    operators = report.operators
    return {name: getattr(report, name) for name in _TOLD.split()} | {
        "reasons": [asdict(reason) for reason in report.reasons],
        "costs": report.kind,
        "incomparable": list(report.incomparable),
        "operators": operators
        and {
            "runs": operators.runs,
            "again": operators.again,
            "captured": operators.captured,
            "differing": [asdict(item) for item in operators.differing],
        },
    }


def print_report(console: Console, report: Report, most_operators: int) -> None:
    """Print the figures of a verification, so many operators that differ, and the verdict."""
    same = "bit for bit plain training's"
    if report.largest_difference > 0:
        same = (
            f"within {report.largest_difference:.1e} of plain training's (relative; "
            f"{report.allowed_difference:.1e} allowed)"
        )
    rows = [("training", f"{same}; the loss, {len(report.gradients)} gradients, {len(report.buffers)} buffers")]
    listed = list(report.differences.items())
    rows += [("  differs", f"{name}: {difference:.1e}") for name, difference in listed[:MAX_DIFFERENCES]]
    if (more := len(listed) - MAX_DIFFERENCES) > 0:
        rows.append(("", f"and {more} more"))
    if report.unrepeated > 0:
        rows.append(("plain, twice", f"within {report.unrepeated:.1e}: its own kernels add up in no fixed order"))
    rows.append(("random state", "as plain training leaves it" if report.random_state else "DIFFERS"))
    if report.operators is not None:
        rows.append(("operators", _operators_in_words(report.operators)))
    over_bytes, of = report.peak_bytes - report.budget_bytes, ""
    if report.of_reserved and report.reserved_bytes is not None:
        over_bytes, of = report.reserved_bytes - report.budget_bytes, " of reserved memory"
    kept = "kept" if over_bytes <= 0 else f"EXCEEDED by {format_bytes(over_bytes)}"
    rows.append(("budget", f"{format_bytes(report.budget_bytes)}{of}, {kept}"))
    if report.reserves_more and not report.of_reserved and report.reserved_bytes is not None:
        reserved = format_bytes(report.reserved_bytes)
        rows.append(("", f"of tensors. PyTorch's allocator reserved {reserved}: solve --reserved keeps that in it"))
    rows.append(("predictions", _predictions(report)))
    console.print(facts_table(rows))
    console.print()
    console.print(_figures(report))
    if report.operators is not None and report.operators.differing and most_operators:
        console.print()
        _print_operators(console, report.operators.differing, most_operators)
    console.print()
    verdict = "FAIL: " + "; ".join(reason.message for reason in report.reasons)
    console.print("PASS" if report.passed else escape(verdict), style="bold")


def _predictions(report: Report) -> str:
    """The source of the predictions, or the reason why they are of something else."""
    if not report.incomparable:
        return costs_in_words(report.kind, report.device)
    peak, latency = format_bytes(report.predicted_peak_bytes), format_ms(report.predicted_step_ms)
    return (
        f"not compared: {', '.join(report.incomparable)}: peak {peak}, step {latency}, "
        f"{report.predicted_overhead:+.1%} over plain training"
    )


def _figures(report: Report) -> Table:
    """Measured figures, beside the predicted ones if those are of the same step."""
    rows: list[tuple[str, str, str, float | None]] = []

    def size(name: str, measured: int | None, predicted: int = 0, error: float | None = None) -> None:
        if measured is not None:
            rows.append((name, format_bytes(measured), format_bytes(predicted), error))

    def latency(name: str, measured: float, predicted: float, error: float | None) -> None:
        rows.append((name, format_ms(measured), format_ms(predicted), error))

    size("peak", report.peak_bytes, report.predicted_peak_bytes, report.peak_error)
    size("  plain", report.plain_peak_bytes, report.predicted_plain_peak_bytes, report.plain_peak_error)
    size("reserved", report.reserved_bytes)
    size("  plain", report.plain_reserved_bytes)
    latency("step time", report.step_ms, report.predicted_step_ms, report.latency_error)
    latency("  plain", report.plain_step_ms, report.predicted_plain_step_ms, report.plain_latency_error)
    overheads = f"{report.overhead:+.1%}", f"{report.predicted_overhead:+.1%}"
    rows.append(("overhead", *overheads, report.overhead_error))
    columns = ("", "measured") if report.incomparable else ("", "measured", "predicted", "off")
    return figures_table(
        columns, [(*row[:2], *(() if row[3] is None else (row[2], f"{row[3]:+.1%}"))) for row in rows]
    )


def _operators_in_words(operators: OperatorComparison) -> str:
    """Operators that write other numbers than in plain training, and the first ones that do."""
    again = f", {operators.again} of them again," if operators.again else ""
    if not operators.differing:
        words = f"all {operators.runs} runs{again} write what plain training writes"
    else:
        words = f"{len(operators.differing)} of {operators.runs} runs{again} write other numbers"
        words += _named("a difference is introduced by", operators.introducing)
        if not operators.introducing:
            words += "; none introduces a difference, so a value has changed after it was written"
        words += _named("not what their first runs wrote:", operators.unrepeated)
    if operators.captured > 0:
        words += f"; capturing the model alone makes differences of up to {operators.captured:.1e}"
    return words


def _named(words: str, items: Sequence[OperatorDifference]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return f"; {words} {', '.join(describe(item) for item in items[:MAX_NAMED])}{more}"


def _print_operators(console: Console, differing: Sequence[OperatorDifference], most: int) -> None:
    """Print the runs that differ most from plain training's, and the part of it that they introduce.

    Re-runs that repeat their first run are left out.
    """
    differing = [item for item in differing if item.number == 0 or item.repeated > 0]
    rows = [
        (
            item.operator,
            item.implementation + (f", run {item.number + 1}" if item.number else ""),
            f"{item.difference:.1e}",
            f"{item.introduced:.1e}" if item.introduced else "0",
        )
        for item in differing[:most]
    ]
    if (more := len(differing) - most) > 0:
        rows.append((f"and {more} more", "", "", ""))
    columns = ("operator", "implementation", "differs", "introduced")
    console.print(figures_table(columns, rows, left=columns[:2], title="operators that differ most"))
