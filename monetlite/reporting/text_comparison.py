"""The text of `monetlite compare`: the same figures for the terminal, as Markdown and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from monetlite.checking.comparison.peer_runs import TITLES, Comparison, Duel, Peer, PeerRun, Standing
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.text_tables import figures_table, markdown_table

NOTES = (
    "Step and spread (fastest to slowest) are over plain training's median step. Gradients: the largest relative "
    "difference from plain training's, from the same seed. ≈ marks times whose middle halves overlap."
)

BESIDE = "Each of them beside monetlite's fastest at an equal or smaller measured peak"
_TOLD = "model inputs device environment repeats time_limit tolerance autocast"
DUEL_COLUMNS = ("", "peak", "step", "monetlite", "")


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
        **{name: getattr(comparison, name) for name in _TOLD.split()},
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


def finished_in_words(run: PeerRun, ratio: float | None) -> str:
    """One run as it was measured, in a line: its peak, a single step, and what differs."""
    if run.failure:
        return f"{run.title}: {run.failure}"
    step = [] if not run.times_ms else [f"one step {format_ms(run.step_ms)}"]
    if step and ratio is not None and run.peer is not Peer.PLAIN:
        step = [f"one step ×{ratio:.2f}"]
    return f"{run.title}: {', '.join([f'peak {_peak(run)}'] * bool(run.peak_bytes) + step + list(run.faults))}"


def left_out(peers: Sequence[str]) -> str:
    """The methods that a comparison did not measure, and the options that add to it."""
    return f"Left out: {', '.join(peers)} (--peers all); other budgets (--budgets 70%,50%,40%)."


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print every run, and the fastest at each budget."""
    for line in heading(comparison):
        console.print(escape(line), style="bold" if line.startswith(comparison.model) else "dim")
    rows = [("\n  ".join((title, *notes)), *cells) for title, *cells, notes in _rows(comparison)]
    console.print()
    console.print(figures_table(("", *_columns(comparison)), rows))
    if comparison.duels:
        console.print()
        console.print(BESIDE, style="bold")
        console.print(figures_table(DUEL_COLUMNS, _duels(comparison)))
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
    """The same as Markdown, with the settings that were tried beside."""
    first, *others = heading(comparison)
    lines = [f"# {first}", "", *(f"{line}  " for line in others), "", NOTES, ""]
    rows = [(title, *cells, "; ".join(notes)) for title, *cells, notes in _rows(comparison)]
    left = ("", "spread", "what differs")
    lines += markdown_table(("", *_columns(comparison), "what differs"), rows, left)
    if comparison.duels:
        lines += ["", f"**{BESIDE}**", "", *markdown_table(DUEL_COLUMNS, _duels(comparison))]
    for standing in comparison.standings:
        lines += ["", f"**{_title(comparison, standing)}.** {verdict(comparison, standing)}"]
        for line in _who_fits(comparison, standing):
            lines += ["", line]
    if comparison.tried:
        tried = (f"{run.title} ({run.failure or _peak(run)})" for run in comparison.tried)
        lines += ["", f"Settings tried that were no better: {'; '.join(tried)}."]
    return "\n".join([*lines, ""])


def heading(comparison: Comparison) -> list[str]:
    """The model, the hardware, the versions and plain training, in lines."""
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
    """A sentence on monetlite beside every peer that fits, at no larger a measured peak."""
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


def _columns(comparison: Comparison) -> tuple[str, ...]:
    return ("peak", *(["reserved"] if _reserves(comparison) else []), "step", "spread", "gradients")


def _rows(comparison: Comparison) -> Iterator[tuple[Any, ...]]:
    """The title of each run, its cells, and the notes on it."""
    for run in comparison.runs:
        spread = comparison.spread(run)
        difference = run.gradient_difference
        reserved = "" if run.reserved_bytes is None else format_bytes(run.reserved_bytes)
        yield (
            run.title,
            _peak(run),
            *([reserved] if _reserves(comparison) else []),
            _step(comparison, run),
            "" if spread is None else f"{spread[0]:.2f}–{spread[1]:.2f}",
            "" if difference is None else "same" if difference == 0 else f"{difference:.0e}",
            (run.failure,) if run.failure else run.faults,
        )


def _duels(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """A peer, its peak and step, monetlite's step within that peak, and the faster of the two."""
    for duel in comparison.duels:
        ours = "no schedule" if duel.ours is None else f"{_step(comparison, duel.ours)} at {_peak(duel.ours)}"
        outcome = f"{'' if duel.clear else '≈ '}{'faster' if duel.faster else 'slower'}"
        yield duel.peer.title, _peak(duel.peer), _step(comparison, duel.peer), ours, outcome


def _who_fits(comparison: Comparison, standing: Standing) -> Iterator[str]:
    """The fastest setting of each peer within a budget, and the smallest peak of each peer that has none."""
    if standing.duels:
        fits = (f"{duel.peer.title} ({_step(comparison, duel.peer)})" for duel in standing.duels)
        yield f"Fits: {'; '.join(fits)}."
    if standing.too_large:
        yield f"Too large: {'; '.join(f'{TITLES[run.peer]} ({_peak(run)})' for run in standing.too_large)}."


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
