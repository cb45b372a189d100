"""Solver instances: operator graphs with costs as JSON, in the `remat-instance/1` format.

MONeT's authors measured ResNet-50, UNet and VGG-16 training steps on a P100; converted to this format they
let a solver be judged on real work, without torch and without a model.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.errors import ScheduleFileError
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Resident, Value, ValueKind

FORMAT = "remat-instance/1"


def read_instance(path: str | PathLike[str]) -> Profile:
    """Read an instance file as a profile (kind: measured).

    Raises:
        ScheduleFileError: the file is not an instance.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return instance_profile(data)
    except (OSError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise ScheduleFileError(f"{path} is not a solver instance ({FORMAT}): {error}") from error


def instance_profile(data: dict[str, Any]) -> Profile:
    """Make a profile of a parsed instance. Operators keep the instance's order; ids become indices."""
    if data.get("format") != FORMAT:
        raise ValueError(f"format is {data.get('format')!r}, expected {FORMAT!r}")
    unit_ms = float(data.get("latency_unit_ms", 1.0))
    index_of = {value["id"]: index for index, value in enumerate(data["values"])}
    values = tuple(
        Value(name=f"{value['id']}:{value['name']}", kind=ValueKind(value["kind"]), size_bytes=value["bytes"])
        for value in data["values"]
    )

    def indices(ids: list[Any]) -> tuple[int, ...]:
        return tuple(index_of[value] for value in ids)

    operators, costs = [], []
    for record in data["operators"]:
        operators.append(
            Operator(
                name=f"{record['id']}:{record['name']}",
                family=record["name"],
                phase=Phase(record["phase"]),
                optional=bool(record.get("optional", False)),
                implementations=tuple(
                    Implementation(
                        name=item["name"],
                        reads=indices(item["reads"]),
                        writes=indices(item["writes"]),
                        overwrites=indices(item.get("overwrites", [])),
                    )
                    for item in record["implementations"]
                ),
            )
        )
        costs.append(tuple(_cost(item, unit_ms) for item in record["implementations"]))
    graph = OperatorGraph(
        name=str(data.get("name", "instance")),
        operators=tuple(operators),
        values=values,
        resident=Resident(parameters=int(data["resident_bytes"])),
    )
    return Profile(graph=graph, device="p100", kind=ProfileKind.MEASURED, costs=tuple(costs))


def _cost(item: dict[str, Any], unit_ms: float) -> Cost:
    again_ms = item.get("recompute_latency")
    return Cost(
        latency_ms=item["latency"] * unit_ms,
        workspace_bytes=item["workspace_bytes"],
        recompute_latency_ms=None if again_ms is None else again_ms * unit_ms,
        recompute_workspace_bytes=item.get("recompute_workspace_bytes"),
    )
