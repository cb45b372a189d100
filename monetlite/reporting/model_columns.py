"""A schedule's choices along the model: fates of results, runs again and implementations, by operator."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

from monetlite.core.graph import Operator, OperatorGraph, Phase
from monetlite.reporting.analysis import Analysis, Fate, StepAnalysis

MAX_COLUMNS = 240
"""More columns than this can't be told apart in a picture."""
COUNTER_BYTES = 8
"""Operators that write no more than one number (a counter, a scalar) have no column, unless all are like that."""

FATES = {
    Fate.STORED: "stored",
    Fate.STORED_THEN_RECOMPUTED: "stored_then_recomputed",
    Fate.RECOMPUTED: "recomputed",
    Fate.FREED: "freed",
}
"""Fates of a forward operator's results, in the order in which pictures stack them, and their names in files."""


class When(StrEnum):
    """Kinds of runs of an operator and of those that belong to it."""

    FIRST = "forward"
    AGAIN = "again"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A forward operator, or some in a row.

    Attributes:
        name: the operator's, or the module that the operators belong to; module: of the first of them.
        operators: how many operators of the forward pass.
        bytes_of: their results by fate, in bytes.
        again: runs of them, or of operators derived from them, in the backward part.
        ways: number of runs by implementation, other than the default, and kind of run.
    """

    name: str
    module: str
    operators: int = 1
    bytes_of: Mapping[Fate, int] = field(default_factory=dict)
    again: int = 0
    ways: Mapping[tuple[str, When], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Columns in a row that are of one module: from `first` to the one before `after`."""

    name: str
    first: int
    after: int


def columns_of(side: StepAnalysis) -> tuple[Column, ...]:
    """One column for each operator of the forward pass, in order."""
    graph = side.graph
    place = _places(graph)
    order = sorted({at for at in place.values() if graph.operators[at].phase is Phase.FORWARD})
    bytes_of: dict[int, Counter[Fate]] = {at: Counter() for at in order}
    again: Counter[int] = Counter()
    ways: dict[int, Counter[tuple[str, When]]] = {at: Counter() for at in order}
    for value in side.stays:
        writer = graph.writer[value]
        if graph.operators[writer].phase is Phase.FORWARD and writer in place:
            fate = side.fate(value)
            # An output is stored as well, whoever holds it.
            bytes_of[place[writer]][fate if fate in FATES else Fate.STORED] += graph.values[value].size_bytes
    for step, (index, choice) in enumerate(side.timeline.steps):
        at = place.get(index)
        if at is None:
            continue
        operator = graph.operators[index]
        when = When.FIRST if step < side.border else When.AGAIN
        if operator.phase is Phase.BACKWARD:
            when = When.BACKWARD
        again[at] += when is When.AGAIN
        if choice != 0:
            ways[at][operator.implementations[choice].name, when] += 1
    return tuple(
        Column(
            name=graph.operators[at].name,
            module=graph.operators[at].module,
            bytes_of=dict(bytes_of[at]),
            again=again[at],
            ways=dict(ways[at]),
        )
        for at in order
    )


def _places(graph: OperatorGraph) -> dict[int, int]:
    """The operator of the forward pass that each operator belongs to.

    A derived operator (one that packs a mask) belongs to the operator that it reads from. A backward operator
    belongs to the operator of its module whose inputs or results it reads; else to that of the one before it.
    """
    forward = [index for index, op in enumerate(graph.operators) if op.phase is Phase.FORWARD and not op.optional]
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
    """At most so many columns. Of more operators, neighbours of one module share a column.

    The modules are those deep in the model as far as their number allows; where one level has too many and the
    one above it few, several modules in a row share a column.
    """
    if len(columns) <= most:
        return tuple(columns)
    stretches = [Stretch(name=column.name, first=at, after=at + 1) for at, column in enumerate(columns)]
    for depth in range(depth_of(columns), 0, -1):
        coarser = stretches_at(columns, depth)
        if len(coarser) <= most:
            if len(coarser) >= most // 4:
                return tuple(_merged(columns[item.first : item.after], item.name) for item in coarser)
            break
        stretches = coarser
    share = -(-len(stretches) // most)
    pieces = [stretches[at : at + share] for at in range(0, len(stretches), share)]
    return tuple(_merged(columns[piece[0].first : piece[-1].after], piece[0].name) for piece in pieces)


def depth_of(columns: Sequence[Column]) -> int:
    """Number of levels of the deepest module's path."""
    return max((column.module.count(".") + 1 for column in columns), default=1)


def stretches_at(columns: Sequence[Column], depth: int) -> list[Stretch]:
    """Columns in a row whose modules have the same first levels."""
    stretches = []
    first = 0
    for name, members in groupby(".".join(column.module.split(".")[:depth]) for column in columns):
        after = first + len(list(members))
        stretches.append(Stretch(name=name, first=first, after=after))
        first = after
    return stretches


def _merged(columns: Sequence[Column], name: str) -> Column:
    bytes_of: Counter[Fate] = Counter()
    ways: Counter[tuple[str, When]] = Counter()
    for column in columns:
        bytes_of.update(column.bytes_of)
        ways.update(column.ways)
    return Column(
        name=name or columns[0].name,
        module=columns[0].module,
        operators=sum(column.operators for column in columns),
        bytes_of=dict(bytes_of),
        again=sum(column.again for column in columns),
        ways=dict(ways),
    )


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
            **{f"{name}_bytes": column.bytes_of.get(fate, 0) for fate, name in FATES.items()},
            "runs_again": column.again,
            **{f"{when}_implementations": ways[when] for when in When},
        }


def choices_facts(analysis: Analysis) -> dict[str, Any]:
    """The choices in all, for `--json`: bytes by fate, runs again, runs by implementation."""
    total = _merged(columns_of(analysis.scheduled), analysis.schedule.name)
    return {
        "forward_operators": total.operators,
        **{f"{name}_bytes": total.bytes_of.get(fate, 0) for fate, name in FATES.items()},
        "runs_again": total.again,
        "implementations": [
            {"name": name, "when": str(when), "runs": count} for (name, when), count in sorted(total.ways.items())
        ],
    }
