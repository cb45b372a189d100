"""What `monetlite zoo` prints."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.text_solve import cost_source
from monetlite.zoo.check import Checked
from monetlite.zoo.entries import Entry
from monetlite.zoo.monet import MonetSolution


def print_entries(console: Console, entries: Sequence[Entry]) -> None:
    """A table of memory against overhead, and how to use one of its rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    table.add_column("batch", no_wrap=True)
    table.add_column("device", no_wrap=True)
    for column in ("peak", "of plain", "overhead", "gap"):
        table.add_column(column, justify="right", no_wrap=True)
    before = None
    for entry in entries:
        exact = "" if not entry.tolerance else f" (within {entry.tolerance:g})"
        group = (entry.model + exact, entry.sizes, entry.device)
        shown = ("", "", "") if group == before else group
        before = group
        table.add_row(
            *shown,
            format_bytes(entry.peak_bytes),
            f"{entry.peak_bytes / entry.plain_peak_bytes:.0%}",
            f"{entry.overhead:+.1%}",
            f"{entry.gap:.1%}",
        )
    console.print(table)
    kinds = sorted({entry.kind for entry in entries})
    first = entries[0]
    console.print(f"\nOverheads are of step time, {' or '.join(kinds)} for the device. Use one as", style="dim")
    query = f"zoo:{first.device}/{first.model}@{_round_up(first.peak_bytes)}"
    console.print(escape(f'MONeTWrapper(model, "{query}")'), style="dim")


def _round_up(size_bytes: int) -> str:
    """A budget that a peak fits, in few digits."""
    return f"{math.ceil(size_bytes / 1e8) / 10:g}GB"


def print_shared(console: Console, file: str, schedule: Schedule) -> None:
    """One schedule's figures, without its model at hand."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    source = schedule.source
    built = "somebody's own code"
    if source is not None:
        options = [f"--batch {source.batch}"]
        if source.input_size is not None:
            options.append("--input-size {}x{}".format(*source.input_size))
        if source.sequence_length is not None:
            options.append(f"--sequence-length {source.sequence_length}")
        if source.dtype is not None:
            options.append(f"--dtype {source.dtype}")
        built = f"--model {source.model} {' '.join(options)}"
    inputs = [f"{name} {'×'.join(map(str, spec.shape))} {spec.dtype}" for name, spec in schedule.inputs.items()]
    runs = sum(len(runs) for runs in schedule.choices.before.values())
    table.add_row("file", escape(file))
    table.add_row("model", escape(built))
    table.add_row("inputs", escape(", ".join(inputs) + "; smaller batches too"))
    table.add_row("costs", escape(cost_source(schedule.device, schedule.kind, schedule.environment)))
    table.add_row(
        "plain training",
        f"peak {format_bytes(schedule.plain_peak_bytes)}, step {format_ms(schedule.plain_latency_ms)}",
    )
    table.add_row(
        "schedule",
        f"peak {format_bytes(schedule.peak_bytes)} of {format_bytes(schedule.budget_bytes)}, "
        f"step {format_ms(schedule.latency_ms)}",
    )
    table.add_row(
        "overhead",
        f"{schedule.overhead:+.1%} step time; {len(schedule.choices.stored)} values stored, "
        f"{runs} runs beyond the forward pass",
    )
    table.add_row("bound", f"{format_ms(schedule.lower_bound_ms)} (gap {schedule.gap:.1%}, {schedule.status})")
    table.add_row("solved", f"in {schedule.seconds:.1f} s by {schedule.solver}")
    table.add_row("operators", f"{schedule.operators}, fingerprint {schedule.fingerprint}")
    console.print(table)


def print_checked(console: Console, checked: Checked) -> None:
    """One line for a sound file, the problems of another."""
    if checked.passed:
        console.print(f"[green]sound[/green]  {escape(checked.file)}", soft_wrap=True)
    for problem in checked.problems:
        text = problem if problem.startswith(checked.file) else f"{checked.file}: {problem}"
        console.print(f"[red]FAILS[/red]  {escape(text)}", soft_wrap=True)


def print_rescaled(console: Console, before: Schedule, after: Schedule, output: str | None) -> None:
    """A schedule's figures where it was solved, and where it was priced again."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("batch", justify="right")
    table.add_column("costs")
    for column in ("peak", "of plain", "step", "overhead"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, item in (("solved", before), ("rescaled", after)):
        table.add_row(
            label,
            _batch(item),
            escape(cost_source(item.device, item.kind, item.environment)),
            format_bytes(item.peak_bytes),
            f"{item.peak_bytes / item.plain_peak_bytes:.0%}",
            format_ms(item.latency_ms),
            f"{item.overhead:+.1%}",
        )
    console.print(table)
    if output is not None:
        console.print(f"\nwritten to {escape(output)}")


def _batch(schedule: Schedule) -> str:
    """The batch as its model was built for; of a person's own model, the first dimension of the first input."""
    if schedule.source is not None:
        return str(schedule.source.batch)
    return next((str(spec.shape[0]) for spec in schedule.inputs.values() if spec.shape), "")


def print_monet(console: Console, theirs: MonetSolution, ours: Schedule | None) -> None:
    """MONeT's schedule, by kind of operator, beside one of ours."""
    console.print(f"MONeT: {theirs.model}, batch {theirs.batch}, {theirs.mode}", style="bold")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operators")
    for column in ("in all", "stored", "run again"):
        table.add_column(column, justify="right")
    kinds: dict[str, list[int]] = {}
    for index, name in enumerate(theirs.operators):
        kinds.setdefault(name.rpartition("::")[2].strip("_"), []).append(index)
    stored = set(theirs.stored)
    for kind, members in kinds.items():
        again = sum(theirs.runs_again[index] for index in members)
        table.add_row(escape(kind), str(len(members)), str(sum(index in stored for index in members)), str(again))
    console.print(table)
    beside = Table(box=None, pad_edge=False, header_style="bold")
    beside.add_column("")
    beside.add_column("costs")
    for column in ("stored", "runs again", "step", "solved in"):
        beside.add_column(column, justify="right", no_wrap=True)
    beside.add_row(
        "MONeT",
        "measured on a P100",
        str(len(stored)),
        str(sum(theirs.runs_again)),
        format_ms(theirs.latency_ms),
        f"{theirs.solve_seconds:.0f} s",
    )
    if ours is not None:
        beside.add_row(
            "monetlite",
            escape(cost_source(ours.device, ours.kind, ours.environment)),
            str(len(ours.choices.stored)),
            str(sum(map(len, ours.choices.before.values()))),
            format_ms(ours.latency_ms),
            f"{ours.seconds:.0f} s",
        )
    console.print()
    console.print(beside)
    if ours is not None:
        console.print(
            "\nStep times compare only where the costs are of one device; kinds of operators differ: batch norm's "
            "statistics and the like are values of their own here.",
            style="dim",
        )
