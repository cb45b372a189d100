"""A schedule's choices along the model: fates of results, runs again and implementations, by operator."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from monetlite.core.graph import Operator, OperatorGraph, Phase
from monetlite.core.step_analysis import Fate, Holding, StepAnalysis
from monetlite.core.units import format_bytes
from monetlite.reporting.analysis import Analysis
from monetlite.reporting.palette import FILLS, Fill
from monetlite.reporting.plots.drawing import (
    INK,
    PALE,
    PAPER,
    add_axes,
    add_legend,
    bytes_axis,
    elided,
    heading,
    new_figure,
    stack_areas,
    styled,
)

MAX_COLUMNS = 240
"""More columns than this can't be told apart in a picture."""
COUNTER_BYTES = 8
"""Operators that write no more than one number (a counter, a scalar) have no column, unless all are like that."""


class When(StrEnum):
    """Kinds of runs of an operator and of those that belong to it."""

    FIRST = "forward"
    AGAIN = "again"
    BACKWARD = "backward"


@dataclass
class Column:
    """A forward operator, or some in a row.

    Attributes:
        name, module: of the first of them.
        bytes_of: their results by fate, in bytes.
        again: runs of them, or of operators derived from them, in the backward part.
        ways: number of runs by implementation, other than the default, and kind of run.
    """

    name: str
    module: str
    bytes_of: Counter[Fate] = field(default_factory=Counter)
    again: int = 0
    ways: Counter[tuple[str, When]] = field(default_factory=Counter)


class NamedColumns(NamedTuple):
    """Columns in a row that have one name: from `first` to the one before `after`."""

    name: str
    first: int
    after: int


WIDTH = 12.0
_LEFT, _RIGHT, _TOP, _BETWEEN = 1.85, 2.3, 1.05, 0.35
"""Margins, in inches."""
_BYTES_HEIGHT, _AGAIN_HEIGHT, _ROW_HEIGHT = 2.7, 0.8, 0.3
MAX_ROWS = 9
_NAMED_COLUMNS = 60
"""Largest number of columns that are all named."""
MIN_NAMES = 3
_LETTER, _LINE = 0.078, 0.14
"""Largest width of a letter of a label, and the height of a line, in inches."""
_LONGEST = 30

_FATES = {
    Fate.STORED: FILLS[Holding.STORED],
    Fate.STORED_THEN_RECOMPUTED: Fill("#6fa8dc", "////"),
    Fate.RECOMPUTED: FILLS[Holding.RECOMPUTED],
    Fate.FREED: Fill("#e8e8e8"),
}
"""Fates of a forward operator's results, in the order in which pictures stack them."""
_WHEN = {
    When.FIRST: FILLS[Holding.STORED],
    When.AGAIN: Fill(FILLS[Holding.RECOMPUTED].colour),
    When.BACKWARD: FILLS[Holding.GRADIENTS],
}


@styled()
def draw_choices(analysis: Analysis) -> Figure:
    """Three panels over the operators of the forward pass, in order (modules, where there are many).

    The bytes that each writes, by fate; the number of its runs again in the backward part; and the implementations
    other than the default that it, its re-runs and its gradient use.
    """
    operators = columns_of(analysis.scheduled)
    columns = in_at_most(operators)
    total = _merged(columns)
    ways: Counter[str] = Counter()
    for (name, _), count in total.ways.items():
        ways[name] += count
    rows = [name for name, _ in sorted(ways.items(), key=lambda item: (-item[1], item[0]))]
    others = rows[MAX_ROWS - 1 :] if len(rows) > MAX_ROWS else []
    shown = rows[: len(rows) - len(others)]

    width = WIDTH - _LEFT - _RIGHT
    named, rotation = _names(columns, width)
    longest = max((len(item.name) for item in named), default=0)
    bottom = 0.2 + (min(longest, _LONGEST) * _LETTER if rotation else 0.15)
    ways_height = max(1, len(shown) + bool(others)) * _ROW_HEIGHT
    height = _TOP + _BYTES_HEIGHT + _AGAIN_HEIGHT + ways_height + 2 * _BETWEEN + bottom
    figure = new_figure(WIDTH, height)
    title = (
        f"{analysis.title}: what a schedule for {format_bytes(analysis.schedule.budget_bytes)} keeps and runs again"
    )
    each = "" if len(columns) == len(operators) else f"; {len(operators)} operators in {len(columns)} columns"
    heading(figure, title, [analysis.figures, f"costs {analysis.costs}{each}"], _LEFT)

    at = bottom + ways_height + _BETWEEN
    lower = add_axes(figure, _LEFT, bottom, width, ways_height)
    middle = add_axes(figure, _LEFT, at, width, _AGAIN_HEIGHT, share_x=lower)
    upper = add_axes(figure, _LEFT, at + _AGAIN_HEIGHT + _BETWEEN, width, _BYTES_HEIGHT, share_x=lower)
    _draw_bytes(upper, columns)
    _draw_again(middle, columns, total.again)
    _draw_ways(lower, columns, shown, others, ways)
    _name_columns((upper, middle, lower), columns, named, rotation)
    met = [fate for fate in reversed(_FATES) if total.bytes_of[fate]]
    entries = [(_FATES[fate], f"{fate}: {format_bytes(total.bytes_of[fate])}") for fate in met]
    _legend(upper, entries, "results of the forward pass")
    if ways:
        words = {When.FIRST: "forward (top)", When.AGAIN: "again (middle)", When.BACKWARD: "gradient (bottom)"}
        _legend(lower, [(_WHEN[when], words[when]) for when in When], "not by default")
    return figure


