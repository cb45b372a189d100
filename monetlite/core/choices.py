"""The choices of a schedule, by name: small enough to read in a diff, and free of indices.

The rules say the rest: forward operators run in order, then backward operators in order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from monetlite.core.errors import ScheduleMismatch
from monetlite.core.graph import OperatorGraph
from monetlite.core.steps import Step, stored_values

_UNKNOWN = (
    "which this model's step does not have: its file was changed, or is for another model. Solve again for this one"
)

DEFAULT = "default"

Run = tuple[str, str]
"""(operator, implementation), by name."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a schedule.

    Attributes:
        before: re-runs and optional operators, by the operator right before whose run in order they run.
        implementations: of first runs, if not the default.
        stored: values that cross the border. It follows from the rest, and is there for readers.
    """

    before: Mapping[str, tuple[Run, ...]] = field(default_factory=dict)
    implementations: Mapping[str, str] = field(default_factory=dict)
    stored: tuple[str, ...] = ()

    @classmethod
    def of_steps(cls, graph: OperatorGraph, steps: Sequence[Step]) -> "Choices":
        """The choices that a legal sequence of steps makes."""
        before: dict[str, tuple[Run, ...]] = {}
        implementations: dict[str, str] = {}
        waiting: list[Run] = []
        ran: set[int] = set()
        for index, choice in steps:
            operator = graph.operators[index]
            chosen = operator.implementations[choice].name
            if operator.optional or index in ran:
                waiting.append((operator.name, chosen))
                continue
            ran.add(index)
            if waiting:
                before[operator.name], waiting = tuple(waiting), []
            if choice != 0:
                implementations[operator.name] = chosen
        return cls(
            before=before,
            implementations=implementations,
            stored=tuple(graph.values[value].name for value in stored_values(graph, steps)),
        )

    def steps(self, graph: OperatorGraph) -> tuple[Step, ...]:
        """The sequence of steps these choices make of a graph.

        Raises:
            ScheduleMismatch: an operator or implementation that the graph does not have.
        """
        known = graph.by_name
        for name in (*self.before, *self.implementations):
            if name not in known:
                raise ScheduleMismatch(f"the schedule names operator {name!r}, {_UNKNOWN}")
        steps: list[Step] = []
        for operator in graph.operators:
            if operator.optional:
                continue
            for name, implementation in self.before.get(operator.name, ()):
                steps.append(_step(graph, name, implementation))
            steps.append(_step(graph, operator.name, self.implementations.get(operator.name)))
        return tuple(steps)


def _step(graph: OperatorGraph, name: str, implementation: str | None) -> Step:
    index = graph.by_name.get(name)
    if index is None:
        raise ScheduleMismatch(f"the schedule runs operator {name!r}, {_UNKNOWN}")
    if implementation is None:
        return index, 0
    operator = graph.operators[index]
    for choice, item in enumerate(operator.implementations):
        if item.name == implementation:
            return index, choice
    offered = ", ".join(item.name for item in operator.implementations)
    raise ScheduleMismatch(
        f"the schedule runs {name} as {implementation!r}; this graph offers {offered}. "
        "Solve the schedule again with this version of monetlite"
    )
