"""Binding: the steps of a schedule on a graph, which may be of another device, another version or other sizes."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from monetlite.core.announcing import warn
from monetlite.core.choices import Choices, Run
from monetlite.core.costs import without_costs
from monetlite.core.errors import IllegalSchedule, ScheduleMismatch
from monetlite.core.graph import Operator, OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes


def bind(schedule: Schedule, graph: OperatorGraph) -> tuple[Step, ...]:
    """The steps of a schedule on a graph, checked.

    Implementations that the graph does not offer run by default. One warning says which, and how much memory
    tensors then take. Values that the defaults read instead are kept for them.

    Raises:
        ScheduleMismatch: the schedule was solved for another graph, or its steps are not legal on this one.
    """
    if schedule.autocast != graph.autocast:
        raise ScheduleMismatch(autocast_problem(schedule.autocast, graph.autocast))
    if schedule.structure != graph.structure:
        raise ScheduleMismatch(
            f"the schedule was solved for {schedule.name} with {schedule.operators} operators (structure "
            f"{schedule.structure}); this model has {len(graph.traced)} (structure {graph.structure}). "
            f"{first_difference(schedule, graph)} Solve a schedule for this model as it is: which parameters are "
            "frozen, which submodules are in evaluation mode, and the device all matter"
        )
    choices, missing = _offered(schedule.choices, graph)
    steps = choices.steps(graph)
    if missing:
        names = {name for name, _ in missing}
        steps = by_default(
            graph,
            steps,
            {at for at, (index, choice) in enumerate(steps) if not choice and graph.operators[index].name in names},
        )
    try:
        peak_bytes = simulate(without_costs(graph), steps).peak_bytes
    except IllegalSchedule as error:
        raise ScheduleMismatch(f"the schedule is not legal on this model: {error}") from error
    if missing:
        runs = list(dict.fromkeys(missing))
        listed = ", ".join(f"{operator} as {how}" for operator, how in runs[:3])
        more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
        over = "" if peak_bytes <= schedule.budget_bytes else ", MORE than the budget"
        if schedule.device == graph.device:
            why, advice = "this step does not offer, as its tensors lie otherwise in memory", "these inputs"
        else:
            why, advice = f"do not exist on this {graph.device}", "this device"
        warn(
            f"the schedule of {schedule.name} was solved for {schedule.device} and runs {listed}{more}, which "
            f"{why}; they run by default instead. Tensors then take up to {format_bytes(peak_bytes)} of the "
            f"{format_bytes(schedule.budget_bytes)} budgeted{over} (predicted with them: "
            f"{format_bytes(schedule.peak_bytes)}). Solve for {advice} to make the most of it"
        )
    return steps


def lacking(schedule: Schedule, graph: OperatorGraph) -> bool:
    """Tell whether a graph lacks implementations that a schedule names."""
    return bool(_offered(schedule.choices, graph)[1])


def by_default(graph: OperatorGraph, steps: Sequence[Step], positions: Collection[int]) -> tuple[Step, ...]:
    """The same steps, with the default implementation at some positions.

    Values that only the default reads are kept from when they were last computed, and not overwritten in between:
    the peak rises by at most their size.

    Raises:
        ScheduleMismatch: an operator in between can't run without overwriting one.
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
    """An implementation that reads and writes the same as another and overwrites none of some values."""
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
    """The choices with defaults in place of the runs that the graph does not offer, and those runs.

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


def autocast_problem(solved: str, found: str) -> str:
    """A sentence for a schedule that was solved under another `torch.autocast` than the step runs under."""
    ways = [f"under torch.autocast to {dtype}" if dtype else "without torch.autocast" for dtype in (solved, found)]
    return (
        f"the schedule was solved for steps {ways[0]}, this one runs {ways[1]}; solve it where the step runs: "
        "with torch.autocast(...): schedule = monetlite.optimize(...), or --autocast on the command line"
    )


def first_difference(schedule: Schedule, graph: OperatorGraph) -> str:
    """A sentence on the first difference of two graphs; empty for a file that doesn't say enough."""
    theirs, ours = schedule.operator_digests, graph.operator_digests
    traced = graph.traced
    if not theirs:
        named = [*schedule.choices.before, *schedule.choices.implementations]
        unknown = next((name for name in named if name not in graph.by_name), None)
        return f"It names {unknown}, which this model does not have." if unknown else ""
    begin = _common(theirs, ours)
    end = _common(theirs[begin:][::-1], ours[begin:][::-1])
    missing, extra = len(theirs) - begin - end, len(ours) - begin - end
    if not extra:
        place = f"after {_described(traced[begin - 1])}" if begin else "at the beginning"
        return f"The schedule has {missing} more operators {place}." if missing else ""
    where = f"They begin to differ at {_described(traced[begin])}, operator {begin + 1} here"
    return f"{where}: {missing} operators of the schedule's are {extra} here."


def _common(some: Sequence[str], others: Sequence[str]) -> int:
    """Length of the common beginning of two sequences."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))


def _described(operator: Operator) -> str:
    return f"{operator.name} ({operator.family}{f', {operator.source}' if operator.source else ''})"
