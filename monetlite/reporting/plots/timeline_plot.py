"""The memory of one training step, plain and scheduled, stacked by purpose: as a picture, rows and facts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from monetlite.core.step_analysis import Holding, StepAnalysis
from monetlite.core.steps import step_number
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import Analysis, budget_in_words
from monetlite.reporting.palette import FILLS
from monetlite.reporting.plots.drawing import (
    BUDGET,
    INK,
    PALE,
    PAPER,
    add_axes,
    add_legend,
    add_note,
    bytes_axis,
    fitted,
    heading,
    new_figure,
    stack_areas,
    styled,
    time_axis,
)

WIDTH, HEIGHT = 11.0, 7.0
_LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 0.75, 2.35, 1.35, 0.55, 0.6
"""Margins, in inches."""
MAX_COLUMNS = 2000
"""Columns that a picture can show."""
_HEADROOM = 1.17
"""Height of the panels over the largest peak, so that its label fits."""


@styled()
def draw_timeline(analysis: Analysis, *, by_time: bool = True) -> Figure:
    """Two panels, plain training's above the schedule's, to the same scales.

    Args:
        analysis: the schedule and plain training.
        by_time: along the step's time; else along the operators that are run, each as wide as any other.
    """
    figure = new_figure(WIDTH, HEIGHT)
    budget_bytes = analysis.schedule.budget_bytes
    title = f"{analysis.title}: a training step within {budget_in_words(analysis.schedule)}"
    heading(figure, title, [analysis.figures, f"costs {analysis.costs}"], _LEFT)
    height = (HEIGHT - _TOP - _BOTTOM - _BETWEEN) / 2
    width = WIDTH - _LEFT - _RIGHT
    upper = add_axes(figure, _LEFT, _BOTTOM + height + _BETWEEN, width, height)
    lower = add_axes(figure, _LEFT, _BOTTOM, width, height, share_x=upper)
    sides = {"plain training": analysis.plain, "scheduled": analysis.scheduled}
    widths = [
        side.timeline.latencies_ms if by_time else [1.0] * len(side.timeline.steps) for side in sides.values()
    ]
    extent = max(map(sum, widths)) or 1.0
    # A budget far above both peaks is left out of sight rather than make everything else small.
    highest_bytes = max(analysis.plain.peak_bytes, analysis.scheduled.peak_bytes)
    if budget_bytes <= 1.5 * highest_bytes:
        highest_bytes = max(highest_bytes, budget_bytes)
    for axes, (label, side), of_steps in zip((upper, lower), sides.items(), widths, strict=True):
        axes.set_xlim(0, extent)
        axes.set_ylim(0, highest_bytes * _HEADROOM)
        edges, steps = columns(of_steps, side.timeline.memory_bytes, extent)
        layers = (
            (str(holding), [of_step[step] for step in steps], FILLS[holding])
            for holding, of_step in side.bytes_of.items()
            if any(of_step)
        )
        stack_areas(axes, layers, edges, 0.6)
        _mark_budget(axes, budget_bytes)
        _mark_phases(axes, side, by_time=by_time)
        peak = steps.index(side.timeline.peak_step)
        _mark_peak(figure, axes, side, (edges[peak] + edges[peak + 1]) / 2, budget_bytes)
        figures = f"peak {format_bytes(side.peak_bytes)}, step {format_ms(side.latency_ms)}"
        axes.set_title(f"{label}: {figures}", loc="left", weight="bold", pad=16)
        bytes_axis(axes.yaxis, highest_bytes, "memory")
    upper.tick_params(labelbottom=False)
    if by_time:
        time_axis(lower.xaxis, extent, "time within the step")
    else:
        lower.set_xlabel("operators run")
    _legend(figure, analysis)
    return figure


def columns(widths: Sequence[float], memory_bytes: Sequence[int], extent: float) -> tuple[list[float], list[int]]:
    """Columns for steps of these widths, on an axis that is `extent` long: their edges, and a step for each.

    Steps too narrow to be seen share a column, which shows the one of them that holds most memory.
    """
    least = extent / MAX_COLUMNS
    ends = np.cumsum(widths)
    begins = ends - np.asarray(widths)
    # The middle of a wide step is in a bin that no other's is in.
    firsts = np.flatnonzero(np.diff((begins + ends) / 2 // least, prepend=-1))
    spaced = np.arange(len(firsts) + 1) * least
    edges = np.maximum.accumulate(np.append(begins[firsts], ends[-1]) - spaced) + spaced
    memory = np.asarray(memory_bytes)
    steps = [int(at + memory[at:after].argmax()) for at, after in pairwise([*firsts, len(widths)])]
    return edges.tolist(), steps


def _mark_budget(axes: Axes, budget_bytes: int) -> None:
    if budget_bytes > axes.get_ylim()[1]:
        return
    # A pale line below makes the dashes stand out on dark areas.
    axes.axhline(budget_bytes, color=PAPER, linewidth=1.9)
    axes.axhline(budget_bytes, color=BUDGET, linewidth=1.3, linestyle=(0, (5, 2)))
    text, at = f"budget\n{format_bytes(budget_bytes)}", (1, budget_bytes)
    add_note(axes, text, at, (8, 0), xycoords=axes.get_yaxis_transform(), color=BUDGET, va="center", size=8.5)


def _mark_phases(axes: Axes, side: StepAnalysis, *, by_time: bool) -> None:
    """A line where the backward pass begins, and the names of both above the panel."""
    timeline, begins = side.timeline, side.timeline.border
    if not 0 < begins < len(timeline.steps):
        return
    at = sum(timeline.latencies_ms[:begins]) if by_time else float(begins)
    axes.axvline(at, color=PAPER, linewidth=1.2)
    axes.axvline(at, color=INK, linewidth=1.0, linestyle=(0, (1, 1.5)))
    for text, side_of_line, offset in (("forward ◂", "right", -3), ("▸ backward", "left", 3)):
        style = {"ha": side_of_line, "size": 8, "color": PALE}
        add_note(axes, text, (at, 1), (offset, 3), xycoords=axes.get_xaxis_transform(), **style)


def _mark_peak(figure: Figure, axes: Axes, side: StepAnalysis, at: float, budget_bytes: int) -> None:
    """A ring at the peak, and a label clear of the lines of the budget and the border."""
    timeline = side.timeline
    share = at / axes.get_xlim()[1]
    rooms = {True: 1 - share, False: share}
    onward = timeline.peak_step >= side.timeline.border
    text = f"{format_bytes(side.peak_bytes)} at {side.peak_operator}"
    width = WIDTH - _LEFT - _RIGHT
    if fitted(figure, text, rooms[onward] * width, size=8.5, weight="bold") != text:
        onward = share < 0.5
        text = fitted(figure, text, rooms[onward] * width, size=8.5, weight="bold")
    room_bytes = 0.1 * axes.get_ylim()[1]
    base_bytes = budget_bytes if 0 <= budget_bytes - side.peak_bytes < room_bytes else side.peak_bytes
    axes.plot(
        [at],
        [side.peak_bytes],
        "o",
        markersize=6,
        markerfacecolor=PAPER,
        markeredgecolor=INK,
        clip_on=False,
        zorder=5,
    )
    add_note(
        axes,
        text,
        (at, base_bytes),
        (4 if onward else -4, 7),
        ha="left" if onward else "right",
        va="bottom",
        weight="bold",
        size=8.5,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},
        zorder=6,
    )


def _legend(figure: Figure, analysis: Analysis) -> None:
    """Meanings of the areas, in the order in which they are stacked."""
    sides = (analysis.plain, analysis.scheduled)
    met = [holding for holding in reversed(Holding) if any(any(side.bytes_of[holding]) for side in sides)]
    width, height = figure.get_size_inches()
    add_legend(
        figure,
        [(FILLS[holding], str(holding)) for holding in met],
        "held for",
        ((WIDTH - _RIGHT + 0.7) / width, 1 - (_TOP - 0.1) / height),
        handlelength=1.6,
        handleheight=1.2,
    )


def timeline_rows(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Every step of plain training and of the schedule: its operator, time, and memory in bytes by purpose."""
    for label, side in (("plain", analysis.plain), ("scheduled", analysis.scheduled)):
        timeline, graph = side.timeline, side.graph
        begins = (0.0, *accumulate(timeline.latencies_ms))
        for at, (index, choice) in enumerate(timeline.steps):
            operator = graph.operators[index]
            yield {
                "run": label,
                "step": step_number(at),
                "operator": operator.name,
                "implementation": operator.implementations[choice].name,
                "begins_ms": begins[at],
                "latency_ms": timeline.latencies_ms[at],
                "memory_bytes": timeline.memory_bytes[at],
                **{f"{holding.replace(' ', '_')}_bytes": side.bytes_of[holding][at] for holding in Holding},
            }


def timeline_facts(analysis: Analysis) -> dict[str, Any]:
    """The peaks, their operators, and the memory there in bytes by purpose, for `--json`."""

    def facts(side: StepAnalysis) -> dict[str, Any]:
        timeline = side.timeline
        return {
            "steps": len(timeline.steps),
            "backward_begins": step_number(side.timeline.border),
            "latency_ms": side.latency_ms,
            "peak_bytes": side.peak_bytes,
            "peak_step": step_number(timeline.peak_step),
            "peak_operator": side.peak_operator,
            "peak_holds_bytes": {str(holding): size for holding, size in side.peak_bytes_of.items()},
        }

    return {"plain": facts(analysis.plain), "scheduled": facts(analysis.scheduled)}
