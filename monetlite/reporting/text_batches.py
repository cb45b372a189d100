"""What `monetlite max-batch` prints."""

from typing import Any

from rich.console import Console
from rich.table import Table

from monetlite.core.costs import Profile
from monetlite.core.units import format_bytes, format_ms
from monetlite.planning.batches import BatchLimit
from monetlite.reporting.text_solve import cost_source


def batches_facts(name: str, profile: Profile, found: BatchLimit) -> dict[str, Any]:
    """The figures for `--json`: bytes, milliseconds, samples per second."""
    return {
        "model": name,
        "device": profile.device,
        "costs": str(profile.kind),
        "budget_bytes": found.budget_bytes,
        "reserved": found.reserved,
        "largest": found.largest,
        "plain_largest": found.plain_largest,
        "multiple_of": found.step,
        "proven_impossible": found.proven_impossible,
        "points": [
            {
                "batch": point.batch,
                "peak_bytes": point.peak_bytes,
                "reserved_bytes": point.reserved_bytes,
                "latency_ms": point.latency_ms,
                "samples_per_s": point.samples_per_s,
                "overhead": point.overhead,
                "scheduled": point.schedule is not None,
            }
            for point in found.points
        ],
    }


def print_batches(console: Console, name: str, profile: Profile, found: BatchLimit) -> None:
    """The largest batch, and a table of those on the way."""
    source = cost_source(profile.device, str(profile.kind), profile.environment)
    budget = format_bytes(found.budget_bytes)
    plain = f"plain training: {found.plain_largest}" if found.plain_largest else "plain training fits none"
    if found.step > 1:
        plain += f"; multiples of {found.step}"
    of = f"{budget} of reserved memory" if found.reserved else budget
    console.print(f"{name} within {of}: batch {found.largest} ({plain})", style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold")
    reserved = ("reserved",) if found.reserved else ()
    for column in ("batch", "how", "peak", *reserved, "step", "samples/s", "overhead"):
        table.add_column(column, justify="left" if column == "how" else "right", no_wrap=True)
    for point in found.points:
        table.add_row(
            str(point.batch),
            "plain" if point.schedule is None else "scheduled",
            format_bytes(point.peak_bytes),
            *([] if point.reserved_bytes is None else [format_bytes(point.reserved_bytes)]),
            format_ms(point.latency_ms),
            f"{point.samples_per_s:.3g}" if point.samples_per_s < 999.5 else f"{point.samples_per_s:.0f}",
            "" if point.schedule is None else f"{point.overhead:+.1%}",
        )
    console.print(table)
    limit = f"No schedule fits a batch of {found.proven_impossible} (proven). " if found.proven_impossible else ""
    console.print(f"\n{limit}Costs are {source}. To train at one of these:", style="dim", soft_wrap=True)
    console.print(
        f"monetlite solve --model {name} --batch {found.largest} --budget {budget.replace(' ', '')}"
        f"{' --reserved' if found.reserved else ''}",
        style="dim",
        soft_wrap=True,
    )
