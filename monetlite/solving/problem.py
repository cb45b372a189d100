"""A `Profile` as flat arrays, for compiled code.

What plain training calls an operator's implementations becomes two levels here. A *group* is a set of
implementations that read and write the same values: which group an operator runs with changes what has to
be in memory. Within a group, *options* differ in latency, workspace and what they overwrite, which
nothing but the step itself feels, so the best option of a step follows from the memory that is left there.

| here | MONeT (Shah et al., ICLR 2021) |
| --- | --- |
| group of a backward operator | the choice of recipe, m with the values in its dependence set |
| option | the implementation of a recipe, δ |
| value kept at the end of the forward pass | s at the last forward stage |
| value re-run | r |
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph, Phase
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.layout import (
    BACKWARD,
    EARLY,
    FORWARD,
    LATE,
    Integers,
    Tables,
)

TINY_FRACTION = 100_000
"""Values smaller than the plain peak divided by this are never dropped by the search."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What the search works on.

    Attributes:
        profile: where it comes from.
        tables: the same as arrays.
        droppable: forward values that may be dropped and computed again: not held to the end of the step, not
            written by an operator that can't be run again, not tiny beside the plain peak.
        group_of: for each operator, the group of each of its implementations; -1 for one that can never run
            legally.
        plain_peak_bytes, plain_latency_ms: of plain training.
        least_latency_ms: the latency of running every mandatory operator once, each as fast as it can: no
            schedule is faster.
    """

    profile: Profile
    tables: Tables
    droppable: Integers
    group_of: tuple[tuple[int, ...], ...]
    plain_peak_bytes: int
    plain_latency_ms: float
    least_latency_ms: float

    @property
    def graph(self) -> OperatorGraph:
        return self.profile.graph

    @property
    def value_count(self) -> int:
        return len(self.graph.values)

    @property
    def operator_count(self) -> int:
        return len(self.graph.operators)


class _Option(NamedTuple):
    latency_ms: float
    extra_bytes: int
    implementation: int
    overwrites: tuple[int, ...]


def build_problem(profile: Profile) -> Problem:
    """Flatten a profile; `Problem` says what is kept.

    Implementations that another of the same group beats on both latency and workspace, and under no more
    conditions (what has to die to be overwritten), are left out; for first runs and re-runs apart.
    """
    graph = profile.graph
    size = [value.size_bytes for value in graph.values]
    held = [value.held for value in graph.values]
    plain = simulate(profile, plain_steps(graph))
    writer: dict[int, int] = {}
    group_counts: list[int] = []
    group_of: list[tuple[int, ...]] = []
    reads: list[Sequence[int]] = []
    writes: list[Sequence[int]] = []
    options: list[list[_Option]] = []
    least_latency_ms = 0.0
    for index, operator in enumerate(graph.operators):
        members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for choice, implementation in enumerate(operator.implementations):
            if _can_run(implementation.reads, implementation.overwrites, held):
                key = (tuple(sorted(set(implementation.reads))), tuple(dict.fromkeys(implementation.writes)))
                members.setdefault(key, []).append(choice)
        chosen = [-1] * len(operator.implementations)
        fastest_ms: list[float] = []
        for (group_reads, group_writes), choices in members.items():
            for choice in choices:
                chosen[choice] = len(reads)
            for value in group_writes:
                writer.setdefault(value, index)
            reads.append(group_reads)
            writes.append(group_writes)
            for again in (False, True):
                offered = list(_offered(profile, index, choices, again, size))
                options.append(_pareto(offered))
            fastest_ms.append(options[-2][0].latency_ms)
        group_counts.append(len(members))
        group_of.append(tuple(chosen))
        if not operator.optional or operator.phase is Phase.BACKWARD:
            least_latency_ms += min(fastest_ms, default=0.0)
    tables = _tables(graph, writer, group_counts, reads, writes, options)
    return Problem(
        profile=profile,
        tables=tables,
        droppable=_droppable(graph, writer, plain.peak_bytes // TINY_FRACTION),
        group_of=tuple(group_of),
        plain_peak_bytes=plain.peak_bytes,
        plain_latency_ms=plain.latency_ms,
        least_latency_ms=least_latency_ms,
    )


def _can_run(reads: tuple[int, ...], overwrites: tuple[int, ...], held: list[bool]) -> bool:
    """Whether what an implementation overwrites can ever die at its step."""
    return all(value in reads and not held[value] for value in overwrites)


def _offered(
    profile: Profile, operator: int, choices: list[int], again: bool, size: list[int]
) -> Iterator[_Option]:
    for choice in choices:
        latency_ms, workspace_bytes = profile.costs[operator][choice].of_run(again)
        overwrites = profile.graph.operators[operator].implementations[choice].overwrites
        extra_bytes = workspace_bytes - sum(size[value] for value in overwrites)
        yield _Option(float(latency_ms), int(extra_bytes), choice, overwrites)


def _pareto(offered: list[_Option]) -> list[_Option]:
    """Options that none beats on latency, memory and conditions at once, fastest first."""
    ordered = sorted(offered, key=lambda option: (option.latency_ms, option.extra_bytes, len(option.overwrites)))
    kept: list[_Option] = []
    for option in ordered:
        if not any(
            better.extra_bytes <= option.extra_bytes and set(better.overwrites) <= set(option.overwrites)
            for better in kept
        ):
            kept.append(option)
    return kept


def _tables(
    graph: OperatorGraph,
    writer: dict[int, int],
    group_counts: list[int],
    reads: list[Sequence[int]],
    writes: list[Sequence[int]],
    options: list[list[_Option]],
) -> Tables:
    """Lay the parts out in rows; `options` holds two rows a group, of first runs and of later ones."""
    readers: list[list[int]] = [[] for _ in graph.values]
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.FORWARD:
            for value in {value for item in operator.implementations for value in item.reads}:
                readers[value].append(index)
    flat_options = [option for row in options for option in row]
    lists: list[int] = []

    def slices(rows: Iterable[Iterable[int]]) -> Iterator[tuple[int, int]]:
        for row in rows:
            start = len(lists)
            lists.extend(row)
            yield start, len(lists)

    value_rows = [
        (value.size_bytes, int(value.held), writer.get(index, -1), *of_readers)
        for index, (value, of_readers) in enumerate(zip(graph.values, slices(readers), strict=True))
    ]
    group_ends = _ends(group_counts)
    operator_rows = [
        (end - count, end, int(operator.rerunnable))
        for operator, count, end in zip(graph.operators, group_counts, group_ends, strict=True)
    ]
    option_ends = _ends(map(len, options))
    group_rows = [
        (
            *of_reads,
            *of_writes,
            option_ends[2 * group] - len(options[2 * group]),
            *option_ends[2 * group :][:2],
        )
        for group, (of_reads, of_writes) in enumerate(zip(slices(reads), slices(writes), strict=True))
    ]
    option_rows = [
        (option.extra_bytes, *overwrites, option.implementation)
        for option, overwrites in zip(flat_options, slices(o.overwrites for o in flat_options), strict=True)
    ]
    return Tables(
        values=_rows(value_rows, 5),
        operators=_rows(operator_rows, 3),
        groups=_rows(group_rows, 7),
        options=_rows(option_rows, 4),
        latency_ms=numpy.array([option.latency_ms for option in flat_options], dtype=numpy.float64),
        lists=numpy.array(lists, dtype=numpy.int64),
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
    return numpy.array(chosen, dtype=numpy.int64)


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Integers:
    return numpy.array(rows, dtype=numpy.int64).reshape(len(rows), columns)


def _ends(counts: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(counts))
