"""A problem as arrays for compiled code: tables of what it is, and the places where moves may change it.

The implementations of an operator become two levels. A *group* reads and writes the same values: the choice of a
group changes what has to be in memory. Within a group, *entries* differ in latency, workspace and what they
overwrite. Only the step itself feels that, so the best entry of a step follows from the memory that is left there.

| here | MONeT (Shah et al., ICLR 2021) |
| --- | --- |
| group of a backward operator | the choice of recipe, m with the values in its dependence set |
| entry | the implementation of a recipe, δ |
| value kept at the end of the forward pass | s at the last forward stage |
| value re-run | r |
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy

from monetlite.core.graph import Operator, OperatorGraph, Phase
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.annealing.arrays import (
    BACKWARD,
    EARLY,
    FORWARD,
    GROUP_READS,
    GROUP_READS_END,
    GROUP_WRITES,
    GROUP_WRITES_END,
    LATE,
    OPERATOR_GROUPS,
    OPERATOR_GROUPS_END,
    PART_AGAIN,
    PART_FIRST,
    VALUE_WRITER,
    Integers,
    Moves,
    Tables,
)
from monetlite.solving.problem import Option, Problem

TINY_FRACTION = 100_000
"""Values smaller than the plain peak divided by this are never dropped."""
MAX_ALIKE = 24
"""Alike operators that moves may copy from: enough of them, and few enough for graphs of thousands."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatProblem:
    """A problem as arrays.

    Attributes:
        problem: its origin.
        tables: the same as arrays.
        droppable: forward values that may be dropped and computed again: not held to the end of the step, not
            written by an operator that can't be run again, not tiny beside the plain peak.
        group_of: for each operator, the group of each of its implementations; −1 if it can never run legally.
        plain_peak_bytes: of plain training.
    """

    problem: Problem
    tables: Tables
    droppable: Integers
    group_of: tuple[tuple[int, ...], ...]
    plain_peak_bytes: int

    @property
    def graph(self) -> OperatorGraph:
        return self.problem.graph

    @property
    def value_count(self) -> int:
        return len(self.graph.values)

    @property
    def operator_count(self) -> int:
        return len(self.graph.operators)

    @cached_property
    def mean_ms(self) -> float:
        """Least latency of a step over its operators; 1 if that is nothing."""
        return self.problem.least_latency_ms / max(1, self.operator_count) or 1.0

    @cached_property
    def moves(self) -> Moves:
        """The places where moves may change something."""
        return _moves(self)


class _OptionRow(NamedTuple):
    """A row of `Tables.options`."""

    latency_ms: float
    extra_bytes: int
    overwrites: tuple[int, ...]
    implementation: int


class _Group(NamedTuple):
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    first: list[_OptionRow]
    again: list[_OptionRow]


