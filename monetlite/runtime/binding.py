"""Tying a schedule to the graph it is applied to."""

from monetlite.errors import IllegalSchedule, ScheduleMismatch
from monetlite.graph import OperatorGraph
from monetlite.schedule import Schedule, Step, check_order, deaths


def bind(schedule: Schedule, graph: OperatorGraph) -> tuple[Step, ...]:
    """The steps of a schedule on a graph, checked.

    Raises:
        ScheduleMismatch: the graph is not the one the schedule was solved for, or the steps are not legal
            on it.
    """
    if schedule.structure != graph.structure:
        raise ScheduleMismatch(
            f"the schedule was solved for {schedule.name} with {schedule.operators} operators (structure "
            f"{schedule.structure}); this model has {len(graph.operators)} (structure {graph.structure}). "
            f"{_first_difference(schedule, graph)} Solve a schedule for this model as it is: which parameters are "
            "frozen, which submodules are in evaluation mode, and the device all matter"
        )
    steps = schedule.steps(graph)
    try:
        check_legal(graph, steps)
    except IllegalSchedule as error:
        raise ScheduleMismatch(f"the schedule is not legal on this model: {error}") from error
    return steps


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


def _first_difference(schedule: Schedule, graph: OperatorGraph) -> str:
    known = graph.by_name
    named = [*schedule.choices.before, *schedule.choices.implementations]
    missing = next((name for name in named if name not in known), None)
    return f"It names {missing}, which this model does not have." if missing else ""
