"""Tying a schedule to the graph it is applied to."""

from collections.abc import Collection
from dataclasses import replace

from monetlite.core.differences import first_difference
from monetlite.core.errors import IllegalSchedule, ScheduleMismatch
from monetlite.core.graph import OperatorGraph
from monetlite.core.porting import keeping_for, ported_steps
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step, check_legal
from monetlite.operators.cudnn import with_named_plans
from monetlite.runtime.inputs import autocast_problem
from monetlite.tracing.build import Traced


def on_this_device(traced: Traced, schedule: Schedule) -> tuple[Traced, Schedule]:
    """A traced step with what can run where it is, the cuDNN plans that a schedule names included.

    What promises less than the schedule does is left out: where it was solved, it may have promised more.
    """
    here = traced.graph.available(traced.graph.device).restricted(lambda item: item.tolerance <= schedule.tolerance)
    graph, choices = with_named_plans(here, schedule.choices)
    return replace(traced, graph=graph), replace(schedule, choices=choices)


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
    try:
        steps = ported_steps(schedule, graph)
        check_legal(graph, steps)
    except IllegalSchedule as error:
        raise ScheduleMismatch(f"the schedule is not legal on this model: {error}") from error
    return steps


def avoiding(graph: OperatorGraph, steps: tuple[Step, ...], operators: Collection[str]) -> tuple[Step, ...]:
    """The same steps, with the default implementation of some operators in place of a guarded one."""
    guarded = {
        at
        for at, (index, choice) in enumerate(steps)
        if graph.operators[index].name in operators
        and graph.operators[index].implementations[choice].guard is not None
    }
    return keeping_for(graph, steps, guarded)
