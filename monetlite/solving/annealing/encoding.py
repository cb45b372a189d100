"""From schedules to choices, and from choices to schedules."""

from collections.abc import Callable, Sequence

import numpy

from monetlite.core.graph import Phase
from monetlite.core.steps import Step
from monetlite.solving.annealing.arrays import (
    EARLY,
    GROUP_OPTIONS,
    GROUP_READS,
    LAST_BIT,
    OPERATOR_GROUPS,
    OPTION_IMPLEMENTATION,
    PART_AGAIN,
    PART_FIRST,
    PART_PLACE,
    PARTS,
    STEP_OPERATOR,
    STEP_OPTION,
    STEPS,
    VALUE_BYTES,
    VALUE_WRITER,
    Integers,
    Scratch,
)
from monetlite.solving.annealing.compiled import evaluate
from monetlite.solving.annealing.flat_problem import FlatProblem

KEEP_ALWAYS = -1
"""A retain mask with every bit set."""

LEAN_FACTOR = 1.5
"""An implementation is chosen because it reads less if it takes at most so many times the fastest's latency."""


def keep_everything(flat: FlatProblem) -> Integers:
    """The choices that drop nothing, and run every operator with its first group."""
    choices = numpy.zeros(flat.value_count + PARTS * flat.operator_count, dtype=numpy.int64)
    choices[: flat.value_count] = KEEP_ALWAYS
    return choices


def read_least(flat: FlatProblem) -> Integers:
    """The choices that drop nothing, and run every operator with the group that reads the fewest bytes.

    Only groups that take at most `LEAN_FACTOR` times as long as the fastest count. The optional operators that this
    needs run as early as they can.
    """
    tables, values = flat.tables, flat.value_count
    choices = keep_everything(flat)
    droppable = set(flat.droppable.tolist())
    for operator in range(flat.operator_count):
        start, end = (int(tables.operators[operator, OPERATOR_GROUPS + i]) for i in (0, 1))
        fastest = {
            group: float(tables.latency_ms[int(tables.groups[group, GROUP_OPTIONS])]) for group in range(start, end)
        }
        if not fastest:
            continue
        limit = min(fastest.values()) * LEAN_FACTOR
        reads = {group: droppable.intersection(_reads(flat, group)) for group in fastest if fastest[group] <= limit}
        chosen = min(
            reads, key=lambda group: (sum(tables.values[value, VALUE_BYTES] for value in reads[group]), group)
        )
        choices[values + PART_FIRST * flat.operator_count + operator] = chosen - start
        for value in _reads(flat, chosen):
            writer = int(tables.values[value, VALUE_WRITER])
            if writer >= 0 and flat.graph.operators[writer].optional:
                choices[values + PART_PLACE * flat.operator_count + writer] = EARLY
    return choices


def _reads(flat: FlatProblem, group: int) -> list[int]:
    start, end = (int(flat.tables.groups[group, GROUP_READS + i]) for i in (0, 1))
    found: list[int] = flat.tables.lists[start:end].tolist()
    return found


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
    ran: set[int] = set()
    fresh: set[int] = set()
    for at, (operator, choice) in enumerate(steps):
        implementation = graph.operators[operator].implementations[choice]
        group = flat.group_of[operator][choice]
        part = values + (PART_AGAIN if operator in ran else PART_FIRST) * operators
        ran.add(operator)
        if group >= 0:
            choices[part + operator] = group - flat.tables.operators[operator, OPERATOR_GROUPS]
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
    seen: set[int] = set()
    for at, (operator, _) in enumerate(steps):
        if operator in seen or flat.graph.operators[operator].phase is Phase.BACKWARD:
            return at
        seen.add(operator)
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
