"""What `monetlite verify` prints: what was measured beside what was promised, what differs, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monetlite.checking.operator_differences import OperatorComparison, OperatorDifference
from monetlite.checking.report import Report, describe
from monetlite.core.units import format_bytes, format_ms

MOST_DIFFERENCES = 5
"""How many gradients and buffers that differ are listed."""
MOST_NAMED = 3
"""How many operators are named in a sentence."""


def report_facts(report: Report) -> dict[str, Any]:
    """The figures of a verification, for `--json`: bytes, milliseconds, and fractions.

    null stands for what is not known or not compared, and for a difference that no number says (of a gradient that
    one step has and the other has not).
    """
    facts = {
        "passed": report.passed,
        "reasons": [asdict(reason) for reason in report.reasons],
        "exact": report.exact,
        "largest_difference": report.largest_difference,
        "allowed_difference": report.allowed_difference,
        "unrepeated": report.unrepeated,
        "random_state": report.random_state,
        "budget_bytes": report.budget_bytes,
        "peak_bytes": report.peak_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "peak_error": report.peak_error,
        "plain_peak_bytes": report.plain_peak_bytes,
        "predicted_plain_peak_bytes": report.predicted_plain_peak_bytes,
        "plain_peak_error": report.plain_peak_error,
        "reserved_bytes": report.reserved_bytes,
        "plain_reserved_bytes": report.plain_reserved_bytes,
        "step_ms": report.step_ms,
        "predicted_step_ms": report.predicted_step_ms,
        "latency_error": report.latency_error,
        "plain_step_ms": report.plain_step_ms,
        "predicted_plain_step_ms": report.predicted_plain_step_ms,
        "plain_latency_error": report.plain_latency_error,
        "overhead": report.overhead,
        "predicted_overhead": report.predicted_overhead,
        "overhead_error": report.overhead_error,
        "costs": report.kind,
        "device": report.device,
        "same_shapes": report.same_shapes,
        "incomparable": list(report.incomparable),
        "differences": report.differences,
        "operators": None if report.operators is None else _operator_facts(report.operators),
    }
    finite: dict[str, Any] = _finite(facts)
    return finite


def _operator_facts(operators: OperatorComparison) -> dict[str, Any]:
    return {
        "runs": operators.runs,
        "again": operators.again,
        "captured": operators.captured,
        "differing": [asdict(item) for item in operators.differing],
    }


def _finite(item: Any) -> Any:
    """The same data without numbers that JSON doesn't have."""
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def print_report(console: Console, report: Report, most_operators: int) -> None:
    """Print what a verification found, operators that differ (as many as asked for), and the verdict."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    same = "bit for bit plain training's"
    if report.largest_difference > 0:
        same = (
            f"within {report.largest_difference:.1e} of plain training's (relative; "
            f"{report.allowed_difference:.0e} allowed)"
        )
    counts = f"the loss, {len(report.gradients)} gradients, {len(report.buffers)} buffers"
    table.add_row("training", f"{same}; {counts}")
    for name, difference in list(report.differences.items())[:MOST_DIFFERENCES]:
        table.add_row("  differs", f"{escape(name)}: {difference:.1e}")
    if (more := len(report.differences) - MOST_DIFFERENCES) > 0:
        table.add_row("", f"and {more} more")
    if report.unrepeated > 0:
        table.add_row("plain, twice", f"within {report.unrepeated:.1e}: its own kernels add up in no fixed order")
    table.add_row("random state", "as plain training leaves it" if report.random_state else "DIFFERS")
    if report.operators is not None:
        table.add_row("operators", _operators_in_words(report.operators))
    over_bytes = report.peak_bytes - report.budget_bytes
    kept = "kept" if over_bytes <= 0 else f"EXCEEDED by {format_bytes(over_bytes)}"
    table.add_row("budget", f"{format_bytes(report.budget_bytes)}, {kept}")
    table.add_row("predictions", escape(_predictions(report)))
    console.print(table)
    console.print()
    console.print(_figures(report))
    if report.operators is not None and report.operators.differing and most_operators:
        console.print()
        _print_operators(console, report.operators.differing, most_operators)
    console.print()
    verdict = "FAIL: " + "; ".join(reason.message for reason in report.reasons)
    console.print("PASS" if report.passed else escape(verdict), style="bold")


def _predictions(report: Report) -> str:
    """Where predictions come from, and what they are if they are of something else."""
    if not report.incomparable:
        return f"{'estimated for' if report.kind == 'estimated' else 'measured on'} {report.device}"
    peak, latency = format_bytes(report.predicted_peak_bytes), format_ms(report.predicted_step_ms)
    return (
        f"not compared: {', '.join(report.incomparable)}: peak {peak}, step {latency}, "
        f"{report.predicted_overhead:+.1%} over plain training"
    )


def _figures(report: Report) -> Table:
    """What was measured, beside what was predicted if that is of the same step."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("measured",) if report.incomparable else ("measured", "predicted", "off"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: str, measured: str, predicted: str, error: float | None) -> None:
        table.add_row(name, measured, *(() if error is None else (predicted, f"{error:+.1%}")))

    for name, size, predicted_size, error in (
        ("peak", report.peak_bytes, report.predicted_peak_bytes, report.peak_error),
        ("  plain", report.plain_peak_bytes, report.predicted_plain_peak_bytes, report.plain_peak_error),
    ):
        add(name, format_bytes(size), format_bytes(predicted_size), error)
    for name, reserved in (("reserved", report.reserved_bytes), ("  plain", report.plain_reserved_bytes)):
        if reserved is not None:
            add(name, format_bytes(reserved), "", None)
    for name, latency, predicted_latency, error in (
        ("step time", report.step_ms, report.predicted_step_ms, report.latency_error),
        ("  plain", report.plain_step_ms, report.predicted_plain_step_ms, report.plain_latency_error),
    ):
        add(name, format_ms(latency), format_ms(predicted_latency), error)
    add("overhead", f"{report.overhead:+.1%}", f"{report.predicted_overhead:+.1%}", report.overhead_error)
    return table


def _operators_in_words(operators: OperatorComparison) -> str:
    """Whether operators write what they do in plain training, and where it begins that they don't."""
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
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return f"; {words} {', '.join(escape(describe(item)) for item in items[:MOST_NAMED])}{more}"


def _print_operators(console: Console, differing: Sequence[OperatorDifference], most: int) -> None:
    """Print the runs that differ most from plain training's, and which part of that they introduce.

    What has been computed again, and is what it was the first time, is not listed twice.
    """
    differing = [item for item in differing if item.number == 0 or item.repeated > 0]
    table = Table(title="operators that differ most", title_justify="left", box=None, pad_edge=False)
    table.add_column("operator", overflow="fold")
    table.add_column("implementation", overflow="fold")
    for heading in ("differs", "introduced"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in differing[:most]:
        table.add_row(
            escape(item.operator),
            escape(item.implementation) + (f", run {item.number + 1}" if item.number else ""),
            f"{item.difference:.1e}",
            f"{item.introduced:.1e}" if item.introduced else "0",
        )
    if (more := len(differing) - most) > 0:
        table.add_row(f"and {more} more", "", "", "")
    console.print(table)


__all__ = ["print_report", "report_facts"]
