"""Profile files: an operator graph and what it costs on one device, so that another machine can solve for it.

JSON, an operator or a value to a line. What a schedule needs is there: what operators read and write, sizes, costs.
How they are called is not: a schedule is lowered from the model itself, where it runs.
"""

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any, TypeVar

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.parts import inputs_data, read_inputs, read_layout, read_source, source_data
from monetlite.core.files.safe_yaml import LARGEST_INTEGER, Record, read_bounded
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind

FORMAT = "monetlite-profile"
VERSION = 1
LARGEST_FILE_BYTES = 64 * 2**20
MOST_VALUES = 100_000
"""Values, and operators, of a graph."""


def save_profile(profile: Profile, path: str | PathLike[str]) -> None:
    """Write a profile file, atomically.

    Raises:
        ScheduleFileError: the file can't be written; what was there before is unchanged.
    """
    write_atomically(path, profile_text(profile))


def load_profile(path: str | PathLike[str]) -> Profile:
    """Read a profile file. Nothing in it is executed.

    The graph of the profile can be solved and simulated, not run: its implementations have no calls.

    Raises:
        ScheduleFileError: the file is missing, truncated, malformed, or of another version; says where.
    """
    record = Record(_load_json(path), path)
    if record.text("format") != FORMAT:
        raise record.error("format", f"is {record.text('format')!r:.80}; a profile file has {FORMAT!r}")
    if record.integer("version") != VERSION:
        raise record.error(
            "version",
            f"is {record.integer('version')}; this monetlite reads version {VERSION}. Profile the model again",
        )
    costs, resident = record.record("costs"), record.record("resident")
    values = tuple(_value(item) for item in _limited(record, "values"))
    rows = _limited(record, "operators")
    graph = OperatorGraph(
        name=record.text("model"),
        operators=_operators(record, rows, len(values)),
        values=values,
        resident=Resident(**{name: resident.integer(name) for name in _RESIDENT}),
        inputs=read_inputs(record.record("inputs")),
        device=record.text("device"),
        layout=read_layout(record),
        autocast=record.text("autocast") if record.optional("autocast") else "",
    )
    if graph.fingerprint != record.text("fingerprint"):
        raise record.error("fingerprint", "is not that of the operators in the file: it has been changed")
    environment = costs.record("environment")
    return Profile(
        graph=graph,
        device=costs.text("device"),
        kind=_choice(costs, "kind", ProfileKind),
        costs=tuple(tuple(_cost(item) for item in row.records("implementations")) for row in rows),
        environment={name: environment.text(name) for name in environment},
        optimizer=record.text("optimizer") if record.optional("optimizer") else None,
        accumulate=record.flag("accumulate"),
        source=read_source(record.record("source")) if record.optional("source") else None,
    )


