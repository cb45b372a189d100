"""A schedule and plain training as columns of numbers, which the page's script draws.

A step's tensors are not listed: the script has every stay of a value in memory, and finds a step's among them.
"""

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from monetlite.core.graph import DELIVERY, LOSS, OPTIMIZER_STEP, OperatorGraph, Value, ValueKind
from monetlite.core.step_analysis import Fate, Holding, StepAnalysis
from monetlite.core.steps import step_number
from monetlite.reporting.analysis import Analysis
from monetlite.reporting.text_tradeoff import OURS, single_points

if TYPE_CHECKING:
    from monetlite.planning.tradeoff import Tradeoff, TradeoffPoint  # imports the search

_HELD_BECAUSE = {
    ValueKind.OUTPUT: "the caller holds it until the step ends",
    ValueKind.TANGENT: "autograd holds it until the step ends",
    ValueKind.PARAM_GRAD: "the gradient of a weight or an input: never freed within the step",
    ValueKind.STATISTIC: "later runs of its operator read it: held until the step ends",
}
_FAMILIES = {
    DELIVERY: "gradients handed over to autograd",
    OPTIMIZER_STEP: "the optimizer's step",
    LOSS: "the loss, outside of the model",
}
_INSTALLED = "/site-packages/"
_HOLDINGS = tuple(Holding)


