"""A problem as arrays for compiled code: tables of it, the places where moves may change it, and its schedules.

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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy

from monetlite.core.blocks import reads_of
from monetlite.core.graph import Operator, OperatorGraph, Phase
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps, reruns
from monetlite.solving.annealing.compiled import (
    BACKWARD,
    EARLY,
    EVERYWHERE,
    FORWARD,
    LAST_BIT,
    LATE,
    OPTION_IMPLEMENTATION,
    PART_AGAIN,
    PART_FIRST,
    PART_PLACE,
    PARTS,
    STEP_OPERATOR,
    STEP_OPTION,
    STEPS,
    Integers,
    Moves,
    Scratch,
    Tables,
    evaluate,
)
from monetlite.solving.problem import Option, Problem

TINY_FRACTION = 100_000
"""Values smaller than the plain peak divided by this are never dropped."""

LEAN_FACTOR = 1.5
"""An implementation is chosen because it reads less if it takes at most so many times the fastest's latency."""
MAX_ALIKE = 24
"""Alike operators that moves may copy from: enough of them, and few enough for graphs of thousands."""


class Group(NamedTuple):
    """Implementations of an operator that read and write the same values."""

    reads: tuple[int, ...]
    """Ascending."""
    writes: tuple[int, ...]
    options: tuple[Option, ...]

    @property
    def least_ms(self) -> float:
        """Of a first run."""
        return min(option.first_ms for option in self.options)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatProblem:
    """A problem as arrays.

    Attributes:
        problem: its origin.
        tables: the same as arrays.
        droppable: forward values that may be dropped and computed again: not held to the end of the step, not
            written by an operator that can't be run again, not tiny beside the plain peak.
        groups: of each operator, in the order in which choices number them.
        plain_peak_bytes: of plain training.
    """

    problem: Problem
    tables: Tables
    droppable: Integers
    groups: tuple[tuple[Group, ...], ...]
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
    def group_of(self) -> tuple[dict[int, int], ...]:
        """For each operator, the group of each of its implementations that can run legally."""
        return tuple(
            {option.choice: number for number, group in enumerate(groups) for option in group.options}
            for groups in self.groups
        )

    @cached_property
    def mean_ms(self) -> float:
        """Least latency of a step over its operators; 1 if that is nothing."""
        return self.problem.least_latency_ms / max(1, self.operator_count) or 1.0

    @cached_property
    def moves(self) -> Moves:
        """The places where moves may change something."""
        return _moves(self)


@lru_cache(maxsize=2)
def flatten(problem: Problem) -> FlatProblem:
    """Lay a problem out as arrays."""
    graph = problem.graph
    plain = simulate(problem.profile, plain_steps(graph))
    groups_of = tuple(map(_groups, graph.operators, problem.legal_options))
    operators: list[tuple[int, ...]] = []
    groups: list[tuple[int, ...]] = []
    options: list[tuple[int, ...]] = []
    latency_ms: list[float] = []
    lists: list[int] = []

    def listed(items: Iterable[int]) -> tuple[int, int]:
        start = len(lists)
        lists.extend(items)
        return start, len(lists)

    for operator, own in zip(graph.operators, groups_of, strict=True):
        operators.append((len(groups), len(groups) + len(own), int(operator.rerunnable)))
        for group in own:
            starts = [len(options)]
            for again in (False, True):
                for option in _pareto(group.options, again):
                    option_ms, extra_bytes = option.of_run(again)
                    overwrites = operator.implementations[option.choice].overwrites
                    options.append((extra_bytes, *listed(overwrites), option.choice))
                    latency_ms.append(option_ms)
                starts.append(len(options))
            groups.append((*listed(group.reads), *listed(group.writes), *starts))
    readers: list[list[int]] = [[] for _ in graph.values]
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.FORWARD:
            for value in reads_of(operator):
                readers[value].append(index)
    values = [
        (value.size_bytes, int(value.held), graph.writer.get(index, -1), *listed(readers[index]))
        for index, value in enumerate(graph.values)
    ]
    return FlatProblem(
        problem=problem,
        tables=Tables(
            values=_rows(values, 5),
            operators=_rows(operators, 3),
            groups=_rows(groups, 7),
            options=_rows(options, 4),
            latency_ms=numpy.array(latency_ms, dtype=numpy.float64),
            lists=_integers(lists),
            agenda=_rows(list(_agenda(graph)), 2),
            resident_bytes=graph.resident.total,
        ),
        droppable=_droppable(graph, plain.peak_bytes // TINY_FRACTION),
        groups=groups_of,
        plain_peak_bytes=plain.peak_bytes,
    )


def _groups(operator: Operator, legal: Iterable[Option]) -> tuple[Group, ...]:
    """The groups of an operator, in the order of their first options."""
    members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Option]] = {}
    for option in legal:
        writes = tuple(dict.fromkeys(operator.implementations[option.choice].writes))
        members.setdefault((tuple(sorted(option.reads)), writes), []).append(option)
    return tuple(Group(reads, writes, tuple(options)) for (reads, writes), options in members.items())


