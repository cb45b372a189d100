"""Sequences of steps on an operator graph: which are legal, when values die, and where the forward part ends.

The rules:

1. every forward operator that is not optional runs once, in order; optional ones run anywhere after what they
   read;
2. then every backward operator runs once, in order, with re-runs of forward operators anywhere between;
3. a step finds everything it reads in memory;
4. a step overwrites only values that are not read later.

A version of a value dies at its last read before it is next written. A value that is held to the end of the
training step (an output, a gradient of a weight) never dies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import OperatorGraph, Phase

Step: TypeAlias = tuple[int, int]
"""(operator, index of the implementation it runs with)."""


def step_number(at: int) -> int:
    """Number of a step as people read it, from its position: the first step is step 1."""
    return at + 1


def step_in_words(at: int, steps: int | None = None) -> str:
    """A step by its number, and among how many: `step 236 of 556`."""
    of = "" if steps is None else f" of {steps}"
    return f"step {step_number(at)}{of}"


@dataclass(frozen=True)
class Lifetime:
    """One stay of a value in memory.

    Attributes:
        value: its index in the graph.
        begin: the step that writes it; end: the last step that it is in memory at.
        reads: the steps that read it.
        backward: `begin` is in the backward part.
        overwritten: the step `end` takes its memory over for a result.
    """

    value: int
    begin: int
    end: int
    reads: tuple[int, ...]
    backward: bool
    overwritten: bool


def reruns(steps: Iterable[Step]) -> Iterator[bool]:
    """For each step, True if its operator ran before."""
    ran: set[int] = set()
    for index, _ in steps:
        yield index in ran
        ran.add(index)


def border(graph: OperatorGraph, steps: Iterable[Step]) -> int:
    """Position of the first step that runs a backward operator: the number of steps, if none does."""
    at = -1
    for at, (index, _) in enumerate(steps):
        if graph.operators[index].phase is Phase.BACKWARD:
            return at
    return at + 1


def deaths(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[frozenset[int], ...]:
    """For each step, the values whose present version is not read after it."""
    operators = graph.operators
    held = bytes(value.held for value in graph.values)
    needed = bytearray(held)
    dying: list[frozenset[int]] = []
    for index, choice in reversed(steps):
        implementation = operators[index].implementations[choice]
        here = [value for value in implementation.writes if not needed[value]]
        for value in implementation.writes:
            needed[value] = held[value]
        for value in implementation.reads:
            if not needed[value]:
                needed[value] = True
                here.append(value)
        dying.append(frozenset(here))
    dying.reverse()
    return tuple(dying)


def lifetimes(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[Lifetime, ...]:
    """Every stay of a value in memory under legal steps, in the order in which they begin."""
    backward_from = border(graph, steps)
    there: dict[int, tuple[int, list[int]]] = {}
    found: list[Lifetime] = []

    def leave(value: int, end: int, overwritten: bool) -> None:
        begin, reads = there.pop(value)
        found.append(Lifetime(value, begin, end, tuple(reads), begin >= backward_from, overwritten))

    for at, ((index, choice), dying) in enumerate(zip(steps, deaths(graph, steps), strict=True)):
        implementation = graph.operators[index].implementations[choice]
        for value in implementation.reads:
            there[value][1].append(at)
        for value in implementation.writes:
            there.setdefault(value, (at, []))
        for value in dying:
            leave(value, at, value in implementation.overwrites)
    for value in tuple(there):
        leave(value, len(steps) - 1, False)
    return tuple(sorted(found, key=lambda stay: (stay.begin, stay.value)))


def stored_values(graph: OperatorGraph, steps: Sequence[Step]) -> list[int]:
    """Values that cross the border under legal steps, but for those that are held to the end anyway."""
    at = border(graph, steps)
    return sorted(
        stay.value
        for stay in lifetimes(graph, steps)
        if stay.begin < at <= stay.end and not graph.values[stay.value].held
    )


def check_legal(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[frozenset[int], ...]:
    """Check the rules; return what dies at each step.

    Raises:
        IllegalSchedule: a rule is broken; names the step.
    """
    operators = graph.operators
    check_order(graph, [index for index, _ in steps])
    for at, (index, choice) in enumerate(steps):
        if not 0 <= choice < len(operators[index].implementations):
            raise IllegalSchedule(
                f"{step_in_words(at)} ({operators[index].name}): there is no implementation {choice}"
            )
    frees = deaths(graph, steps)
    live = bytearray(len(graph.values))
    for at, ((index, choice), dying) in enumerate(zip(steps, frees, strict=True)):
        implementation = operators[index].implementations[choice]
        for value in implementation.reads:
            if not live[value]:
                missing = [graph.values[value].name for value in implementation.reads if not live[value]]
                raise IllegalSchedule(
                    f"{step_in_words(at)} ({operators[index].name}): reads {', '.join(missing)}, "
                    "which is not in memory there"
                )
        if implementation.overwrites and not dying.issuperset(implementation.overwrites):
            needed = [graph.values[value].name for value in implementation.overwrites if value not in dying]
            raise IllegalSchedule(
                f"{step_in_words(at)} ({operators[index].name}, {implementation.name}): "
                f"overwrites {', '.join(needed)}, which is read later"
            )
        for value in implementation.writes:
            live[value] = True
        for value in dying:
            live[value] = False
    return frees


def check_order(graph: OperatorGraph, operators: Iterable[int]) -> None:
    """Check rules 1 and 2 on a sequence of operators.

    Raises:
        IllegalSchedule: an operator is missing, out of place, or re-run though it can't be.
    """
    known = graph.operators
    expected = (operator for operator in known if not operator.optional)
    waiting = next(expected, None)
    ran: set[int] = set()
    for at, index in enumerate(operators):
        if not 0 <= index < len(known):
            raise IllegalSchedule(f"{step_in_words(at)}: there is no operator {index}")
        operator = known[index]
        if operator is waiting:
            waiting = next(expected, None)
            ran.add(index)
            continue
        forward = waiting is not None and waiting.phase is Phase.FORWARD
        problem = ""
        if operator.phase is Phase.BACKWARD:
            problem = "backward operators must run once each, in order"
            if forward and waiting is not None:
                problem = f"backward begins before {waiting.name} has run"
        elif not operator.optional and forward:
            problem = "the forward pass must run once, in order"
        elif index in ran and not operator.rerunnable:
            problem = "can't be run again (random, or a side effect)"
        if problem:
            raise IllegalSchedule(f"{step_in_words(at)} ({operator.name}): {problem}")
        ran.add(index)
    if waiting is not None:
        raise IllegalSchedule(f"{waiting.name} is never run")


def plain_steps(graph: OperatorGraph) -> tuple[Step, ...]:
    """The steps of plain training: everything once, with the default implementations.

    An optional operator runs right before the first backward operator that needs it, as autograd's own
    formulas do.
    """
    steps: list[Step] = []
    live: set[int] = set()

    def run(index: int) -> None:
        implementation = graph.operators[index].implementations[0]
        for value in implementation.reads:
            if value not in live:
                run(graph.writer[value])
        steps.append((index, 0))
        live.update(implementation.writes)

    for index, operator in enumerate(graph.operators):
        if not operator.optional:
            run(index)
    return tuple(steps)
