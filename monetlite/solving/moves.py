"""What simulated annealing changes in a genome at a time. Compiled; `kernel` says what a genome is."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from monetlite.graph import Operator, OperatorGraph, Phase
from monetlite.solving.kernel import (
    AS_INPUTS_DROP,
    LAST_BIT,
    NEVER,
    PART_AGAIN,
    PART_EAGER,
    PART_FIRST,
    PART_PLACE,
    PART_ORDER,
    TOUCHES,
    Scratch,
    inner,
)
from monetlite.solving.problem import (
    BACKWARD,
    GROUP_READS,
    GROUP_READS_END,
    GROUP_WRITES,
    GROUP_WRITES_END,
    OPERATOR_GROUPS,
    VALUE_WRITER,
    Integers,
    Problem,
    Tables,
)

UNDO_LENGTH = 4096
"""Changes that one move makes at most."""

EVERYWHERE = -1
"""A retain mask that never drops the value."""

CHOICE_OPERATOR, CHOICE_PART, CHOICE_GROUPS = range(3)
"""Columns of `Moves.choices`."""


class Moves(NamedTuple):
    """Where a genome may be changed.

    `kin` lists, for each forward operator, the operators that look like it; `anchored` the backward operators
    that can do with its output (and no later one); both as slices, `x_start[i]:x_start[i + 1]`.
    """

    droppable: Integers
    is_droppable: Integers
    choices: Integers
    """Operator, part of the genome and number of groups, wherever there is more than one group."""
    optional: Integers
    eager: Integers
    """Operator, and an entry of the agenda after which it may be worth running in the backward part."""
    several: Integers
    """Operators that read more than one value."""
    forward: Integers
    look: Integers
    """For each operator, a number that operators of the same make share."""
    kin_start: Integers
    kin: Integers
    anchored_start: Integers
    anchored: Integers


def build_moves(problem: Problem) -> Moves:
    """List what can be changed."""
    graph, tables = problem.graph, problem.tables
    is_droppable = numpy.zeros(problem.value_count, dtype=numpy.int64)
    is_droppable[problem.droppable] = 1
    choices: list[tuple[int, int, int]] = []
    anchored: list[list[int]] = [[] for _ in graph.operators]
    for index, operator in enumerate(graph.operators):
        groups = int(tables.operators[index, OPERATOR_GROUPS + 1] - tables.operators[index, OPERATOR_GROUPS])
        if groups > 1:
            choices.append((index, PART_FIRST, groups))
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                choices.append((index, PART_AGAIN, groups))
        if operator.phase is Phase.BACKWARD:
            reads = {value for item in operator.implementations for value in item.reads if is_droppable[value]}
            if reads:
                anchored[int(tables.values[max(reads), VALUE_WRITER])].append(index)
    looks: dict[object, int] = {}
    look = [looks.setdefault(_look(operator), len(looks)) for operator in graph.operators]
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
    """(forward operator, entry of the agenda) pairs: where an input is read or about to be, or soon an output."""
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
            near_inputs = {at - back for value in _reads(operator) for at in read_at.get(value, ()) for back in (0, 1)}
            near_outputs = {at - back for value in operator.writes for at in read_at.get(value, ()) for back in (2, 3)}
            pairs += [(index, at) for at in sorted(near_inputs | near_outputs) if at >= max(2, first)]
    return pairs


def _reads(operator: Operator) -> set[int]:
    return {value for item in operator.implementations for value in item.reads}


def _look(operator: Operator) -> object:
    groups = {(len(set(item.reads)), len(item.writes)) for item in operator.implementations}
    return operator.family, operator.phase, operator.optional, operator.rerunnable, tuple(sorted(groups))


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


@inner
def draw(random: NDArray[numpy.uint64]) -> float:
    """The next number in [0, 1) of an xorshift64* generator."""
    x = random[0]
    x ^= x >> numpy.uint64(12)
    x ^= x << numpy.uint64(25)
    x ^= x >> numpy.uint64(27)
    random[0] = x
    return float((x * numpy.uint64(2685821657736338717)) >> numpy.uint64(11)) / 9007199254740992.0


@inner
def _below(random: NDArray[numpy.uint64], end: int) -> int:
    return int(draw(random) * end)


@inner
def _set(genome: Integers, undo: Integers, index: int, gene: int) -> None:
    """Change a gene, and note what it was; undo[0, 0] counts the notes."""
    count = undo[0, 0]
    if genome[index] != gene and count + 1 < undo.shape[0]:
        undo[count + 1, 0] = index
        undo[count + 1, 1] = genome[index]
        undo[0, 0] = count + 1
        genome[index] = gene


@inner
def take_back(genome: Integers, undo: Integers) -> None:
    """Undo a move."""
    for back in range(undo[0, 0]):
        note = undo[0, 0] - back
        genome[undo[note, 0]] = undo[note, 1]
    undo[0, 0] = 0


@inner
def propose(
    tables: Tables,
    moves: Moves,
    genome: Integers,
    scratch: Scratch,
    undo: Integers,
    random: NDArray[numpy.uint64],
) -> None:
    """Make one random move; `take_back` reverts it. `scratch` is of the last evaluation."""
    undo[0, 0] = 0
    values, operators = tables.values.shape[0], tables.operators.shape[0]
    place = values + PART_PLACE * operators
    kind = draw(random)
    if kind < 0.29 and moves.droppable.size > 0:
        # Flip one bit of when a value is kept, among those that decide something.
        value = moves.droppable[_below(random, moves.droppable.size)]
        for _ in range(3):
            if scratch.values[value, TOUCHES] == 0:
                value = moves.droppable[_below(random, moves.droppable.size)]
        bit = _below(random, max(1, min(scratch.values[value, TOUCHES], LAST_BIT)))
        _set(genome, undo, value, genome[value] ^ (1 << bit))
    elif kind < 0.48 and moves.droppable.size > 1:
        # Exchange a value that is kept for one that is not, more often a close one.
        at = _below(random, moves.droppable.size)
        reach = 12 if draw(random) < 0.6 else moves.droppable.size
        value = moves.droppable[at]
        for _ in range(12):
            other_at = at - reach + _below(random, 2 * reach + 1)
            if 0 <= other_at < moves.droppable.size:
                other = moves.droppable[other_at]
                if (genome[other] ^ genome[value]) & 1 != 0:
                    _set(genome, undo, other, genome[other] ^ 1)
                    break
        _set(genome, undo, value, genome[value] ^ 1)
    elif kind < 0.71 and moves.choices.shape[0] > 0:
        # Choose another group, and mostly keep what it reads in place of what the old one did.
        choice = _below(random, moves.choices.shape[0])
        operator, groups = moves.choices[choice, CHOICE_OPERATOR], moves.choices[choice, CHOICE_GROUPS]
        gene = values + moves.choices[choice, CHOICE_PART] * operators + operator
        old_group = tables.operators[operator, OPERATOR_GROUPS] + genome[gene]
        named = (genome[gene] + 1 + _below(random, groups - 1)) % groups
        _set(genome, undo, gene, named)
        group = tables.operators[operator, OPERATOR_GROUPS] + named
        if draw(random) < 0.6:
            for i in range(tables.groups[old_group, GROUP_READS], tables.groups[old_group, GROUP_READS_END]):
                value = tables.lists[i]
                if moves.is_droppable[value] != 0 and draw(random) < 0.7:
                    _set(genome, undo, value, genome[value] & ~1)
        if draw(random) < 0.7:
            for i in range(tables.groups[group, GROUP_READS], tables.groups[group, GROUP_READS_END]):
                value = tables.lists[i]
                if moves.is_droppable[value] != 0:
                    _set(genome, undo, value, genome[value] | 1)
                    writer = tables.values[value, VALUE_WRITER]
                    if genome[place + writer] == 0:
                        _set(genome, undo, place + writer, 1 + _below(random, 2))
    elif kind < 0.77 and moves.optional.size > 0:
        operator = moves.optional[_below(random, moves.optional.size)]
        where = (genome[place + operator] + 1 + _below(random, 2)) % 3
        _set(genome, undo, place + operator, where)
        group = tables.operators[operator, OPERATOR_GROUPS]
        for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
            value = tables.lists[i]
            if moves.is_droppable[value] != 0 and draw(random) < 0.5:
                _set(genome, undo, value, genome[value] | 1 if where != 0 else genome[value] & ~1)
    elif kind < 0.85 and moves.kin.size > 0:
        _copy_block(tables, moves, genome, undo, random)
    elif kind < 0.92 and moves.forward.size > 0:
        _redo_block(tables, moves, genome, undo, random, kind < 0.885)
    elif kind < 0.94 and moves.several.size > 0:
        operator = moves.several[_below(random, moves.several.size)]
        gene = values + PART_ORDER * operators + operator
        _set(genome, undo, gene, (genome[gene] + 1 + _below(random, 3)) % 4)
    elif moves.eager.shape[0] > 0:
        # Run an operator early in the backward part, while what it reads is there; or no longer do so.
        chosen = _below(random, moves.eager.shape[0])
        operator = moves.eager[chosen, 0]
        gene = values + PART_EAGER * operators + operator
        if genome[gene] == NEVER or draw(random) < 0.2:
            _set(genome, undo, gene, AS_INPUTS_DROP if draw(random) < 0.5 else moves.eager[chosen, 1])
        else:
            _set(genome, undo, gene, NEVER)
        group = tables.operators[operator, OPERATOR_GROUPS]
        if draw(random) < 0.5:
            for i in range(tables.groups[group, GROUP_READS], tables.groups[group, GROUP_READS_END]):
                value = tables.lists[i]
                if moves.is_droppable[value] != 0:
                    bit = _below(random, max(1, min(scratch.values[value, TOUCHES], LAST_BIT)))
                    _set(genome, undo, value, genome[value] | (1 << bit))
            for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
                value = tables.lists[i]
                if moves.is_droppable[value] != 0:
                    _set(genome, undo, value, genome[value] & ~1)


@inner
def _copy_block(
    tables: Tables, moves: Moves, genome: Integers, undo: Integers, random: NDArray[numpy.uint64]
) -> None:
    """Copy the choices of a run of operators to another run that looks the same."""
    values, operators = tables.values.shape[0], tables.operators.shape[0]
    target = moves.forward[_below(random, moves.forward.size)]
    alike = moves.kin_start[target + 1] - moves.kin_start[target]
    if alike == 0:
        return
    source = moves.kin[moves.kin_start[target] + _below(random, alike)]
    length = 1 + _below(random, 2 ** (2 + _below(random, 5)))
    for _ in range(length):
        if max(source, target) >= moves.forward.size or moves.look[source] != moves.look[target]:
            return
        for part in range(PART_FIRST, PART_ORDER + 1):
            gene = genome[values + part * operators + source]
            if part != PART_EAGER or gene <= AS_INPUTS_DROP:
                _set(genome, undo, values + part * operators + target, gene)
        group = tables.operators[target, OPERATOR_GROUPS]
        shift = tables.groups[tables.operators[source, OPERATOR_GROUPS], GROUP_WRITES] - tables.groups[group, GROUP_WRITES]
        for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
            if moves.is_droppable[tables.lists[i]] != 0:
                _set(genome, undo, tables.lists[i], genome[tables.lists[i + shift]])
        first, end = moves.anchored_start[target], moves.anchored_start[target + 1]
        offset = moves.anchored_start[source] - first
        if moves.anchored_start[source + 1] - offset == end:
            for i in range(first, end):
                to, of = moves.anchored[i], moves.anchored[i + offset]
                if moves.look[to] == moves.look[of]:
                    _set(genome, undo, values + to, genome[values + of])
        source += 1
        target += 1


@inner
def _redo_block(
    tables: Tables,
    moves: Moves,
    genome: Integers,
    undo: Integers,
    random: NDArray[numpy.uint64],
    segment: bool,
) -> None:
    """Give the values of a run of forward operators random masks, or those of a checkpointed segment."""
    first = _below(random, moves.forward.size)
    length = 2 + _below(random, 2 ** (2 + _below(random, 4)))
    whole = EVERYWHERE & ~1 if draw(random) < 0.8 else EVERYWHERE
    share = draw(random)
    for at in range(first, min(first + length, moves.forward.size)):
        group = tables.operators[moves.forward[at], OPERATOR_GROUPS]
        for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
            value = tables.lists[i]
            if moves.is_droppable[value] != 0:
                if segment:
                    _set(genome, undo, value, whole)
                else:
                    _set(genome, undo, value, _below(random, 16) << 1 | (1 if draw(random) < share else 0))