def _pareto(options: Iterable[Option], again: bool) -> list[Option]:
    """Options that none beats on latency, memory and what has to die to be overwritten at once; fastest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (*option.of_run(again), len(option.overwrites))):
        extra_bytes = option.of_run(again)[1]
        if not any(
            better.of_run(again)[1] <= extra_bytes and better.overwrites <= option.overwrites for better in kept
        ):
            kept.append(option)
    return kept


def _agenda(graph: OperatorGraph) -> Iterator[tuple[int, int]]:
    """Every place where an operator may have its first run in the forward part; then the backward operators.

    An optional operator's early place is right after the last of its inputs is written; its late place is
    after the last mandatory operator that reads the input which is needed for the shortest time.
    """
    forward = graph.mandatory_forward
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
            ready = max((written_at[graph.writer[value]] for value in reads), default=0)
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


def _droppable(graph: OperatorGraph, tiny_bytes: int) -> Integers:
    chosen: list[int] = []
    for index, value in enumerate(graph.values):
        if index in graph.writer and not value.held and value.size_bytes >= tiny_bytes:
            operator = graph.operators[graph.writer[index]]
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                chosen.append(index)
    return _integers(chosen)


def _moves(flat: FlatProblem) -> Moves:
    graph = flat.graph
    is_droppable = numpy.zeros(flat.value_count, dtype=numpy.int64)
    is_droppable[flat.droppable] = 1
    several_groups: list[tuple[int, int, int]] = []
    anchored: list[list[int]] = [[] for _ in graph.operators]
    for index, operator in enumerate(graph.operators):
        groups = len(flat.groups[index])
        if groups > 1:
            several_groups.append((index, PART_FIRST, groups))
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                several_groups.append((index, PART_AGAIN, groups))
        if operator.phase is Phase.BACKWARD:
            reads = {value for value in reads_of(operator) if is_droppable[value]}
            if reads:
                anchored[graph.writer[max(reads)]].append(index)
    looks: dict[object, int] = {}
    look: list[int] = []
    for operator, groups_of in zip(graph.operators, flat.groups, strict=True):
        # Choices are group numbers: operators are alike only if each number means the same for both.
        counts = tuple((len(group.reads), len(group.writes)) for group in groups_of)
        facts = operator.family, operator.phase, operator.optional, operator.rerunnable, counts
        look.append(looks.setdefault(facts, len(looks)))
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
        eager=_rows(_eager(graph, flat.tables.agenda, forward), 2),
        several=_integers(
            index
            for index, operator in enumerate(graph.operators)
            if any(len(item.reads) > 1 for item in operator.implementations)
        ),
        forward=len(forward),
        look=_integers(look),
        alike_start=alike_start,
        alike=flat_alike,
        anchored_start=anchored_start,
        anchored=flat_anchored,
    )


def _eager(graph: OperatorGraph, agenda: Integers, forward: list[int]) -> list[tuple[int, int]]:
    """(operator, entry of the agenda) pairs: where an input is read or about to be, or an output soon."""
    read_at: dict[int, set[int]] = {}
    first = len(agenda)
    for at, (index, when) in enumerate(agenda.tolist()):
        if when == BACKWARD:
            first = min(first, at)
            for value in reads_of(graph.operators[index]):
                read_at.setdefault(value, set()).add(at)
    pairs: list[tuple[int, int]] = []
    for index in forward:
        operator = graph.operators[index]
        if operator.optional or operator.rerunnable:
            near_inputs = {
                at - back for value in reads_of(operator) for at in read_at.get(value, ()) for back in (0, 1)
            }
            near_outputs = {
                at - back for value in operator.writes for at in read_at.get(value, ()) for back in (2, 3)
            }
            pairs += [(index, at) for at in sorted(near_inputs | near_outputs) if at >= max(2, first)]
    return pairs


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


def keep_everything(flat: FlatProblem) -> Integers:
    """The choices that drop nothing, and run every operator with its first group."""
    choices = numpy.zeros(flat.value_count + PARTS * flat.operator_count, dtype=numpy.int64)
    choices[: flat.value_count] = EVERYWHERE
    return choices


def read_least(flat: FlatProblem) -> Integers:
    """The choices that drop nothing, and run every operator with the group that reads the fewest bytes.

    Only groups that take at most `LEAN_FACTOR` times as long as the fastest count. The optional operators that this
    needs run as early as they can.
    """
    values, size = flat.value_count, flat.problem.size_bytes
    choices = keep_everything(flat)
    droppable = set(flat.droppable.tolist())
    for operator, groups in enumerate(flat.groups):
        if not groups:
            continue
        limit_ms = LEAN_FACTOR * min(group.least_ms for group in groups)
        chosen = min(
            (group for group in groups if group.least_ms <= limit_ms),
            key=lambda group: sum(size[value] for value in droppable.intersection(group.reads)),
        )
        choices[values + PART_FIRST * flat.operator_count + operator] = groups.index(chosen)
        for value in chosen.reads:
            writer = flat.graph.writer[value]
            if flat.graph.operators[writer].optional:
                choices[values + PART_PLACE * flat.operator_count + writer] = EARLY
    return choices


def encode(flat: FlatProblem, steps: Sequence[Step]) -> Integers:
    """The choices closest to a legal schedule.

    They lead to the same steps where those recompute a value right where it is read; else to similar ones.
    """
    graph, values, operators = flat.graph, flat.value_count, flat.operator_count
    choices = keep_everything(flat)
    choices[flat.droppable] = 0
    droppable = set(flat.droppable.tolist())
    boundary = _end_of_forward(flat, steps)
    touches = [0] * values
    fresh: set[int] = set()
    for at, ((operator, choice), rerun) in enumerate(zip(steps, reruns(steps), strict=True)):
        implementation = graph.operators[operator].implementations[choice]
        part = values + (PART_AGAIN if rerun else PART_FIRST) * operators
        choices[part + operator] = flat.group_of[operator].get(choice, 0)
        if at < boundary:
            choices[values + PART_PLACE * operators + operator] = EARLY if graph.operators[operator].optional else 0
            continue
        # A value that is read stayed since its read before, unless it was written in between.
        for value in droppable.intersection(implementation.reads):
            if value not in fresh:
                choices[value] |= 1 << min(touches[value], LAST_BIT)
            fresh.discard(value)
            touches[value] += 1
        fresh.update(implementation.writes)
    return choices


def _end_of_forward(flat: FlatProblem, steps: Sequence[Step]) -> int:
    """Number of steps before the first one that runs again, or runs a backward operator."""
    for at, ((operator, _), rerun) in enumerate(zip(steps, reruns(steps), strict=True)):
        if rerun or flat.graph.operators[operator].phase is Phase.BACKWARD:
            return at
    return len(steps)


def decode(
    flat: FlatProblem,
    choices: Integers,
    scratch: Scratch,
    budget_bytes: int,
    weight: float,
    penalty: float,
    evaluate: Callable[..., float] = evaluate,
) -> tuple[Step, ...] | None:
    """The steps of choices, each with the best implementation for the budget; None if they lead nowhere."""
    if evaluate(flat.tables, choices, scratch, budget_bytes, weight, penalty, numpy.inf) == numpy.inf:
        return None
    rows = scratch.steps[: int(scratch.totals[STEPS])]
    implementations = flat.tables.options[rows[:, STEP_OPTION], OPTION_IMPLEMENTATION]
    return tuple(zip(rows[:, STEP_OPERATOR].tolist(), implementations.tolist(), strict=True))
