"""A `Schedule` of a training step: its choices, and what the solver promises of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike

from monetlite.core.choices import Choices
from monetlite.core.graph import AS_TRACED, OperatorGraph, TensorSpec
from monetlite.core.source import ModelSource
from monetlite.core.steps import Step


class Status(StrEnum):
    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIMEOUT = "timeout"
    """Time ran out with nothing found, and infeasibility is not proven."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What to run, in which order and how, and what the solver promises of it.

    Attributes:
        name: of the model; fingerprint: of the operator graph it was solved for; structure: the same without
            sizes, which another batch size of the model shares; operators: how many it has.
        inputs: layouts of the input tensors it was solved for.
        choices: what it chooses, by operator name. `steps(graph)` spells it out.
        budget_bytes: the budget it was solved for; peak_bytes: the peak it is predicted to reach.
        latency_ms: the predicted step time; plain_latency_ms and plain_peak_bytes: those of plain training.
        lower_bound_ms: no schedule within the budget is faster than this.
        status: optimal or feasible. solver, seconds: how it was found and how long that took.
        device, kind: what the costs are of, and whether they were measured or estimated; environment: the
            versions behind them; optimizer: whose state is counted, if any; accumulate: whether
            gradients of earlier batches are.
        tolerance: the most that an implementation it may use differs from the default one; layout: of images
            in the graph it was solved for (see `trace`); autocast: the dtype of `torch.autocast` around it, if on.
        smallest_proven_bytes: nothing fits below this; smallest_reached_bytes: the smallest peak for which a
            schedule is known.
        reserved_bytes: if it was solved for a budget of reserved memory, the least that torch's CUDA allocator can
            be limited to for it, as predicted.
        source: what the model can be built from again, if it has a name that means the same everywhere.
        operator_digests: of each operator, to say which one differs where the structure does.
    """

    name: str
    fingerprint: str
    structure: str
    operators: int
    inputs: Mapping[str, TensorSpec]
    choices: Choices
    budget_bytes: int
    peak_bytes: int
    latency_ms: float
    lower_bound_ms: float
    status: Status
    plain_peak_bytes: int
    plain_latency_ms: float
    device: str
    kind: str
    solver: str
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accumulate: bool = False
    tolerance: float = 0.0
    layout: str = AS_TRACED
    autocast: str = ""
    smallest_proven_bytes: int = 0
    smallest_reached_bytes: int | None = None
    reserved_bytes: int | None = None
    source: ModelSource | None = None
    operator_digests: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """(latency − bound) / latency: how much faster, at most, the best schedule could be."""
        if self.latency_ms <= 0:
            return 0.0
        return max(0.0, (self.latency_ms - self.lower_bound_ms) / self.latency_ms)

    @property
    def overhead(self) -> float:
        """Predicted step time over plain training's, less one."""
        return self.latency_ms / self.plain_latency_ms - 1 if self.plain_latency_ms > 0 else 0.0

    def steps(self, graph: OperatorGraph) -> tuple[Step, ...]:
        """(operator, implementation) pairs in execution order.

        Raises:
            ScheduleMismatch: the graph lacks an operator or an implementation that the schedule names.
        """
        return self.choices.steps(graph)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the schedule as YAML, atomically.

        Raises:
            ScheduleFileError: the file can't be written; what was there before is left as it was.
        """
        from monetlite.core.files.schedules import save_schedule

        save_schedule(self, path)
