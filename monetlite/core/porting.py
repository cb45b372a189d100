"""A schedule on a graph that lacks some of the implementations it names: another device's, another version's."""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace

from monetlite.core.choices import Choices, Run
from monetlite.core.costs import without_costs
from monetlite.core.errors import ScheduleMismatch
from monetlite.core.graph import Operator, OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes


def ported_steps(schedule: Schedule, graph: OperatorGraph) -> tuple[Step, ...]:
    """The steps of a schedule, with the default in place of implementations that the graph does not offer.

    One warning says which, and what tensors take then. What the defaults read instead is kept for them.

    Raises:
        ScheduleMismatch: the graph lacks an operator that the schedule names, or what a default needs is
            overwritten by an operator that has no other way.
    """
    choices, missing = _offered(schedule.choices, graph)
    steps = choices.steps(graph)
    if not missing:
        return steps
    without = {operator for operator, _ in missing}
    steps = keeping_for(
        graph,
        steps,
        {at for at, (index, choice) in enumerate(steps) if not choice and graph.operators[index].name in without},
    )
    peak_bytes = simulate(without_costs(graph), steps).peak_bytes
    runs = list(dict.fromkeys(missing))
    listed = ", ".join(f"{operator} as {how}" for operator, how in runs[:3])
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    over = "" if peak_bytes <= schedule.budget_bytes else ", MORE than the budget"
    warnings.warn(
        f"the schedule of {schedule.name} was solved for {schedule.device} and runs {listed}{more}, which there is "
        f"none of on this {graph.device}; they run by default instead. Tensors then take up to "
        f"{format_bytes(peak_bytes)} of the {format_bytes(schedule.budget_bytes)} budgeted{over} (predicted with "
        f"them: {format_bytes(schedule.peak_bytes)}). Solve for this device to make the most of it",
        stacklevel=3,
    )
    return steps


def lacking(schedule: Schedule, graph: OperatorGraph) -> bool:
    """Whether a graph lacks implementations that a schedule names."""
    return bool(_offered(schedule.choices, graph)[1])


def keeping_for(graph: OperatorGraph, steps: Sequence[Step], positions: Collection[int]) -> tuple[Step, ...]:
    """The same steps, in which those at some positions run by default.

    What the default reads beyond what was read before is kept from when it was last computed, and not overwritten
    in between: the peak rises by at most its size.

    Raises:
        ScheduleMismatch: something in between can only run over it.
    """
    changed = list(steps)
    wanted: set[int] = set()
    for at in reversed(range(len(steps))):
        index, choice = steps[at]
        operator = graph.operators[index]
        if at in positions:
            extra = set(operator.implementations[0].reads)
            if choice != 0:
                extra -= set(operator.implementations[choice].reads)
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
    for at, item in enumerate(operator.implementations):
        same = set(item.reads) == set(like.reads) and item.writes == like.writes and item.guard == like.guard
        if same and not set(values).intersection(item.overwrites):
            return at
    raise ScheduleMismatch(
        f"the schedule runs {operator.name} over a value that is needed later on this device, and there is no "
        "other way to run it; solve the schedule again"
    )


def _offered(choices: Choices, graph: OperatorGraph) -> tuple[Choices, list[Run]]:
    """The choices with defaults in place of what the graph does not offer, and what that is.

    Operators that are missing altogether are left for `Choices.steps` to refuse.
    """
    missing: list[Run] = []

    def offered(run: Run) -> Run:
        index = graph.by_name.get(run[0])
        if index is None or graph.operators[index].find(run[1]) is not None:
            return run
        missing.append(run)
        return run[0], graph.operators[index].implementations[0].name

    implementations = dict(map(offered, choices.implementations.items()))
    before = {name: tuple(map(offered, runs)) for name, runs in choices.before.items()}
    return replace(choices, implementations=implementations, before=before), missing


__all__ = ["keeping_for", "lacking", "ported_steps"]
