"""A `Profile`: an operator graph with what each implementation of each operator costs on one device.

A profile file is JSON, an operator or a value to a line. It has what solving needs: what operators read and write,
sizes, costs. It does not say how operators are called: a schedule is lowered from the model itself, where it runs.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from os import PathLike
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.documents import common_fields, plain_data, read_document
from monetlite.core.files.plain_data import Document, PlainData, load_json
from monetlite.core.graph import (
    ALL_OUTPUTS,
    AS_TRACED,
    Implementation,
    Layout,
    Operator,
    OperatorGraph,
    Phase,
    Resident,
    TensorSpec,
    Value,
    ValueKind,
)
from monetlite.core.source import ModelSource
from monetlite.core.units import MAX_INTEGER, Amount, Count


class ProfileKind(StrEnum):
    MEASURED = "measured"
    ESTIMATED = "estimated"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Latency and workspace of one run of an implementation.

    `workspace_bytes` is its memory beyond its inputs and outputs while it runs, negative in published data that
    counts a saving that way. `host_ms` is the time in which the CPU hands the run to the GPU; 0 where it is not
    known, and on a CPU. The `recompute_*` figures, if given, apply from the operator's second run on.
    """

    latency_ms: float
    workspace_bytes: int
    recompute_latency_ms: float | None = None
    recompute_workspace_bytes: int | None = None
    host_ms: float = 0.0
    recompute_host_ms: float | None = None

    def host_of_run(self, again: bool) -> float:
        """Time of the host for a first run, or for a re-run, in ms."""
        return self.recompute_host_ms if again and self.recompute_host_ms is not None else self.host_ms

    def of_run(self, again: bool) -> tuple[float, int]:
        """(latency in ms, workspace in bytes) of a first run, or of a re-run."""
        latency_ms, workspace_bytes = self.latency_ms, self.workspace_bytes
        if again:
            latency_ms = latency_ms if self.recompute_latency_ms is None else self.recompute_latency_ms
            if self.recompute_workspace_bytes is not None:
                workspace_bytes = self.recompute_workspace_bytes
        return latency_ms, workspace_bytes


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of every implementation of every operator of a graph.

    `costs[operator][i]` belongs to the operator's i-th implementation. `environment` names the device and the
    versions that they were measured with.
    """

    graph: OperatorGraph
    device: str
    kind: ProfileKind
    costs: tuple[tuple[Cost, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accumulate: bool = False
    step_in_backward: bool = False
    source: ModelSource | None = None
    """The model's name and sizes, if another machine can build the same from them."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write a profile file, which `monetlite.load_profile` and `monetlite solve --profile` read.

        Raises:
            ScheduleFileError: the file can't be written; what was there before is unchanged.
        """
        write_atomically(path, profile_text(self))

    def __post_init__(self) -> None:
        assert [len(costs) for costs in self.costs] == [len(op.implementations) for op in self.graph.operators]

    def restricted(self, allowed: Callable[[Implementation], bool]) -> "Profile":
        """The same profile with the defaults and the implementations that are allowed."""
        costs = tuple(
            tuple(
                cost
                for number, (item, cost) in enumerate(zip(operator.implementations, of, strict=True))
                if number == 0 or allowed(item)
            )
            for operator, of in zip(self.graph.operators, self.costs, strict=True)
        )
        return replace(self, graph=self.graph.restricted(allowed), costs=costs)

    def of_the_device(self) -> "Profile":
        """The same profile without the host's times: latencies are the device's alone."""
        costs = tuple(
            tuple(replace(cost, host_ms=0.0, recompute_host_ms=None) for cost in each) for each in self.costs
        )
        return replace(self, costs=costs)

    def within(self, tolerance: float) -> "Profile":
        """The same profile with the implementations whose tolerance is at most this."""
        return self.restricted(lambda item: item.tolerance <= tolerance)


def without_costs(graph: OperatorGraph) -> Profile:
    """A profile without latencies and workspaces: `simulate` then gives the memory of values alone."""
    nothing = Cost(latency_ms=0.0, workspace_bytes=0)
    return Profile(
        graph=graph,
        device=graph.device,
        kind=ProfileKind.ESTIMATED,
        costs=tuple(tuple(nothing for _ in operator.implementations) for operator in graph.operators),
    )


_Signed = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
_MAX_ITEMS = Meta(max_length=100_000)


class _ValueRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    kind: ValueKind
    size_bytes: Count
    shape: tuple[Count, ...]
    dtype: str
    note: bool = False


class _ImplementationRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    reads: tuple[Count, ...]
    writes: tuple[Count, ...]
    latency_ms: Amount
    workspace_bytes: _Signed
    overwrites: tuple[Count, ...] = ()
    tolerance: Amount = 0.0
    devices: tuple[str, ...] = ()
    recompute_latency_ms: Amount | None = None
    recompute_workspace_bytes: _Signed | None = None
    host_ms: Amount = 0.0
    recompute_host_ms: Amount | None = None


class _OperatorRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    family: str
    phase: Phase
    optional: bool = False
    rerunnable: bool = True
    derived: bool = False
    module: str = ""
    source: str = ""
    implementations: Annotated[tuple[_ImplementationRow, ...], Meta(min_length=1)]


class CostSource(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of costs, as files have it."""

    device: Annotated[str, Meta(description="what the costs are of")]
    kind: ProfileKind
    environment: Annotated[dict[str, str], Meta(description="versions behind measured costs")]


