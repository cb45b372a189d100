"""Measured peak against relative step time: monetlite's line, and every other way to train."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from monetlite.checking.comparison.peer_runs import BY_MONETLITE, TITLES, Comparison, Peer, PeerRun
from monetlite.reporting.plots.drawing import (
    INK,
    PALE,
    PAPER,
    PointStyle,
    add_axes,
    add_note,
    bytes_axis,
    elided,
    heading,
    new_figure,
    save_figure,
    styled,
)
from monetlite.reporting.plots.point_labels import Label, place_labels
from monetlite.reporting.text_comparison import heading as lines_of

WIDTH, HEIGHT = 10.0, 6.8
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.8, 0.35, 1.4, 0.85
_WIDE = 3.0
"""Times that differ by more than this factor are shown on a logarithmic scale."""
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)


_Line: TypeAlias = list[tuple[float, float]]


_STYLES = {
    Peer.PLAIN: PointStyle(INK, "*"),
    Peer.CHECKPOINT: PointStyle("#222222", "X"),
    Peer.SEGMENTS: PointStyle("#7a5195", "P"),
    Peer.SELECTIVE: PointStyle("#a67c00", "D"),
    Peer.TILED_LOSS: PointStyle("#2f6f4f", "h"),
    Peer.AUTO_SAC: PointStyle("#8c564b", "p"),
    Peer.AOT_EAGER: PointStyle("#6b6b6b", "<"),
    Peer.INDUCTOR: PointStyle("#b00020", ">"),
    Peer.CHECKMATE: PointStyle("#d55e00", "s", "--"),
    Peer.GIST: PointStyle("#1b8a6b", "^", "-."),
    Peer.MONETLITE: PointStyle("#0b5394", "o", "-"),
}
"""Colours that colour-blind people tell apart, and a marker each for everybody else."""
_COMPILED = PointStyle("#4a90d9", "v", ":")
"""Schedules that Inductor compiles: a line of their own, since they run at another speed."""


def save_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write the picture in the format that the file's ending names (png, svg, pdf), atomically.

    Raises:
        ScheduleFileError: the file can't be written.
    """
    save_figure(draw_comparison(comparison), path, f"{comparison.model}: ways to train, measured side by side")


@styled()
def draw_comparison(comparison: Comparison) -> Figure:
    """A point for each way to train in each setting that tables show; hollow if the step is another one."""
    figure = new_figure(WIDTH, HEIGHT)
    title, *lines = lines_of(comparison)
    heading(figure, elided(title, 95), [elided(line, 150) for line in lines], _LEFT)
    axes = add_axes(figure, _LEFT, _BOTTOM, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)
    shown = [run for run in comparison.runs if run.times_ms and run.peak_bytes is not None]
    if not shown:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing ran", ha="center", va="center")
        return figure
    unit_ms = comparison.plain.step_ms if comparison.plain.times_ms else 1.0
    _limit(axes, shown, unit_ms, relative=bool(comparison.plain.times_ms))
    _mark_budgets(axes, comparison)
    drawn = _mark_plain(axes, comparison.plain, unit_ms)
    for of in _series(shown):
        drawn += _draw(axes, of, unit_ms)
    place_labels(figure, axes, _labels(shown, unit_ms), drawn)
    largest = axes.get_xlim()[1]
    bytes_axis(axes.xaxis, largest, "measured peak of the whole step")
    axes.set_ylabel("step time over plain training's" if comparison.plain.times_ms else "step time (ms)")
    note = "Points are medians, with the middle half of the timed steps."
    if any(run.faults for run in shown):
        note += " Hollow: the step is not plain training's (other statistics, masks or gradients; see the table)."
    figure.text(_LEFT / WIDTH, 0.15 / HEIGHT, note, color="#444444", size=8)
    return figure


def _series(runs: Sequence[PeerRun]) -> list[list[PeerRun]]:
    """Runs of one style, by their peaks: a peer's, and of schedules those that are compiled apart."""
    found: dict[tuple[Peer, str], list[PeerRun]] = {}
    for run in sorted(runs, key=lambda run: (list(Peer).index(run.peer), run.label, run.peak_bytes or 0)):
        found.setdefault((run.peer, run.label if run.peer in BY_MONETLITE else ""), []).append(run)
    return list(found.values())


