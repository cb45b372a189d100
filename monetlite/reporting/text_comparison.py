"""What `monetlite compare` prints and writes: the same figures for the terminal, as Markdown and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from monetlite.checking.comparison.peer_runs import TITLES, Comparison, Duel, PeerRun, Standing
from monetlite.core.units import format_bytes, format_ms

NOTES = (
    "Step and spread (fastest to slowest) are over plain training's median step. Gradients: the largest relative "
    "difference from plain training's, from the same seed. ≈ marks times whose middle halves overlap."
)

BESIDE = "Each of them beside monetlite's fastest at an equal or smaller measured peak"
OURS_THERE = "monetlite"


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """The figures for `--json`: bytes, milliseconds, and fractions of plain training's median step."""

    def facts(run: PeerRun) -> dict[str, Any]:
        spread = comparison.spread(run)
        return {
            **asdict(run),
            "peer": str(run.peer),
            "title": run.title,
            "step_ms": run.step_ms if run.times_ms else None,
            "ratio": comparison.ratio(run),
            "spread": None if spread is None else list(spread),
            "exact": None if run.gradient_difference is None else run.gradient_difference == 0 and not run.faults,
        }

    def of(run: PeerRun | None) -> int | None:
        return None if run is None else comparison.runs.index(run)

    def duel_facts(duel: Duel) -> dict[str, Any]:
        return {
            "run": of(duel.peer),
            "monetlite": of(duel.ours),
            "faster": duel.faster,
            "beyond_spread": duel.clear,
        }

    return {
        "model": comparison.model,
        "inputs": comparison.inputs,
        "device": comparison.device,
        "environment": dict(comparison.environment),
        "repeats": comparison.repeats,
        "time_limit": comparison.time_limit,
        "tolerance": comparison.tolerance,
        "autocast": comparison.autocast,
        "runs": [facts(run) for run in comparison.runs],
        "tried": [facts(run) for run in comparison.tried],
        "duels": [duel_facts(duel) for duel in comparison.duels],
        "budgets": [
            {
                "budget": standing.budget,
                "budget_bytes": standing.budget_bytes,
                "monetlite": of(standing.ours),
                "peers": [duel_facts(duel) for duel in standing.duels],
                "too_large": [of(run) for run in standing.too_large],
                "faster": standing.faster,
                "verdict": verdict(comparison, standing),
            }
            for standing in comparison.standings
        ],
    }


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Every run, and who is faster at each budget."""
    for line in heading(comparison):
        console.print(escape(line), style="bold" if line.startswith(comparison.model) else "dim")
    table = _table("peak", *(["reserved"] if _reserves(comparison) else []), "step", "spread", "gradients")
    for row in _rows(comparison):
        notes = (Padding(Text(note, style="yellow"), (0, 0, 0, 2)) for note in row.notes)
        name = Group(Text(row.title), *notes)
        reserved = [row.reserved] if _reserves(comparison) else []
        table.add_row(name, row.peak, *reserved, row.step, row.spread, row.gradients)
    console.print()
    console.print(table)
    if comparison.duels:
        console.print()
        console.print(BESIDE, style="bold")
        table = _table("peak", "step", OURS_THERE, "")
        for cells in _duels(comparison):
            table.add_row(*map(escape, cells))
        console.print(table)
    for standing in comparison.standings:
        console.print()
        console.print(escape(_title(comparison, standing)), style="bold")
        for line in _who_fits(comparison, standing):
            console.print(escape(line))
        style = "green" if standing.faster else "yellow"
        console.print(escape(verdict(comparison, standing)), style=style)
    console.print()
    console.print(NOTES, style="dim")


def comparison_markdown(comparison: Comparison) -> str:
    """The same as Markdown, and which settings were tried beside."""
    first, *others = heading(comparison)
    reserves = _reserves(comparison)
    lines = [f"# {first}", "", *(f"{line}  " for line in others), "", NOTES, ""]
    lines += [
        f"| | peak |{' reserved |' if reserves else ''} step | spread | gradients | what differs |",
        f"| --- | ---: |{' ---: |' if reserves else ''} ---: | --- | ---: | --- |",
    ]
    for row in _rows(comparison):
        cells = [row.title, row.peak, *([row.reserved] if reserves else []), row.step, row.spread, row.gradients]
        lines.append(_markdown_row([*cells, "; ".join(row.notes)]))
    if comparison.duels:
        lines += [
            "",
            f"**{BESIDE}**",
            "",
            f"| | peak | step | {OURS_THERE} | |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        lines += [_markdown_row(cells) for cells in _duels(comparison)]
    for standing in comparison.standings:
        lines += ["", f"**{_title(comparison, standing)}.** {verdict(comparison, standing)}"]
        for line in _who_fits(comparison, standing):
            lines += ["", line]
    if comparison.tried:
        tried = (f"{run.title} ({run.failure or _peak(run)})" for run in comparison.tried)
        lines += ["", f"Settings tried that were no better: {'; '.join(tried)}."]
    return "\n".join([*lines, ""])


def heading(comparison: Comparison) -> list[str]:
    """What was compared, on what hardware, with which versions, in lines."""
    where = comparison.environment
    threads = f", {where['threads']} threads" if "threads" in where else ""
    cuda = f", CUDA {where['cuda']}" if "cuda" in where else ""
    commit = f" (commit {where['commit']})" if "commit" in where else ""
    options = f", {comparison.time_limit:g} s for each solve"
    options += f", tolerance {comparison.tolerance:g}" if comparison.tolerance else ""
    options += f", under autocast to {comparison.autocast}" if comparison.autocast else ""
    plain = comparison.plain
    peak = f"peak {format_bytes(plain.peak_bytes)}" if plain.peak_bytes else plain.failure
    return [
        f"{comparison.model}, input {comparison.inputs}",
        f"Measured on {where['device']}{threads}; torch {where['torch']}{cuda}, Python {where['python']}, "
        f"monetlite {where['monetlite']}{commit}",
        f"{comparison.repeats} step{'s' if comparison.repeats > 1 else ''} of each, taken in turn{options}",
        f"Plain training: {peak}" + (f", step {format_ms(plain.step_ms)}" if plain.times_ms else ""),
    ]


def verdict(comparison: Comparison, standing: Standing) -> str:
    """In a sentence, whether monetlite is faster than every peer that fits, at no larger a measured peak."""
    lost = [duel for duel in standing.duels if not duel.faster]
    if lost:
        worst = min(lost, key=lambda duel: duel.peer.step_ms)
        beside = "; monetlite has no schedule that small"
        if worst.ours is not None:
            beside = f" against {_step(comparison, worst.ours)} for monetlite at {_peak(worst.ours)}"
        who = f"{worst.peer.title} is faster"
        if len(lost) > 1:
            who = f"{len(lost)} of {len(standing.duels)} are faster, most of all {worst.peer.title}"
        near = "" if worst.clear else ", which is within the spread"
        faults = f" ({', '.join(worst.peer.faults)})" if worst.peer.faults else ""
        return f"No: {who}{faults}, {_step(comparison, worst.peer)}{beside}{near}."
    if standing.ours is None:
        return "Nothing fits that was measured."
    if not standing.duels:
        return "Monetlite alone fits." if standing.too_large else "No other way to train was measured."
    unclear = sum(not duel.clear for duel in standing.duels)
    within = f" (by less than the spread in {unclear} of {len(standing.duels)})" if unclear else ""
    return f"Yes: monetlite is faster than every peer that fits, at an equal or smaller measured peak{within}."


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A run in words."""

    title: str
    notes: tuple[str, ...]
    peak: str
    reserved: str
    step: str
    spread: str
    gradients: str


