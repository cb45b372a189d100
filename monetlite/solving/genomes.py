"""Between schedules and genomes: what a list of steps amounts to, and the steps that a genome amounts to."""

from collections.abc import Callable, Sequence

import numpy

from monetlite.core.graph import Phase
from monetlite.core.steps import Step
from monetlite.solving.kernel import evaluate
from monetlite.solving.layout import (
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
from monetlite.solving.problem import Problem

KEEP_ALWAYS = -1
"""A retain mask with every bit set."""

LEAN_FACTOR = 1.5
"""How much longer than the fastest an implementation may take that is chosen because it reads less."""


def keep_everything(problem: Problem) -> Integers:
    """The genome that drops nothing, and runs every operator with its first group."""
    genome = numpy.zeros(problem.value_count + PARTS * problem.operator_count, dtype=numpy.int64)
    genome[: problem.value_count] = KEEP_ALWAYS
    return genome


def read_least(problem: Problem) -> Integers:
    """The genome that drops nothing, and runs every operator with the group that reads the fewest bytes.

    Of those that take at most `LEAN_FACTOR` times as long as its fastest. The optional operators that this needs
    run as early as they can.
    """
    tables, values = problem.tables, problem.value_count
    genome = keep_everything(problem)
    droppable = set(problem.droppable.tolist())
    for operator in range(problem.operator_count):
        start, end = (int(tables.operators[operator, OPERATOR_GROUPS + i]) for i in (0, 1))
        fastest = {
            group: float(tables.latency_ms[int(tables.groups[group, GROUP_OPTIONS])]) for group in range(start, end)
        }
        if not fastest:
            continue
        limit = min(fastest.values()) * LEAN_FACTOR
        reads = {
            group: droppable.intersection(_reads(problem, group)) for group in fastest if fastest[group] <= limit
        }
        chosen = min(
            reads, key=lambda group: (sum(tables.values[value, VALUE_BYTES] for value in reads[group]), group)
        )
        genome[values + PART_FIRST * problem.operator_count + operator] = chosen - start
        for value in _reads(problem, chosen):
            writer = int(tables.values[value, VALUE_WRITER])
            if writer >= 0 and problem.graph.operators[writer].optional:
                genome[values + PART_PLACE * problem.operator_count + writer] = EARLY
    return genome


def _reads(problem: Problem, group: int) -> list[int]:
    start, end = (int(problem.tables.groups[group, GROUP_READS + i]) for i in (0, 1))
    found: list[int] = problem.tables.lists[start:end].tolist()
    return found


def encode(problem: Problem, steps: Sequence[Step]) -> Integers:
    """The genome closest to a legal schedule.

    It leads to the same steps where those recompute a value right where it is read; else to similar ones.
    """
    graph, values, operators = problem.graph, problem.value_count, problem.operator_count
    genome = keep_everything(problem)
    genome[problem.droppable] = 0
    droppable = set(problem.droppable.tolist())
    boundary = _end_of_forward(problem, steps)
    touches = [0] * values
    ran: set[int] = set()
    fresh: set[int] = set()
    for at, (operator, choice) in enumerate(steps):
        implementation = graph.operators[operator].implementations[choice]
        group = problem.group_of[operator][choice]
        part = values + (PART_AGAIN if operator in ran else PART_FIRST) * operators
        ran.add(operator)
        if group >= 0:
            genome[part + operator] = group - problem.tables.operators[operator, OPERATOR_GROUPS]
        if at < boundary:
            genome[values + PART_PLACE * operators + operator] = EARLY if graph.operators[operator].optional else 0
            continue
        # A value that is read stayed since its read before, unless it was written in between.
        for value in droppable.intersection(implementation.reads):
            if value not in fresh:
                genome[value] |= 1 << min(touches[value], LAST_BIT)
            fresh.discard(value)
            touches[value] += 1
        fresh.update(implementation.writes)
    return genome


def _end_of_forward(problem: Problem, steps: Sequence[Step]) -> int:
    """How many steps there are before the first one that runs again, or runs a backward operator."""
    seen: set[int] = set()
    for at, (operator, _) in enumerate(steps):
        if operator in seen or problem.graph.operators[operator].phase is Phase.BACKWARD:
            return at
        seen.add(operator)
    return len(steps)


def decode(
    problem: Problem,
    genome: Integers,
    scratch: Scratch,
    budget_bytes: int,
    weight: float,
    penalty: float,
    evaluate: Callable[..., float] = evaluate,
) -> tuple[Step, ...] | None:
    """The steps of a genome, each with the best implementation for the budget; None if it leads nowhere."""
    found = as_arrays(problem, genome, scratch, budget_bytes, weight, penalty, evaluate)
    return None if found is None else tuple(zip(found[0].tolist(), found[1].tolist(), strict=True))


def as_arrays(
    problem: Problem,
    genome: Integers,
    scratch: Scratch,
    budget_bytes: int,
    weight: float,
    penalty: float,
    evaluate: Callable[..., float] = evaluate,
) -> tuple[Integers, Integers] | None:
    """`decode`, as two arrays: the operator of each step, and the index of its implementation."""
    if evaluate(problem.tables, genome, scratch, budget_bytes, weight, penalty, numpy.inf) == numpy.inf:
        return None
    rows = scratch.steps[: int(scratch.totals[STEPS])]
    options = rows[:, STEP_OPTION]
    return rows[:, STEP_OPERATOR].copy(), problem.tables.options[options, OPTION_IMPLEMENTATION]
