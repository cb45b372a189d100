"""Where the moves of simulated annealing may change a genome (`layout`), from a problem."""

from collections.abc import Iterable

import numpy

from monetlite.core.graph import Operator, OperatorGraph, Phase
from monetlite.solving.layout import (
    BACKWARD,
    GROUP_READS,
    GROUP_READS_END,
    GROUP_WRITES,
    GROUP_WRITES_END,
    OPERATOR_GROUPS,
    OPERATOR_GROUPS_END,
    PART_AGAIN,
    PART_FIRST,
    VALUE_WRITER,
    Integers,
    Moves,
    Tables,
)
from monetlite.solving.problem import Problem


def build_moves(problem: Problem) -> Moves:
    """List what can be changed."""
    graph, tables = problem.graph, problem.tables
    is_droppable = numpy.zeros(problem.value_count, dtype=numpy.int64)
    is_droppable[problem.droppable] = 1
    choices: list[tuple[int, int, int]] = []
    anchored: list[list[int]] = [[] for _ in graph.operators]
    for index, operator in enumerate(graph.operators):
        groups = int(tables.operators[index, OPERATOR_GROUPS_END] - tables.operators[index, OPERATOR_GROUPS])
        if groups > 1:
            choices.append((index, PART_FIRST, groups))
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                choices.append((index, PART_AGAIN, groups))
        if operator.phase is Phase.BACKWARD:
            reads = {value for item in operator.implementations for value in item.reads if is_droppable[value]}
            if reads:
                anchored[int(tables.values[max(reads), VALUE_WRITER])].append(index)
    looks: dict[object, int] = {}
    look = [
        looks.setdefault((*_look(operator), _groups(tables, index)), len(looks))
        for index, operator in enumerate(graph.operators)
    ]
    forward = [index for index, operator in enumerate(graph.operators) if operator.phase is Phase.FORWARD]
    alike: dict[int, list[int]] = {}
    for index in forward:
        alike.setdefault(look[index], []).append(index)
    kin = [_nearest(alike[look[i]], i) if i < len(forward) else [] for i in range(problem.operator_count)]
    kin_start, flat_kin = _slices(kin)
    anchored_start, flat_anchored = _slices(anchored)
    eager = _eager(graph, tables, forward)
    return Moves(
        droppable=problem.droppable,
        is_droppable=is_droppable,
        choices=numpy.array(choices, dtype=numpy.int64).reshape(len(choices), 3),
        optional=_integers(index for index in forward if graph.operators[index].optional),
        eager=numpy.array(eager, dtype=numpy.int64).reshape(len(eager), 2),
        several=_integers(i for i in range(problem.operator_count) if _reads_several(graph.operators[i])),
        forward=_integers(forward),
        look=_integers(look),
        kin_start=kin_start,
        kin=flat_kin,
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


def _look(operator: Operator) -> tuple[object, ...]:
    return operator.family, operator.phase, operator.optional, operator.rerunnable


def _groups(tables: Tables, operator: int) -> tuple[tuple[int, int], ...]:
    """How many values each group of an operator reads and writes, in order.

    Genes are group numbers: operators are alike only if each of these means as much for one as for the other.
    """
    start, end = tables.operators[operator, [OPERATOR_GROUPS, OPERATOR_GROUPS_END]].tolist()
    rows = tables.groups[start:end]
    reads = rows[:, GROUP_READS_END] - rows[:, GROUP_READS]
    writes = rows[:, GROUP_WRITES_END] - rows[:, GROUP_WRITES]
    return tuple(zip(reads.tolist(), writes.tolist(), strict=True))


def _nearest(members: list[int], operator: int, most: int = 24) -> list[int]:
    """A few of the operators that look alike: enough to copy from, few enough for graphs of thousands."""
    at = members.index(operator) if len(members) <= most else int(numpy.searchsorted(members, operator))
    window = members[max(0, at - most // 2) : at + most // 2 + 1]
    return [member for member in window if member != operator]


def _reads_several(operator: Operator) -> bool:
    return any(len(item.reads) > 1 for item in operator.implementations)


def _integers(items: Iterable[int]) -> Integers:
    return numpy.array(list(items), dtype=numpy.int64)


def _slices(rows: list[list[int]]) -> tuple[Integers, Integers]:
    starts = numpy.concatenate([[0], numpy.cumsum(_integers(map(len, rows)))]).astype(numpy.int64)
    return starts, _integers(item for row in rows for item in row)