def _rows(comparison: Comparison) -> Iterator[_Row]:
    for run in comparison.runs:
        spread = comparison.spread(run)
        difference = run.gradient_difference
        yield _Row(
            title=run.title,
            notes=(run.failure,) if run.failure else run.faults,
            peak=_peak(run),
            reserved="" if run.reserved_bytes is None else format_bytes(run.reserved_bytes),
            step=_step(comparison, run),
            spread="" if spread is None else f"{spread[0]:.2f}–{spread[1]:.2f}",
            gradients="" if difference is None else "same" if difference == 0 else f"{difference:.0e}",
        )


def _duels(comparison: Comparison) -> Iterator[tuple[str, str, str, str, str]]:
    """A peer, its peak and step, monetlite's step within that peak, and whether that is faster."""
    for duel in comparison.duels:
        ours = "no schedule" if duel.ours is None else f"{_step(comparison, duel.ours)} at {_peak(duel.ours)}"
        yield duel.peer.title, _peak(duel.peer), _step(comparison, duel.peer), ours, _outcome(duel)


def _who_fits(comparison: Comparison, standing: Standing) -> Iterator[str]:
    """The fastest setting of each peer within a budget; and who has none, with the smallest peak of each."""
    if standing.duels:
        fits = (f"{duel.peer.title} ({_step(comparison, duel.peer)})" for duel in standing.duels)
        yield f"Fits: {'; '.join(fits)}."
    if standing.too_large:
        yield f"Too large: {'; '.join(f'{TITLES[run.peer]} ({_peak(run)})' for run in standing.too_large)}."


def _outcome(duel: Duel) -> str:
    return f"{'' if duel.clear else '≈ '}{'faster' if duel.faster else 'slower'}"


def _title(comparison: Comparison, standing: Standing) -> str:
    size = format_bytes(standing.budget_bytes)
    share = f"{standing.budget} of plain training's peak, " if standing.budget.endswith("%") else ""
    ours = "no schedule of monetlite's"
    if standing.ours is not None:
        ours = f"monetlite {_step(comparison, standing.ours)} at {_peak(standing.ours)}"
    return f"Within {share}{size}: {ours}"


def _step(comparison: Comparison, run: PeerRun) -> str:
    ratio = comparison.ratio(run)
    if ratio is not None:
        return f"×{ratio:.2f}"
    return format_ms(run.step_ms) if run.times_ms else ""


def _peak(run: PeerRun) -> str:
    return "" if run.peak_bytes is None else format_bytes(run.peak_bytes)


def _reserves(comparison: Comparison) -> bool:
    return any(run.reserved_bytes is not None for run in comparison.runs)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def _markdown_row(cells: "list[str] | tuple[str, ...]") -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


__all__ = ["comparison_facts", "comparison_markdown", "heading", "print_comparison", "verdict"]
