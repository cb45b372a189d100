"""Tying a schedule to the graph it is applied to."""

from collections.abc import Collection

from monetlite.differences import first_difference
from monetlite.errors import IllegalSchedule, ScheduleMismatch
from monetlite.graph import Operator, OperatorGraph
from monetlite.runtime.inputs import autocast_problem
from monetlite.schedule import Schedule, Step, check_order, deaths


def bind(schedule: Schedule, graph: OperatorGraph) -> tuple[Step, ...]:
    """The steps of a schedule on a graph, checked.

    Raises:
        ScheduleMismatch: the graph is not the one the schedule was solved for, or the steps are not legal
            on it.
    """
    if schedule.autocast != graph.autocast:
        raise ScheduleMismatch(autocast_problem(schedule.autocast, graph.autocast))
    if schedule.structure != graph.structure:
        raise ScheduleMismatch(
            f"the schedule was solved for {schedule.name} with {schedule.operators} operators (structure "
            f"{schedule.structure}); this model has {graph.traced_count} (structure {graph.structure}). "
            f"{first_difference(schedule, graph)} Solve a schedule for this model as it is: which parameters are "
            "frozen, which submodules are in evaluation mode, and the device all matter"
        )
    steps = schedule.steps(graph)
    try:
        check_legal(graph, steps)
    except IllegalSchedule as error:
        raise ScheduleMismatch(f"the schedule is not legal on this model: {error}") from error
    return steps


def avoiding(graph: OperatorGraph, steps: tuple[Step, ...], operators: Collection[str]) -> tuple[Step, ...]:
    """The same steps, with the default implementation of some operators in place of a guarded one.

    What the default reads instead is kept from when it was last computed, and not overwritten in between: the
    peak rises by at most its size.
    """
    changed = list(steps)
    wanted: set[int] = set()
    for at in reversed(range(len(steps))):
        index, choice = steps[at]
        operator = graph.operators[index]
        if operator.name in operators and operator.implementations[choice].guard is not None:
            extra = set(operator.implementations[0].reads) - set(operator.implementations[choice].reads)
            wanted |= extra
            choice = 0
        elif wanted.intersection(operator.implementations[choice].overwrites):
            choice = _sparing(operator, choice, wanted)
        changed[at] = (index, choice)
        wanted -= set(operator.writes)
    return tuple(changed)


def _sparing(operator: Operator, choice: int, values: Collection[int]) -> int:
    """An implementation that reads and writes what another does and overwrites none of some values."""
    like = operator.implementations[choice]
    return next(
        at
        for at, item in enumerate(operator.implementations)
        if set(item.reads) == set(like.reads)
        and item.writes == like.writes
        and item.guard == like.guard
        and not set(values).intersection(item.overwrites)
    )


def check_legal(graph: OperatorGraph, steps: tuple[Step, ...]) -> None:
    """Check everything `simulate` checks that does not need costs.

    Raises:
        IllegalSchedule: names the step.
    """
    check_order(graph, [index for index, _ in steps])
    live: set[int] = set()
    for at, ((index, choice), dying) in enumerate(zip(steps, deaths(graph, steps), strict=True)):
        implementation = graph.operators[index].implementations[choice]
        for value in implementation.reads:
            if value not in live:
                raise IllegalSchedule(
                    f"step {at} ({graph.operators[index].name}): reads {graph.values[value].name}, "
                    "which is not in memory there"
                )
        for value in implementation.overwrites:
            if value not in dying:
                raise IllegalSchedule(
                    f"step {at} ({graph.operators[index].name}): overwrites {graph.values[value].name}, "
                    "which is read later"
                )
        live |= set(implementation.writes)
        live -= dying