class StepKind(StrEnum):
    """Kinds of steps of a schedule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "run again"
    EXTRA = "extra"
    """A first run of an operator that plain training never runs, such as one that packs a mask."""


_KINDS = tuple(StepKind)


def page_data(analysis: Analysis) -> dict[str, Any]:
    """Everything that the script draws, for JSON: texts by number, holdings and kinds of steps by position."""
    scheduled, plain = analysis.scheduled, analysis.plain
    graphs = [_graph(scheduled.graph)]
    same_graph = plain.graph == scheduled.graph
    if not same_graph:
        graphs.append(_graph(plain.graph))
    in_plain = frozenset(plain.graph.operators[index].name for index, _ in plain.timeline.steps)
    kinds = _kinds(scheduled, in_plain)
    fates = (fate_in_words(scheduled, value) for value in range(len(scheduled.graph.values)))
    numbers: dict[str, int] = {}
    data = {
        "budget_bytes": analysis.schedule.budget_bytes,
        "first_step": step_number(0),
        "graphs": graphs,
        "scheduled": {"graph": 0, **_run(scheduled, kinds)},
        "plain": {"graph": 0 if same_graph else 1, **_run(plain, _kinds(plain, in_plain))},
        "fates": [fate or -1 for fate in fates],
        "other_ways": _other_ways(scheduled),
    }
    numbered = _numbered(data, numbers)
    return {**numbered, "holdings": list(_HOLDINGS), "parts": list(_KINDS), "texts": list(numbers)}


def tradeoff_data(tradeoff: "Tradeoff") -> dict[str, Any]:
    """Points of the trade-off as (bytes, overhead), by name: curves, single points, and the bound."""

    def place(point: "TradeoffPoint") -> list[float]:
        return [point.peak_bytes, _short(tradeoff.overhead(point.latency_ms))]

    found = [item.best for item in tradeoff.budgets if item.best is not None]
    curves = {OURS: found, **tradeoff.others}
    bound = [[item.budget_bytes, _short(tradeoff.overhead(item.lower_bound_ms))] for item in tradeoff.budgets]
    return {
        "curves": [
            {"name": name, "points": list(map(place, points))} for name, points in curves.items() if len(points) > 1
        ],
        "points": [{"name": name, "place": place(point)} for name, point in single_points(tradeoff).items()],
        "bound": bound,
        "proven_bytes": tradeoff.smallest_proven_bytes,
    }


def _numbered(item: Any, numbers: dict[str, int]) -> Any:
    """The same data, with a number in place of each text; `numbers` takes them."""
    if isinstance(item, dict):
        return {key: _numbered(value, numbers) for key, value in item.items()}
    if isinstance(item, list):
        return [_numbered(value, numbers) for value in item]
    return numbers.setdefault(item, len(numbers)) if isinstance(item, str) else item


def fate_in_words(side: StepAnalysis, value: int) -> str:
    """The fate of a value, with the number of its recomputations; empty if it is never made."""
    fate = side.fate(value)
    if fate is Fate.NEVER_MADE:
        return ""
    if fate is Fate.HELD:
        return "held to the end"
    if fate is Fate.GRADIENT:
        return str(fate)
    stays = side.stays[value]
    found = ["stored"] if fate in (Fate.STORED, Fate.STORED_THEN_RECOMPUTED) else []
    if stays[0].backward:
        found.append("computed in the backward pass")
    if (times := len(stays) - 1) > 0:
        found.append("recomputed once" if times == 1 else f"recomputed {times} times")
    return ", ".join(found) or "never kept"


def _kinds(side: StepAnalysis, in_plain: frozenset[str]) -> list[StepKind]:
    """The kind of each step. `in_plain` has the names of the operators that plain training runs."""
    kinds: list[StepKind] = []
    for at, (index, _) in enumerate(side.timeline.steps):
        first = StepKind.FORWARD if at < side.timeline.border else StepKind.BACKWARD
        known = side.graph.operators[index].name in in_plain
        kinds.append(StepKind.AGAIN if side.again[at] else first if known else StepKind.EXTRA)
    return kinds


def _graph(graph: OperatorGraph) -> dict[str, Any]:
    operators, values = graph.operators, graph.values
    return {
        "operators": {
            "name": [operator.name for operator in operators],
            "family": [_FAMILIES.get(operator.family, operator.family) for operator in operators],
            "module": [operator.module for operator in operators],
            "source": _without_folder([operator.source for operator in operators]),
        },
        "values": {
            "name": [value.name for value in values],
            "bytes": [value.size_bytes for value in values],
            "shape": [_shape(value) for value in values],
            "dtype": [value.dtype for value in values],
            "held": [_HELD_BECAUSE.get(value.kind, "") for value in values],
        },
    }


def _run(side: StepAnalysis, kinds: Sequence[StepKind]) -> dict[str, Any]:
    timeline, stays = side.timeline, side.lifetimes
    return {
        "operator": [index for index, _ in timeline.steps],
        "implementation": [
            side.graph.operators[index].implementations[choice].name for index, choice in timeline.steps
        ],
        "part": [_KINDS.index(kind) for kind in kinds],
        "latency_ms": [_short(latency_ms) for latency_ms in timeline.latencies_ms],
        "workspace_bytes": timeline.workspace_bytes,
        "backward_begins": side.timeline.border,
        "peak_step": timeline.peak_step,
        "always_bytes": [side.resident_bytes[holding] for holding in _HOLDINGS],
        "stays": {
            "value": [stay.value for stay in stays],
            "holding": [_HOLDINGS.index(side.holding(stay)) for stay in stays],
            "begin": [stay.begin for stay in stays],
            "end": [stay.end for stay in stays],
            "overwritten": [int(stay.overwritten) for stay in stays],
            "reads": [list(dict.fromkeys(stay.reads)) for stay in stays],
        },
    }


def _other_ways(side: StepAnalysis) -> dict[str, list[float]]:
    """Steps that are not run by the default implementation, and the costs of the default there."""
    found: dict[str, list[float]] = {"step": [], "default_latency_ms": [], "default_workspace_bytes": []}
    for at, (index, choice) in enumerate(side.timeline.steps):
        if choice == 0:
            continue
        cost = side.profile.costs[index][0]
        latency_ms, workspace_bytes = cost.of_run(again=side.again[at])
        found["step"].append(at)
        found["default_latency_ms"].append(_short(latency_ms))
        found["default_workspace_bytes"].append(workspace_bytes)
    return found


def _without_folder(sources: Sequence[str]) -> list[str]:
    """Source lines without the folders of somebody's machine.

    An installed package's lines begin with the package; others lose the folder that all of them are in.
    """
    parts = [source.replace(os.sep, "/").rpartition(_INSTALLED) for source in sources]
    folders = {os.path.dirname(path) for _, installed, path in parts if path and not installed}
    try:
        shared = os.path.commonpath(folders).replace(os.sep, "/")
    except ValueError:  # none, or on several drives, or some of them relative
        shared = ""
    return [path if installed else path.removeprefix(shared).lstrip("/") for _, installed, path in parts]


def _shape(value: Value) -> str:
    """A shape as people write it; empty if it is not known."""
    return "×".join(map(str, value.shape)) or ("scalar" if value.dtype else "")


def _short(latency_ms: float) -> float:
    """Six digits of a latency, which is more than any is known to."""
    return float(f"{latency_ms:.6g}")