def _draw_bytes(axes: Axes, columns: Sequence[Column]) -> None:
    edges = range(len(columns) + 1)
    layers = ((str(fate), [column.bytes_of[fate] for column in columns], fill) for fate, fill in _FATES.items())
    top = stack_areas(axes, layers, edges, 0.5)
    axes.vlines(edges[1:-1], 0, list(map(min, top, top[1:])), color=PAPER, linewidth=0.4)
    axes.set_ylim(0, max(top, default=0) * 1.05 or 1)
    bytes_axis(axes.yaxis, max(top, default=0), "written")


def _draw_again(axes: Axes, columns: Sequence[Column], runs: int) -> None:
    counts = [column.again for column in columns]
    axes.stairs(
        counts, range(len(columns) + 1), fill=True, facecolor=_WHEN[When.AGAIN].colour, edgecolor=INK, linewidth=0.4
    )
    axes.set_ylim(0, max(1, *counts) * 1.1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    axes.set_ylabel("runs again")
    axes.set_title(
        f"{runs} runs in the backward part" if runs else "nothing runs again", loc="left", size=8, color=PALE, pad=3
    )


def _draw_ways(
    axes: Axes, columns: Sequence[Column], shown: list[str], others: list[str], ways: Counter[str]
) -> None:
    """A row for each implementation, in three lanes: forward runs, runs again, gradients."""
    row_of = {name: number for number, name in enumerate(shown)} | dict.fromkeys(others, len(shown))
    labels = [f"{name} ({ways[name]})" for name in shown]
    if others:
        labels.append(f"{len(others)} more ({sum(ways[name] for name in others)})")
    for lane, when in enumerate(When):
        fill = _WHEN[when]
        cells: dict[int, set[int]] = {}
        for at, column in enumerate(columns):
            for name, of in column.ways:
                if of is when:
                    cells.setdefault(row_of[name], set()).add(at)
        for row, places in cells.items():
            axes.broken_barh(
                [(at, 1) for at in sorted(places)],
                (row + 0.08 + 0.28 * lane, 0.26),
                facecolor=fill.colour,
                linewidth=0,
            )
    axes.set_ylim(max(1, len(labels)), 0)
    axes.set_yticks(
        [row + 0.5 for row in range(len(labels))], [elided(label, _LONGEST) for label in labels], size=8
    )
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(labels)):
        axes.axhline(row, color="#dddddd", linewidth=0.6, zorder=0)
    if not labels:
        axes.set_yticks([])
        axes.text(
            0.5,
            0.5,
            "everything runs by its default implementation",
            ha="center",
            va="center",
            transform=axes.transAxes,
            color=PALE,
        )


