"""Where a model's graph differs from the one that a schedule was solved for, in words."""

from collections.abc import Sequence

from monetlite.core.graph import Operator, OperatorGraph
from monetlite.core.schedule import Schedule


def first_difference(schedule: Schedule, graph: OperatorGraph) -> str:
    """Where the two begin to differ, as a sentence; nothing for files that don't say enough."""
    theirs, ours = schedule.operator_digests, graph.operator_digests
    traced = graph.traced
    if not theirs:
        known = graph.by_name
        named = [*schedule.choices.before, *schedule.choices.implementations]
        unknown = next((name for name in named if name not in known), None)
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
    """How many items at the beginning are the same."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))


def _described(operator: Operator) -> str:
    return f"{operator.name} ({operator.family}{f', {operator.source}' if operator.source else ''})"


__all__ = ["first_difference"]