class Priced(Protocol):
    """Anything with costs: a profile, or a schedule."""

    @property
    def device(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def environment(self) -> Mapping[str, str]: ...


def cost_device(priced: Priced) -> str:
    """The device that costs are of, by its own name where they were measured."""
    estimated = priced.kind == ProfileKind.ESTIMATED
    return priced.device if estimated else priced.environment.get("device", priced.device)


def costs_in_words(kind: str, device: str) -> str:
    return f"{'estimated for' if kind == ProfileKind.ESTIMATED else 'measured on'} {device}"


def cost_source(priced: Priced) -> str:
    """Source of costs, in words: `estimated for a100-40gb` or `measured on NAME`."""
    return costs_in_words(priced.kind, cost_device(priced))


class ProfileFile(Document, frozen=True, kw_only=True, tag="monetlite-profile"):
    """A profile file. Fields that may be missing have a default."""

    VERSIONS = range(1, 2)
    REMEDY = "Profile the model again"
    CALLED, MADE_BY = "profile file", "`monetlite measure --operators --model resnet50 --output resnet50.json`"

    version: Literal[1]
    model: str
    source: ModelSource | None = None
    fingerprint: str
    inputs: dict[str, TensorSpec]
    device: str
    layout: Layout = AS_TRACED
    autocast: str | None = None
    outputs: Literal["all", "loss", "trained"] = ALL_OUTPUTS
    optimizer: str | None = None
    accumulate: bool
    step_in_backward: bool = False
    costs: CostSource
    resident: Resident
    values: Annotated[tuple[_ValueRow, ...], _MAX_ITEMS]
    operators: Annotated[tuple[_OperatorRow, ...], _MAX_ITEMS]


def profile_text(profile: Profile) -> str:
    """Write a profile as the text of its file."""
    graph = profile.graph
    differing = {
        "model": graph.name,
        "device": graph.device,
        "autocast": graph.autocast or None,
        "costs": CostSource(**common_fields(CostSource, profile)),
        "values": tuple(_ValueRow(**common_fields(_ValueRow, value)) for value in graph.values),
        "operators": tuple(
            _row(operator, costs) for operator, costs in zip(graph.operators, profile.costs, strict=True)
        ),
    }
    document = ProfileFile(version=1, **common_fields(ProfileFile, graph, profile) | differing)
    lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in plain_data(document).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _row(operator: Operator, costs: tuple[Cost, ...]) -> _OperatorRow:
    implementations = tuple(
        _ImplementationRow(**common_fields(_ImplementationRow, *pair))
        for pair in zip(operator.implementations, costs, strict=True)
    )
    return _OperatorRow(**common_fields(_OperatorRow, operator) | {"implementations": implementations})


def _lines(value: Any) -> str:
    """JSON on one line, or a list of mappings with one on each."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        return "[\n " + ",\n ".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def load_profile(path: str | PathLike[str]) -> Profile:
    """Read a profile file. Nothing in it is executed.

    The graph of the profile can be solved and simulated, not run: its implementations have no calls.

    Raises:
        ScheduleFileError: the file is missing, truncated, malformed, or of another version; says where.
    """
    data = load_json(path, ProfileFile)
    file = read_document(data, ProfileFile)
    _check_rows(data, file)
    graph = OperatorGraph(
        **common_fields(OperatorGraph, file)
        | {
            "name": file.model,
            "autocast": file.autocast or "",
            "values": tuple(Value(**common_fields(Value, row)) for row in file.values),
            "operators": tuple(_operator(row) for row in file.operators),
        }
    )
    if graph.fingerprint != file.fingerprint:
        raise data.error(("fingerprint",), "is not that of the operators in the file: it has been changed")
    costs = tuple(
        tuple(Cost(**common_fields(Cost, item)) for item in row.implementations) for row in file.operators
    )
    return Profile(**common_fields(Profile, file, file.costs) | {"graph": graph, "costs": costs})


def _operator(row: _OperatorRow) -> Operator:
    implementations = tuple(Implementation(**common_fields(Implementation, item)) for item in row.implementations)
    return Operator(**common_fields(Operator, row) | {"implementations": implementations})


def _check_rows(data: PlainData, file: ProfileFile) -> None:
    """Check that the rows make a graph.

    Names are unique, forward comes first, and each value has one writer, which stands before its readers.
    """
    writers: dict[int, str] = {}
    names: set[str] = set()
    seen_backward = False
    for number, row in enumerate(file.operators):
        place = ("operators", number)
        seen_backward |= row.phase is Phase.BACKWARD
        if seen_backward and row.phase is Phase.FORWARD:
            raise data.error((*place, "phase"), "is forward, after a backward operator")
        if row.name in names:
            raise data.error((*place, "name"), f"is {row.name!r:.80}, which another operator has")
        names.add(row.name)
        if len({item.name for item in row.implementations}) != len(row.implementations):
            raise data.error((*place, "implementations"), "should be one or more, of different names")
        written = row.implementations[0].writes
        for at, item in enumerate(row.implementations):
            here = (*place, "implementations", at)
            for field_name in ("reads", "writes", "overwrites"):
                if (largest := max(getattr(item, field_name), default=0)) >= len(file.values):
                    raise data.error((*here, field_name), f"has {largest}, and there are {len(file.values)} values")
            for field_name in ("reads", "overwrites"):
                if unwritten := set(getattr(item, field_name)).difference(writers):
                    raise data.error((*here, field_name), f"has {min(unwritten)}, which no operator before writes")
            if not set(item.writes) <= set(written):
                raise data.error((*here, "writes"), "has a value that the first implementation does not write")
        for value in written:
            if value in writers:
                raise data.error(place, f"writes value {value}, which {writers[value]!r:.80} writes")
            writers[value] = row.name
