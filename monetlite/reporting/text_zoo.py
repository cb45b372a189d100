"""The text of `monetlite zoo`, and of `monetlite show` at other sizes."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from monetlite.core.command_lines import command_line
from monetlite.core.costs import cost_source
from monetlite.core.schedule import Schedule
from monetlite.core.source import batch_of
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.text_solve import overhead_row, schedule_rows
from monetlite.reporting.text_tables import facts_table, figures_table
from monetlite.zoo.check import Checked
from monetlite.zoo.collection import PREFIX, ZooEntry
from monetlite.zoo.monet_solutions import MS_PER_UNIT, MonetSolution


def print_entries(console: Console, entries: Sequence[ZooEntry], folder: Path | None = None) -> None:
    """A table of memory against overhead, and how to use its first row; `folder` has a collection of one's own."""
    rows = []
    before = None
    for entry in entries:
        exact = "" if not entry.tolerance else f" (within {entry.tolerance:g})"
        group = (entry.model + exact, entry.sizes, entry.device)
        shown = ("", "", "") if group == before else group
        before = group
        of_plain = f"{entry.peak_bytes / entry.plain_peak_bytes:.0%}"
        rows.append(
            (*shown, format_bytes(entry.peak_bytes), of_plain, f"{entry.overhead:+.1%}", f"{entry.gap:.1%}")
        )
    names = ("model", "batch", "device")
    console.print(figures_table((*names, "peak", "of plain", "overhead", "gap"), rows, left=names))
    kinds = sorted({entry.kind for entry in entries})
    first = entries[0]
    console.print(f"\nOverheads are of step time, {' or '.join(kinds)} for the device. Use one as", style="dim")
    name = f"{PREFIX}{first.name}" if folder is None else (folder / first.file).as_posix()
    console.print(f'MONeTWrapper(model, "{name}")', style="dim", markup=False, soft_wrap=True)


def print_shared(console: Console, file: str, schedule: Schedule) -> None:
    """One schedule's figures, without its model at hand."""
    source = schedule.source
    built = "somebody's own code"
    if source is not None:
        built = command_line("", vars(source)).removeprefix("monetlite ")
    inputs = [f"{name} {'×'.join(map(str, spec.shape))} {spec.dtype}" for name, spec in schedule.inputs.items()]
    rows = [
        ("file", file),
        ("model", built),
        ("inputs", ", ".join(inputs) + "; smaller batches too"),
        ("costs", cost_source(schedule)),
        *schedule_rows(schedule),
        overhead_row(schedule),
        ("bound", f"{format_ms(schedule.lower_bound_ms)} (gap {schedule.gap:.1%}, {schedule.status})"),
        ("solved", f"in {schedule.seconds:.1f} s by {schedule.solver}"),
        ("operators", f"{schedule.operators}, fingerprint {schedule.fingerprint}"),
    ]
    console.print(facts_table(rows))


def print_checked(console: Console, checked: Checked) -> None:
    """One line for a sound file, the problems of another."""
    if checked.passed:
        console.print(f"[green]sound[/green]  {escape(checked.file)}", soft_wrap=True)
    for problem in checked.problems:
        text = problem if problem.startswith(checked.file) else f"{checked.file}: {problem}"
        console.print(f"[red]FAILS[/red]  {escape(text)}", soft_wrap=True)


def print_rescaled(console: Console, before: Schedule, after: Schedule, output: str | None) -> None:
    """A schedule's figures where it was solved, and where it was priced again."""
    rows = [
        (
            label,
            str(batch_of(item.source, item.inputs) or ""),
            cost_source(item),
            format_bytes(item.peak_bytes),
            f"{item.peak_bytes / item.plain_peak_bytes:.0%}",
            format_ms(item.latency_ms),
            f"{item.overhead:+.1%}",
        )
        for label, item in (("solved", before), ("rescaled", after))
    ]
    columns = ("", "batch", "costs", "peak", "of plain", "step", "overhead")
    console.print(figures_table(columns, rows, left=("", "costs")))
    if output is not None:
        console.print(f"\nwritten to {escape(output)}")


def print_monet(
    console: Console, theirs: MonetSolution, same_costs: Schedule | None, ours: Schedule | None, file: str | None
) -> None:
    """Print a published schedule by kind of operator, beside monetlite's own.

    Args:
        same_costs: solved by monetlite on the graph and the costs in the published file.
        ours: of the same model, on costs of its own, from `file`.
    """
    budget = "" if theirs.budget_gib is None else f", budget {theirs.budget_gib:g} GiB"
    title = f"{theirs.method}: {theirs.model}, batch {theirs.batch}, {theirs.mode}{budget}"
    console.print(title, style="bold", markup=False)
    kinds: dict[str, list[int]] = {}
    for index, name in enumerate(theirs.operators):
        kinds.setdefault(name.rpartition("::")[2].strip("_"), []).append(index)
    stored = set(theirs.stored)
    rows = [
        (
            kind,
            str(len(members)),
            str(sum(index in stored for index in members)),
            str(sum(theirs.runs_again[index] for index in members)),
        )
        for kind, members in kinds.items()
    ]
    console.print(figures_table(("operators", "in all", "stored", "run again"), rows, left=("operators",)))

    replay, reruns = theirs.replay, str(sum(theirs.runs_again))

    def step(latency_ms: float | None) -> tuple[str, str, str]:
        if latency_ms is None:
            return "", "", ""
        overhead = f"{latency_ms / replay.fastest_ms - 1:+.1%}" if replay and replay.fastest_ms else ""
        return f"{latency_ms / MS_PER_UNIT:.0f}", format_ms(latency_ms), overhead

    seconds = "" if theirs.solve_seconds is None else f"{theirs.solve_seconds:.0f} s"
    beside = [("published", *step(theirs.latency_ms), "", str(len(stored)), reruns, seconds)]
    if replay is not None:
        beside.append(("replayed", *step(replay.latency_ms), format_bytes(replay.peak_bytes), "", "", ""))
    for label, item in (("monetlite", same_costs), ("monetlite zoo", ours)):
        if item is None:
            continue
        own = ("", format_ms(item.latency_ms), f"{item.overhead:+.1%}")
        counts = (str(len(item.choices.stored)), str(sum(map(len, item.choices.before.values()))))
        figures = own if item is ours else step(item.latency_ms)
        beside.append((label, *figures, format_bytes(item.peak_bytes), *counts, f"{item.seconds:.0f} s"))
    console.print()
    columns = ("", "objective", "step", "overhead", "peak", "stored", "re-runs", "solved in")
    console.print(figures_table(columns, beside, left=("",)))
    notes = ["objective: in 0.01 ms, on the authors' P100. overhead: over every operator once, at its fastest."]
    if replay is None:
        notes.append(f"The schedule can't be replayed: {theirs.replay_problem}.")
    if ours is not None:
        notes.append(
            f"monetlite zoo: {file}, {cost_source(ours)}; overhead over plain training. Step times compare only "
            "where the costs are of one device."
        )
    console.print(escape("\n" + "\n".join(notes)), style="dim")