def profile_text(profile: Profile) -> str:
    """A profile as the text of its file."""
    graph = profile.graph
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": graph.name,
        "source": source_data(profile.source),
        "fingerprint": graph.fingerprint,
        "inputs": inputs_data(graph.inputs),
        "device": graph.device,
        "layout": graph.layout,
        "autocast": graph.autocast or None,
        "optimizer": profile.optimizer,
        "accumulate": profile.accumulate,
        "costs": {
            "device": profile.device,
            "kind": str(profile.kind),
            "environment": {name: str(value) for name, value in profile.environment.items()},
        },
        "resident": {name: getattr(graph.resident, name) for name in _RESIDENT},
        "values": [_value_data(value) for value in graph.values],
        "operators": [
            _operator_data(operator, costs) for operator, costs in zip(graph.operators, profile.costs, strict=True)
        ],
    }
    lines = [f"{json.dumps(name)}: {_lines(value)}" for name, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


_RESIDENT = ("parameters", "buffers", "inputs", "optimizer", "gradients", "libraries")


def _lines(value: Any) -> str:
    """JSON on one line, or a list of mappings with one on each."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n " + ",\n ".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def _value_data(value: Value) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": value.name,
        "kind": str(value.kind),
        "size_bytes": value.size_bytes,
        "shape": value.shape,
        "dtype": value.dtype,
    }
    return {**data, "note": True} if value.note else data


def _operator_data(operator: Operator, costs: Sequence[Cost]) -> dict[str, Any]:
    data: dict[str, Any] = {"name": operator.name, "family": operator.family, "phase": str(operator.phase)}
    data |= {name: getattr(operator, name) for name in _FLAGS if getattr(operator, name) != _FLAGS[name]}
    data |= {name: getattr(operator, name) for name in ("module", "source") if getattr(operator, name)}
    data["implementations"] = [
        _implementation_data(item, cost) for item, cost in zip(operator.implementations, costs, strict=True)
    ]
    return data


_FLAGS = {"optional": False, "rerunnable": True, "derived": False}
"""What an operator is where its record does not say."""


def _implementation_data(item: Implementation, cost: Cost) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": item.name,
        "reads": item.reads,
        "writes": item.writes,
        "latency_ms": cost.latency_ms,
        "workspace_bytes": cost.workspace_bytes,
    }
    more: dict[str, Any] = {
        "overwrites": item.overwrites or None,
        "tolerance": item.tolerance or None,
        "devices": item.devices or None,
        "recompute_latency_ms": cost.recompute_latency_ms,
        "recompute_workspace_bytes": cost.recompute_workspace_bytes,
    }
    return data | {name: value for name, value in more.items() if value is not None}


def _load_json(path: str | PathLike[str]) -> Any:
    raw = read_bounded(path, LARGEST_FILE_BYTES)
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise ScheduleFileError(f"{path} is not a complete JSON file: {str(error)[:200]}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice in one object")
    return made


def _limited(record: Record, name: str) -> list[Record]:
    if len(record.items(name)) > MOST_VALUES:
        raise record.error(name, f"has more than {MOST_VALUES} entries")
    return record.records(name)


_Kind = TypeVar("_Kind", ValueKind, Phase, ProfileKind)


def _choice(record: Record, name: str, kinds: type[_Kind]) -> _Kind:
    try:
        return kinds(record.text(name))
    except ValueError:
        raise record.error(name, f"is {record.text(name)!r:.80}; it should be one of {', '.join(kinds)}") from None


def _value(record: Record) -> Value:
    return Value(
        name=record.text("name"),
        kind=_choice(record, "kind", ValueKind),
        size_bytes=record.integer("size_bytes"),
        shape=record.integers("shape"),
        dtype=record.text("dtype"),
        note=record.flag("note") if record.optional("note") else False,
    )


def _operators(record: Record, rows: list[Record], values: int) -> tuple[Operator, ...]:
    """The operators of a graph that can be simulated: each value has one writer, forward comes first."""
    made = tuple(_operator(row, values) for row in rows)
    writers: dict[int, str] = {}
    for number, operator in enumerate(made):
        if number and operator.phase is Phase.FORWARD and made[number - 1].phase is Phase.BACKWARD:
            raise rows[number].error("phase", "is forward, after a backward operator")
        for item in operator.implementations:
            if not set(item.writes) <= set(operator.writes):
                raise rows[number].error("implementations", "write what the first of them does not")
        for value in operator.writes:
            if value in writers:
                raise rows[number].error(
                    "implementations", f"write value {value}, which {writers[value]!r:.80} writes"
                )
            writers[value] = operator.name
    if len({operator.name for operator in made}) != len(made):
        raise record.error("operators", "has two of one name")
    return made


def _operator(record: Record, values: int) -> Operator:
    implementations = tuple(_implementation(item, values) for item in record.records("implementations"))
    if not implementations or len({item.name for item in implementations}) != len(implementations):
        raise record.error("implementations", "should be one or more, of different names")
    flags = {name: record.flag(name) if record.optional(name) else otherwise for name, otherwise in _FLAGS.items()}
    return Operator(
        name=record.text("name"),
        family=record.text("family"),
        phase=_choice(record, "phase", Phase),
        implementations=implementations,
        module=record.text("module") if record.optional("module") else "",
        source=record.text("source") if record.optional("source") else "",
        **flags,
    )


def _implementation(record: Record, values: int) -> Implementation:
    named = {
        name: record.integers(name) if record.optional(name) else () for name in ("reads", "writes", "overwrites")
    }
    for name, numbers in named.items():
        if any(number >= values for number in numbers):
            raise record.error(name, f"has {max(numbers)}, and there are {values} values")
    return Implementation(
        name=record.text("name"),
        tolerance=record.number("tolerance") if record.optional("tolerance") else 0.0,
        devices=record.texts("devices") if record.optional("devices") else (),
        reads=named["reads"],
        writes=named["writes"],
        overwrites=named["overwrites"],
    )


def _cost(record: Record) -> Cost:
    again = record.optional("recompute_workspace_bytes")
    return Cost(
        latency_ms=record.number("latency_ms"),
        workspace_bytes=_signed_integer(record, "workspace_bytes"),
        recompute_latency_ms=(
            record.number("recompute_latency_ms") if record.optional("recompute_latency_ms") else None
        ),
        recompute_workspace_bytes=_signed_integer(record, "recompute_workspace_bytes") if again else None,
    )


def _signed_integer(record: Record, name: str) -> int:
    number = record.signed(name)
    if number != int(number):
        raise record.error(name, f"should be a whole number up to {LARGEST_INTEGER}, not {number}")
    return int(number)


__all__ = ["FORMAT", "VERSION", "load_profile", "profile_text", "save_profile"]