@lru_cache(maxsize=2)
def flatten(problem: Problem) -> FlatProblem:
    """Lay a problem out as arrays.

    Of each group, only entries are kept that no other beats on latency, memory and conditions (what has to die to
    be overwritten) at once; for first runs and later runs apart.
    """
    graph = problem.graph
    plain = simulate(problem.profile, plain_steps(graph))
    groups: list[_Group] = []
    counts: list[int] = []
    group_of: list[tuple[int, ...]] = []
    for operator, options in zip(graph.operators, problem.legal_options, strict=True):
        members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Option]] = {}
        for option in options:
            writes = tuple(dict.fromkeys(operator.implementations[option.choice].writes))
            members.setdefault((tuple(sorted(option.reads)), writes), []).append(option)
        group_of_choice = [-1] * len(operator.implementations)
        for (reads, writes), of in members.items():
            for option in of:
                group_of_choice[option.choice] = len(groups)
            first, again = (_pareto(_entry(operator, option, later) for option in of) for later in (False, True))
            groups.append(_Group(reads, writes, first, again))
        counts.append(len(members))
        group_of.append(tuple(group_of_choice))
    writer = {value: makers[0] for value, makers in enumerate(problem.producers) if makers}
    return FlatProblem(
        problem=problem,
        tables=_tables(graph, writer, counts, groups),
        droppable=_droppable(graph, writer, plain.peak_bytes // TINY_FRACTION),
        group_of=tuple(group_of),
        plain_peak_bytes=plain.peak_bytes,
    )


def _entry(operator: Operator, option: Option, again: bool) -> _OptionRow:
    return _OptionRow(
        option.again_ms if again else option.first_ms,
        option.again_extra_bytes if again else option.first_extra_bytes,
        operator.implementations[option.choice].overwrites,
        option.choice,
    )


def _pareto(entries: Iterable[_OptionRow]) -> list[_OptionRow]:
    """Entries that none beats, fastest first."""
    kept: list[_OptionRow] = []
    for entry in sorted(entries, key=lambda entry: (entry.latency_ms, entry.extra_bytes, len(entry.overwrites))):
        if not any(
            better.extra_bytes <= entry.extra_bytes and set(better.overwrites) <= set(entry.overwrites)
            for better in kept
        ):
            kept.append(entry)
    return kept


def _tables(graph: OperatorGraph, writer: dict[int, int], counts: list[int], groups: list[_Group]) -> Tables:
    readers: list[list[int]] = [[] for _ in graph.values]
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.FORWARD:
            for value in _reads(operator):
                readers[value].append(index)
    lists: list[int] = []

    def listed(items: Iterable[int]) -> tuple[int, int]:
        start = len(lists)
        lists.extend(items)
        return start, len(lists)

    values = [
        (value.size_bytes, int(value.held), writer.get(index, -1), *listed(readers[index]))
        for index, value in enumerate(graph.values)
    ]
    ends = itertools.accumulate(counts)
    operators = [
        (end - count, end, int(operator.rerunnable))
        for operator, count, end in zip(graph.operators, counts, ends, strict=True)
    ]
    group_reads = [listed(group.reads) for group in groups]
    group_writes = [listed(group.writes) for group in groups]
    entries = [entry for group in groups for entry in (*group.first, *group.again)]
    starts = itertools.accumulate((len(group.first) + len(group.again) for group in groups), initial=0)
    group_rows = [
        (*reads, *writes, start, start + len(group.first), start + len(group.first) + len(group.again))
        for group, reads, writes, start in zip(groups, group_reads, group_writes, starts, strict=False)
    ]
    options = [(entry.extra_bytes, *listed(entry.overwrites), entry.implementation) for entry in entries]
    return Tables(
        values=_rows(values, 5),
        operators=_rows(operators, 3),
        groups=_rows(group_rows, 7),
        options=_rows(options, 4),
        latency_ms=numpy.array([entry.latency_ms for entry in entries], dtype=numpy.float64),
        lists=_integers(lists),
        agenda=_rows(list(_agenda(graph, writer)), 2),
        resident_bytes=graph.resident.total,
    )


def _agenda(graph: OperatorGraph, writer: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Every place where an operator may have its first run in the forward part; then the backward operators.

    An optional operator's early place is right after the last of its inputs is written; its late place is
    after the last mandatory operator that reads the input which is needed for the shortest time.
    """
    forward = [i for i, op in enumerate(graph.operators) if op.phase is Phase.FORWARD and not op.optional]
    written_at = {operator: position for position, operator in enumerate(forward)}
    last_read: dict[int, int] = {}
    for position, index in enumerate(forward):
        for implementation in graph.operators[index].implementations:
            last_read.update(dict.fromkeys(implementation.reads, position))
    early: list[list[int]] = [[] for _ in forward]
    late: list[list[int]] = [[] for _ in forward]
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.FORWARD and operator.optional and forward:
            reads = operator.implementations[0].reads
            ready = max((written_at[writer[value]] for value in reads), default=0)
            written_at[index] = ready
            early[ready].append(index)
            late[max(ready, min((last_read.get(value, ready) for value in reads), default=ready))].append(index)
    for position, index in enumerate(forward):
        yield index, FORWARD
        yield from ((optional, EARLY) for optional in early[position])
        yield from ((optional, LATE) for optional in late[position])
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.BACKWARD:
            yield index, BACKWARD


def _droppable(graph: OperatorGraph, writer: dict[int, int], tiny_bytes: int) -> Integers:
    chosen: list[int] = []
    for index, value in enumerate(graph.values):
        if index in writer and not value.held and value.size_bytes >= tiny_bytes:
            operator = graph.operators[writer[index]]
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                chosen.append(index)
    return _integers(chosen)


def _moves(flat: FlatProblem) -> Moves:
    graph, tables = flat.graph, flat.tables
    is_droppable = numpy.zeros(flat.value_count, dtype=numpy.int64)
    is_droppable[flat.droppable] = 1
    several_groups: list[tuple[int, int, int]] = []
    anchored: list[list[int]] = [[] for _ in graph.operators]
    for index, operator in enumerate(graph.operators):
        groups = int(tables.operators[index, OPERATOR_GROUPS_END] - tables.operators[index, OPERATOR_GROUPS])
        if groups > 1:
            several_groups.append((index, PART_FIRST, groups))
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                several_groups.append((index, PART_AGAIN, groups))
        if operator.phase is Phase.BACKWARD:
            reads = {value for value in _reads(operator) if is_droppable[value]}
            if reads:
                anchored[int(tables.values[max(reads), VALUE_WRITER])].append(index)
    looks: dict[object, int] = {}
    look = [
        looks.setdefault(
            (op.family, op.phase, op.optional, op.rerunnable, *_groups(tables, index)),
            len(looks),
        )
        for index, op in enumerate(graph.operators)
    ]
    forward = [index for index, operator in enumerate(graph.operators) if operator.phase is Phase.FORWARD]
    by_look: dict[int, list[int]] = {}
    for index in forward:
        by_look.setdefault(look[index], []).append(index)
    alike = [_nearest(by_look[look[i]], i) if i < len(forward) else [] for i in range(flat.operator_count)]
    alike_start, flat_alike = _slices(alike)
    anchored_start, flat_anchored = _slices(anchored)
    return Moves(
        droppable=flat.droppable,
        is_droppable=is_droppable,
        groups=_rows(several_groups, 3),
        optional=_integers(index for index in forward if graph.operators[index].optional),
        eager=_rows(_eager(graph, tables, forward), 2),
        several=_integers(
            index
            for index, operator in enumerate(graph.operators)
            if any(len(item.reads) > 1 for item in operator.implementations)
        ),
        forward=_integers(forward),
        look=_integers(look),
        alike_start=alike_start,
        alike=flat_alike,
        anchored_start=anchored_start,
        anchored=flat_anchored,
    )


def _eager(graph: OperatorGraph, tables: Tables, forward: list[int]) -> list[tuple[int, int]]:
    """(operator, entry of the agenda) pairs: where an input is read or about to be, or an output soon."""
    read_at: dict[int, set[int]] = {}
    first = len(tables.agenda)
    for at, (index, when) in enumerate(tables.agenda.tolist()):
        if when == BACKWARD:
            first = min(first, at)
            for value in _reads(graph.operators[index]):
                read_at.setdefault(value, set()).add(at)
    pairs: list[tuple[int, int]] = []
    for index in forward:
        operator = graph.operators[index]
        if operator.optional or operator.rerunnable:
            near_inputs = {
                at - back for value in _reads(operator) for at in read_at.get(value, ()) for back in (0, 1)
            }
            near_outputs = {
                at - back for value in operator.writes for at in read_at.get(value, ()) for back in (2, 3)
            }
            pairs += [(index, at) for at in sorted(near_inputs | near_outputs) if at >= max(2, first)]
    return pairs


def _reads(operator: Operator) -> set[int]:
    return {value for item in operator.implementations for value in item.reads}


def _groups(tables: Tables, operator: int) -> tuple[tuple[int, int], ...]:
    """Numbers of values that each group of an operator reads and writes, in order.

    Choices are group numbers: operators are alike only if each number means the same for both.
    """
    start, end = tables.operators[operator, [OPERATOR_GROUPS, OPERATOR_GROUPS_END]].tolist()
    rows = tables.groups[start:end]
    reads = rows[:, GROUP_READS_END] - rows[:, GROUP_READS]
    writes = rows[:, GROUP_WRITES_END] - rows[:, GROUP_WRITES]
    return tuple(zip(reads.tolist(), writes.tolist(), strict=True))


def _nearest(members: list[int], operator: int) -> list[int]:
    at = int(numpy.searchsorted(members, operator))
    window = members[max(0, at - MAX_ALIKE // 2) : at + MAX_ALIKE // 2 + 1]
    return [member for member in window if member != operator]


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Integers:
    return numpy.array(rows, dtype=numpy.int64).reshape(len(rows), columns)


def _integers(items: Iterable[int]) -> Integers:
    return numpy.array(list(items), dtype=numpy.int64)


def _slices(rows: list[list[int]]) -> tuple[Integers, Integers]:
    starts = numpy.concatenate([[0], numpy.cumsum(_integers(map(len, rows)))]).astype(numpy.int64)
    return starts, _integers(item for row in rows for item in row)