def _names(columns: Sequence[Column], width: float) -> tuple[list[NamedColumns], int]:
    """Names along the axis, and their rotation.

    Few columns are named each; of more, the modules are, as deep in the model as their names can be read. Where
    that says next to nothing, columns at regular intervals are.
    """
    inch = width / max(1, len(columns))
    best: list[NamedColumns] = []
    best_covered = 0
    if len(columns) > _NAMED_COLUMNS:
        for depth in range(1, max(column.module.count(".") for column in columns) + 2):
            found = stretches_at(columns, depth)
            readable = [item for item in found if item.name and (item.after - item.first) * inch >= _LINE]
            covered = sum(item.after - item.first for item in readable)
            if len(readable) > len(best) and covered >= min(best_covered, 0.9 * len(columns)):
                best, best_covered = readable, covered
    if len(best) < MIN_NAMES:
        apart = -(-len(columns) // _NAMED_COLUMNS)
        return [NamedColumns(columns[at].name, at, at + 1) for at in range(0, len(columns), apart)], 90
    level = all(len(item.name) * _LETTER + 0.1 <= (item.after - item.first) * inch for item in best)
    return best, 0 if level else 90


def _name_columns(
    panels: Sequence[Axes], columns: Sequence[Column], named: Sequence[NamedColumns], rotation: int
) -> None:
    """Names below the lowest panel, and a shade behind every other stretch of all of them."""
    lowest = panels[-1]
    lowest.set_xlim(0, max(1, len(columns)))
    lowest.set_xticks(
        [(item.first + item.after) / 2 for item in named],
        [elided(item.name, _LONGEST) for item in named],
        rotation=rotation,
        size=8,
    )
    for axes in panels:
        axes.tick_params(axis="x", length=0, labelbottom=axes is lowest)
        for item in named[1::2]:
            if item.after > item.first + 1:
                axes.axvspan(item.first, item.after, color="#f4f4f4", linewidth=0, zorder=-1)


def _legend(axes: Axes, entries: Sequence[tuple[Fill, str]], title: str) -> None:
    sizes = {"handlelength": 1.4, "handleheight": 1.1, "fontsize": 7.5, "title_fontsize": 8.5}
    add_legend(axes, entries, title, (1.01, 1.02), **sizes)


def columns_of(side: StepAnalysis) -> tuple[Column, ...]:
    """One column for each operator of the forward pass, in order."""
    graph = side.graph
    place = _places(graph)
    order = sorted({at for at in place.values() if graph.operators[at].phase is Phase.FORWARD})
    columns = {at: Column(graph.operators[at].name, graph.operators[at].module) for at in order}
    for value in side.stays:
        writer = graph.writer[value]
        if graph.operators[writer].phase is Phase.FORWARD and writer in place:
            fate = side.fate(value)
            # An output is stored as well, whoever holds it.
            fate = fate if fate in _FATES else Fate.STORED
            columns[place[writer]].bytes_of[fate] += graph.values[value].size_bytes
    for step, (index, choice) in enumerate(side.timeline.steps):
        if index not in place:
            continue
        operator, column = graph.operators[index], columns[place[index]]
        when = When.FIRST if step < side.timeline.border else When.AGAIN
        if operator.phase is Phase.BACKWARD:
            when = When.BACKWARD
        column.again += when is When.AGAIN
        if choice != 0:
            column.ways[operator.implementations[choice].name, when] += 1
    return tuple(columns.values())


def _places(graph: OperatorGraph) -> dict[int, int]:
    """The operator of the forward pass that each operator belongs to.

    A derived operator (one that packs a mask) belongs to the operator that it reads from. A backward operator
    belongs to the operator of its module whose inputs or results it reads; else to that of the one before it.
    """
    forward = graph.mandatory_forward
    sizeable = [
        index
        for index in forward
        if any(graph.values[value].size_bytes > COUNTER_BYTES for value in graph.operators[index].writes)
    ]
    place = {index: index for index in sizeable or forward}
    of_module: dict[str, list[int]] = {}
    for index in place:
        of_module.setdefault(graph.operators[index].module, []).append(index)
    for index, operator in enumerate(graph.operators):
        if operator.optional and index not in place:
            chain = [index]
            while graph.operators[chain[-1]].optional and operator.implementations[0].reads:
                chain.append(graph.writer[graph.operators[chain[-1]].implementations[0].reads[0]])
            if chain[-1] in place:
                place[index] = place[chain[-1]]
    before: int | None = None
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.BACKWARD:
            before = _forward_of(graph, operator, of_module.get(operator.module, ()), before)
            if before is not None:
                place[index] = before
    return place


def _forward_of(
    graph: OperatorGraph, operator: Operator, candidates: Sequence[int], before: int | None
) -> int | None:
    read = set(operator.implementations[0].reads)
    for at in candidates:
        first = graph.operators[at].implementations[0]
        if not read.isdisjoint((*first.reads, *first.writes)):
            return at
    return candidates[-1] if candidates else before


def in_at_most(columns: Sequence[Column], most: int = MAX_COLUMNS) -> tuple[Column, ...]:
    """At most so many columns. Of more operators, as many in a row share each."""
    share = max(1, -(-len(columns) // most))
    return tuple(_merged(columns[at : at + share]) for at in range(0, len(columns), share))


def stretches_at(columns: Sequence[Column], depth: int) -> list[NamedColumns]:
    """Columns in a row whose modules have the same first levels."""
    names = [".".join(column.module.split(".")[:depth]) for column in columns]
    firsts = [at for at, name in enumerate(names) if at == 0 or name != names[at - 1]]
    return [NamedColumns(names[first], first, after) for first, after in pairwise([*firsts, len(names)])]


def _merged(columns: Sequence[Column]) -> Column:
    made = Column(columns[0].name, columns[0].module)
    for column in columns:
        made.bytes_of += column.bytes_of
        made.again += column.again
        made.ways += column.ways
    return made


def choices_rows(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Every operator of the forward pass: its results in bytes by fate, and its runs and its gradient's."""
    for column in columns_of(analysis.scheduled):
        ways = {
            when: " ".join(f"{name}×{count}" for (name, of), count in sorted(column.ways.items()) if of is when)
            for when in When
        }
        yield {
            "operator": column.name,
            "module": column.module,
            **{f"{fate.name.lower()}_bytes": column.bytes_of[fate] for fate in _FATES},
            "runs_again": column.again,
            **{f"{when}_implementations": ways[when] for when in When},
        }


def choices_facts(analysis: Analysis) -> dict[str, Any]:
    """The choices in all, for `--json`: bytes by fate, runs again, runs by implementation."""
    columns = columns_of(analysis.scheduled)
    total = _merged(columns)
    return {
        "forward_operators": len(columns),
        **{f"{fate.name.lower()}_bytes": total.bytes_of[fate] for fate in _FATES},
        "runs_again": total.again,
        "implementations": [
            {"name": name, "when": str(when), "runs": count} for (name, when), count in sorted(total.ways.items())
        ],
    }
