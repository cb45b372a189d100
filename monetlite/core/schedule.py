"""A `Schedule` of a training step: its choices, and what the solver promises of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from monetlite.core.choices import DEFAULT, Choices, Run
from monetlite.core.costs import CostSource
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.documents import (
    common_fields,
    json_schema,
    plain_data,
    read_document,
    unknown_fields,
)
from monetlite.core.files.plain_data import Document, dump_yaml, load_yaml
from monetlite.core.graph import ALL_OUTPUTS, AS_TRACED, Layout, OperatorGraph, TensorSpec
from monetlite.core.source import ModelSource
from monetlite.core.steps import Step
from monetlite.core.units import Amount, Count, Positive, format_bytes


class Status(StrEnum):
    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIMEOUT = "timeout"
    """Time ran out with nothing found, and infeasibility is not proven."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule:
    """Values to store, values to recompute, the implementation of each run, and the solver's promises.

    Attributes:
        name: of the model; fingerprint, structure: of its operator graph; operators: their number.
        inputs: layouts of the input tensors it was solved for.
        choices: by operator name. `steps(graph)` spells them out.
        budget_bytes: the budget it was solved for; peak_bytes: the predicted peak.
        latency_ms: the predicted step time; plain_latency_ms, plain_peak_bytes: of plain training.
        lower_bound_ms: no schedule within the budget is faster than this.
        status: optimal or feasible; solver: the method that found it; seconds: the time that took.
        device, kind, environment: of the costs; optimizer: whose state is counted, if any; accumulate: gradients of
            earlier batches are counted; step_in_backward: each gradient is counted until its parameter is updated.
        tolerance: largest tolerance of an implementation that it may use; layout: of images (see `trace`).
        autocast: the dtype of `torch.autocast` around it, if on.
        smallest_proven_bytes: nothing fits below this; smallest_reached_bytes: the smallest peak known.
        reserved_bytes: predicted smallest limit of torch's CUDA allocator, for a budget of reserved memory.
        source: the model's name and sizes, if the name means the same everywhere.
        operator_digests: of each operator, to name the first that differs from another graph's.
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
    step_in_backward: bool = False
    tolerance: float = 0.0
    layout: str = AS_TRACED
    autocast: str = ""
    outputs: str = ALL_OUTPUTS
    smallest_proven_bytes: int = 0
    smallest_reached_bytes: int | None = None
    reserved_bytes: int | None = None
    source: ModelSource | None = None
    operator_digests: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.name} within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{self.overhead:+.1%} step time ({self.kind} for {self.device})"
        )

    def __repr__(self) -> str:
        return f"<Schedule of {self}>"

    @property
    def gap(self) -> float:
        """(latency − bound) / latency."""
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
        write_atomically(path, schedule_text(self))


BOUND_ROUNDING = 1e-6
"""Part of a latency by which a bound in a file may exceed it: both are sums of floating-point numbers."""


class _PredictedFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    peak_bytes: Positive
    latency_ms: Amount
    reserved_bytes: Count | None = None


class _PlainFields(msgspec.Struct, frozen=True, kw_only=True):
    peak_bytes: Positive
    latency_ms: Amount


class _SolveFields(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    lower_bound_ms: Annotated[Amount, Meta(description="no schedule within the budget is faster")]
    gap: Annotated[Amount, Meta(description="(latency - bound) / latency")]
    solver: str
    seconds: Amount
    smallest_proven_bytes: Annotated[Count, Meta(description="no budget below it is feasible")]
    smallest_reached_bytes: Annotated[Count | None, Meta(description="smallest peak of any schedule seen")] = None


# No pattern may stand in this union: msgspec 0.22 frees such a union with a mapping or a list twice.
_RUN = str | Annotated[dict[str, str], Meta(min_length=1, max_length=1)]


class ScheduleFile(Document, frozen=True, kw_only=True, tag="monetlite-schedule"):
    """A training step's schedule, version 2. Sizes are in bytes, times in milliseconds."""

    VERSIONS = range(1, 3)
    REMEDY = "Update monetlite, or solve the schedule again"
    CALLED, MADE_BY = "schedule file", "`monetlite solve --model resnet50 --budget 6GB`"

    version: Literal[2]
    name: Annotated[str, Meta(description="name of the model, for people")] = msgspec.field(name="model")
    source: Annotated[
        ModelSource | None, Meta(description="what to build the model from again; null for a person's own code")
    ] = None
    fingerprint: Annotated[str, Meta(description="of the operator graph: operators, edges, sizes, dtypes")]
    structure: Annotated[str, Meta(description="the fingerprint without sizes, which other batch sizes share")]
    operators: Annotated[Count, Meta(description="how many operators the graph has")]
    inputs: Annotated[dict[str, TensorSpec], Meta(description="layouts of the input tensors")]
    optimizer: Annotated[str | None, Meta(description="whose state the peak counts")] = None
    accumulate: Annotated[bool, Meta(description="whether the peak counts gradients of earlier batches")] = False
    step_in_backward: Annotated[
        bool, Meta(description="whether the peak counts each gradient only until its parameter is updated")
    ] = False
    tolerance: Annotated[
        float,
        Meta(ge=0, lt=1, description="the most that an implementation's result may differ from the default's"),
    ] = 0.0
    layout: Annotated[Layout, Meta(description="of the step")] = AS_TRACED
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None, Meta(description="dtype of torch.autocast around the model")
    ] = None
    outputs: Annotated[
        Literal["all", "loss", "trained"],
        Meta(description="what the caller gets of a model that computes its loss"),
    ] = ALL_OUTPUTS
    costs: CostSource
    budget_bytes: Annotated[Positive, Meta(description="what was asked for")]
    predicted: _PredictedFields
    plain: Annotated[_PlainFields, Meta(description="plain training")]
    solve: _SolveFields
    stored: Annotated[
        tuple[str, ...],
        Meta(description="values kept from the forward to the backward pass; it follows from the rest"),
    ]
    before: Annotated[
        dict[str, tuple[_RUN, ...]],
        Meta(description="what runs right before an operator's own run: names, or {name: implementation}"),
    ]
    implementations: Annotated[
        dict[str, str], Meta(description="how operators run the first time, where that is not the default")
    ]
    operator_digests: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{4}( [0-9a-f]{4})*$", title="groups of four hexadecimal digits")]
        | None,
        Meta(description="four digits for each operator, to say which one differs"),
    ] = None


