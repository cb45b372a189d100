"""A `Profile`: an operator graph with what each implementation of each operator costs on one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from os import PathLike

from monetlite.core.graph import Implementation, OperatorGraph
from monetlite.core.source import ModelSource


class ProfileKind(StrEnum):
    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one run of an implementation takes.

    `workspace_bytes` is the most it holds beyond its inputs and outputs while it runs; it is negative where
    published data counts a saving that way. The `recompute_*` figures apply from the second run of the
    operator on, where they differ.
    """

    latency_ms: float
    workspace_bytes: int
    recompute_latency_ms: float | None = None
    recompute_workspace_bytes: int | None = None

    def of_run(self, again: bool) -> tuple[float, int]:
        """(latency in ms, workspace in bytes) of a first run, or of a run `again`."""
        latency_ms, workspace_bytes = self.latency_ms, self.workspace_bytes
        if again:
            latency_ms = latency_ms if self.recompute_latency_ms is None else self.recompute_latency_ms
            if self.recompute_workspace_bytes is not None:
                workspace_bytes = self.recompute_workspace_bytes
        return latency_ms, workspace_bytes


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of every implementation of every operator of a graph.

    `costs[operator][i]` belongs to the operator's i-th implementation. `environment` names what the figures
    come from: the device, and the versions that matter.
    """

    graph: OperatorGraph
    device: str
    kind: ProfileKind
    costs: tuple[tuple[Cost, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accumulate: bool = False
    source: ModelSource | None = None
    """What the model was built from, where another machine can build it the same."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write a profile file, which `monetlite.load_profile` and `monetlite solve --profile` read.

        Raises:
            ScheduleFileError: the file can't be written; what was there before is unchanged.
        """
        from monetlite.core.files.profiles import save_profile

        save_profile(self, path)

    def __post_init__(self) -> None:
        assert [len(costs) for costs in self.costs] == [len(op.implementations) for op in self.graph.operators]

    def restricted(self, allowed: Callable[[Implementation], bool]) -> "Profile":
        """The same profile with, beside the defaults, only the implementations that are allowed."""
        costs = tuple(
            tuple(
                cost
                for number, (item, cost) in enumerate(zip(operator.implementations, of, strict=True))
                if number == 0 or allowed(item)
            )
            for operator, of in zip(self.graph.operators, self.costs, strict=True)
        )
        return replace(self, graph=self.graph.restricted(allowed), costs=costs)

    def within(self, tolerance: float) -> "Profile":
        """The same profile with only the implementations that promise at least this tolerance."""
        return self.restricted(lambda item: item.tolerance <= tolerance)


def without_costs(graph: OperatorGraph) -> Profile:
    """A profile in which nothing takes time or workspace: what `simulate` finds then is what values alone take."""
    nothing = Cost(latency_ms=0.0, workspace_bytes=0)
    return Profile(
        graph=graph,
        device=graph.device,
        kind=ProfileKind.ESTIMATED,
        costs=tuple(tuple(nothing for _ in operator.implementations) for operator in graph.operators),
    )