def _style(run: PeerRun) -> PointStyle:
    return _COMPILED if run.peer in BY_MONETLITE and run.label else _STYLES[run.peer]


def _limit(axes: Axes, runs: Sequence[PeerRun], unit_ms: float, *, relative: bool) -> None:
    peaks = [run.peak_bytes or 0 for run in runs]
    times = [edge / unit_ms for run in runs for edge in (*run.middle_half_ms, run.step_ms)]
    wide = (max(peaks) - min(peaks)) or max(peaks)
    axes.set_xlim(min(peaks) - 0.08 * wide, max(peaks) + 0.12 * wide)
    low, high = min(times), max(times)
    if high > _WIDE * low:
        axes.set_yscale("log")
        margin = (high / low) ** 0.08
        axes.set_ylim(low / margin, high * margin)
        if relative:
            axes.yaxis.set_major_locator(
                FixedLocator([tick for tick in _TICKS if low / margin <= tick <= high * margin])
            )
            axes.yaxis.set_minor_locator(NullLocator())
    else:
        tall = (high - low) or high
        axes.set_ylim(low - 0.08 * tall, high + 0.1 * tall)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda step, _: f"×{step:g}" if relative else f"{step:g}"))


def _mark_budgets(axes: Axes, comparison: Comparison) -> None:
    left, right = axes.get_xlim()
    for standing in comparison.standings:
        if left < standing.budget_bytes < right:
            axes.axvline(standing.budget_bytes, color="#c8c8c8", linewidth=0.8, zorder=1)
            at, style = (standing.budget_bytes, 1), {"ha": "center", "size": 8, "color": PALE}
            add_note(axes, standing.budget, at, (0, 3), xycoords=axes.get_xaxis_transform(), **style)


def _mark_plain(axes: Axes, plain: PeerRun, unit_ms: float) -> list[_Line]:
    """Lines across the picture through plain training's point, which are returned."""
    if not plain.times_ms or plain.peak_bytes is None:
        return []
    x, y = float(plain.peak_bytes), plain.step_ms / unit_ms
    axes.axhline(y, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.axvline(x, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    return [[(axes.get_xlim()[0], y), (axes.get_xlim()[1], y)], [(x, axes.get_ylim()[0]), (x, axes.get_ylim()[1])]]


def _draw(axes: Axes, runs: Sequence[PeerRun], unit_ms: float) -> list[_Line]:
    """One series of runs, at least one; returns the lines that are drawn."""
    drawn: list[_Line] = []
    for run in runs:
        style = _style(run)
        low, high = (edge / unit_ms for edge in run.middle_half_ms)
        x, y = float(run.peak_bytes or 0), run.step_ms / unit_ms
        axes.plot([x, x], [low, high], color=style.colour, linewidth=0.8, alpha=0.6, zorder=3)
        drawn.append([(x, low), (x, high)])
        axes.plot(
            [x],
            [y],
            style.marker,
            markersize=12 if style.marker == "*" else 7,
            markerfacecolor=PAPER if run.faults else style.colour,
            markeredgecolor=style.colour,
            markeredgewidth=1.3,
            zorder=5 if run.peer is Peer.MONETLITE else 4,
        )
    if (style := _style(runs[0])).line:
        drawn.append([(float(run.peak_bytes or 0), run.step_ms / unit_ms) for run in runs])
        axes.plot(
            *zip(*drawn[-1]), style.line, color=style.colour, linewidth=2 if style.line == "-" else 1.2, zorder=2
        )
    return drawn


def _labels(runs: Sequence[PeerRun], unit_ms: float) -> list[Label]:
    """One for each point; one for all that a line joins, at its smallest peak."""
    found = []
    for of in _series(runs):
        for run in of[:1] if _style(of[0]).line else of:
            text = run.label or TITLES[run.peer]
            found.append(Label(text=text, x=float(run.peak_bytes or 0), y=run.step_ms / unit_ms))
    return found