def schedule_text(schedule: Schedule) -> str:
    """Write a schedule as the text of its file."""
    choices = schedule.choices
    solve = msgspec.convert(schedule, _SolveFields, from_attributes=True)
    differing = {
        "tolerance": float(schedule.tolerance),
        "autocast": schedule.autocast or None,
        "costs": CostSource(**common_fields(CostSource, schedule)),
        "predicted": msgspec.convert(schedule, _PredictedFields, from_attributes=True),
        "plain": _PlainFields(peak_bytes=schedule.plain_peak_bytes, latency_ms=float(schedule.plain_latency_ms)),
        "solve": replace(solve, gap=round(solve.gap, 6), seconds=round(solve.seconds, 1)),
        "stored": choices.stored,
        "before": {
            name: tuple(operator if how == DEFAULT else {operator: how} for operator, how in runs)
            for name, runs in choices.before.items()
        },
        "implementations": choices.implementations,
        "operator_digests": " ".join(schedule.operator_digests) or None,
    }
    document = ScheduleFile(version=2, **common_fields(ScheduleFile, schedule) | differing)
    header = (
        f"{schedule}.\n"
        "stored: kept from the forward to the backward pass. before: what is run again right before an operator.\n"
        "implementations: how operators run the first time, where that is not the default."
    )
    return dump_yaml(plain_data(document), header)


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule file. Nothing in it is executed; what it names is checked against the model later.

    Raises:
        ScheduleFileError: the file is missing, truncated, malformed, or of another version; says where.
    """
    file = read_document(load_yaml(path, ScheduleFile), ScheduleFile)
    if file.solve.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise ScheduleFileError(
            f"{path}: solve.status is {str(file.solve.status)!r}, of which there is no schedule"
        )
    bound_ms, latency_ms = file.solve.lower_bound_ms, file.predicted.latency_ms
    if bound_ms > latency_ms * (1 + BOUND_ROUNDING):
        raise ScheduleFileError(
            f"{path}: solve.lower_bound_ms is {bound_ms:g}, and predicted.latency_ms is {latency_ms:g}, below it"
        )
    return Schedule(
        **common_fields(Schedule, file, file.costs, file.predicted, file.solve)
        | {
            "kind": str(file.costs.kind),
            "autocast": file.autocast or "",
            "plain_peak_bytes": file.plain.peak_bytes,
            "plain_latency_ms": file.plain.latency_ms,
            "choices": Choices(
                before={name: tuple(map(_run, runs)) for name, runs in file.before.items()},
                implementations=file.implementations,
                stored=file.stored,
            ),
            "operator_digests": tuple((file.operator_digests or "").split()),
        }
    )


def schedule_problems(path: str | PathLike[str]) -> tuple[str, ...]:
    """Find what a schedule file has that its description lacks; reading skips it.

    Raises:
        ScheduleFileError: it is not YAML of our kind at all.
    """
    data = load_yaml(path, ScheduleFile).data
    return tuple(f"{place} is not a field of a schedule" for place in unknown_fields(data, ScheduleFile))


def schedule_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of schedule files, for other people's tools."""
    return json_schema(ScheduleFile, "monetlite schedule", (ScheduleFile.__doc__ or "").partition("\n")[0])


def _run(run: str | dict[str, str]) -> Run:
    """The operator and its implementation: a name stands for the default."""
    return (run, DEFAULT) if isinstance(run, str) else next(iter(run.items()))
