"""A schedule and plain training as columns of numbers: what the page's script draws.

A step's tensors are not listed: the script has every stay of a value in memory, and finds a step's among them.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from monetlite.core.graph import DELIVERY, OPTIMIZER_STEP, OperatorGraph, Value, ValueKind
from monetlite.core.steps import stored_values
from monetlite.reporting.html.page_steps import Pair, Part, Run
from monetlite.reporting.memory import Holding, always_there, holding_of
from monetlite.tracing.builder import LOSS

HELD_BECAUSE = {
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
_PARTS = tuple(Part)


class _Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def numbers(self, texts: Iterable[str]) -> list[int]:
        return [self.number(text) for text in texts]

    def all(self) -> list[str]:
        return list(self._numbers)


def columns_of(pair: Pair) -> dict[str, Any]:
    """Everything that the script draws, as JSON has it: texts by number, holdings and parts by position."""
    texts = _Texts()
    graphs = [_graph(texts, pair.scheduled.graph)]
    same_graph = pair.plain.graph == pair.scheduled.graph
    if not same_graph:
        graphs.append(_graph(texts, pair.plain.graph))
    data = {
        "holdings": list(_HOLDINGS),
        "parts": list(_PARTS),
        "budget_bytes": pair.schedule.budget_bytes,
        "graphs": graphs,
        "scheduled": {"graph": 0, **_run(texts, pair.scheduled)},
        "plain": {"graph": 0 if same_graph else 1, **_run(texts, pair.plain)},
        "fates": [texts.number(fate) if fate else -1 for fate in fates(pair.scheduled)],
        "other_ways": _other_ways(pair.scheduled),
    }
    return {**data, "texts": texts.all()}


def fates(run: Run) -> list[str]:
    """For each value, what a schedule does with it; empty if it is never computed."""
    graph, timeline = run.graph, run.timeline
    stored = set(stored_values(graph, timeline.steps))
    stays = Counter(stay.value for stay in run.breakdown.lifetimes)
    begins = {stay.value: stay.begin for stay in reversed(run.breakdown.lifetimes)}

    def fate(index: int) -> str:
        value = graph.values[index]
        if not stays[index]:
            return ""
        if value.held:
            return "held to the end"
        if value.kind is ValueKind.GRADIENT:
            return "gradient in flight"
        found = ["stored"] if index in stored else []
        if begins[index] >= run.breakdown.backward_begins:
            found.append("computed in the backward pass")
        if (times := stays[index] - 1) > 0:
            found.append("recomputed once" if times == 1 else f"recomputed {times} times")
        return ", ".join(found) or "never kept"

    return [fate(index) for index in range(len(graph.values))]


def _graph(texts: _Texts, graph: OperatorGraph) -> dict[str, Any]:
    operators, values = graph.operators, graph.values
    return {
        "operators": {
            "name": texts.numbers(operator.name for operator in operators),
            "family": texts.numbers(_FAMILIES.get(operator.family, operator.family) for operator in operators),
            "module": texts.numbers(operator.module for operator in operators),
            "source": texts.numbers(_without_folder([operator.source for operator in operators])),
        },
        "values": {
            "name": texts.numbers(value.name for value in values),
            "bytes": [value.size_bytes for value in values],
            "shape": texts.numbers(_shape(value) for value in values),
            "dtype": texts.numbers(value.dtype for value in values),
            "held": texts.numbers(HELD_BECAUSE.get(value.kind, "") for value in values),
        },
    }


def _run(texts: _Texts, run: Run) -> dict[str, Any]:
    timeline, stays = run.timeline, run.breakdown.lifetimes
    ways = (run.graph.operators[index].implementations[way].name for index, way in timeline.steps)
    always = always_there(run.graph.resident)
    taken = run.breakdown.bytes_of[Holding.WORKSPACE]
    workspaces = [workspace - always[Holding.WORKSPACE] for workspace in taken]
    return {
        "operator": [index for index, _ in timeline.steps],
        "implementation": texts.numbers(ways),
        "part": [_PARTS.index(part) for part in run.parts],
        "latency_ms": [_short(latency_ms) for latency_ms in timeline.latencies_ms],
        "workspace_bytes": workspaces,
        "backward_begins": run.breakdown.backward_begins,
        "peak_step": timeline.peak_step,
        "always_bytes": [always.get(holding, 0) for holding in _HOLDINGS],
        "stays": {
            "value": [stay.value for stay in stays],
            "holding": [_HOLDINGS.index(holding_of(run.graph, stay)) for stay in stays],
            "begin": [stay.begin for stay in stays],
            "end": [stay.end for stay in stays],
            "overwritten": [int(stay.overwritten) for stay in stays],
            "reads": [list(dict.fromkeys(stay.reads)) for stay in stays],
        },
    }


def _other_ways(run: Run) -> dict[str, list[float]]:
    """The steps that are not run by their operator's default implementation, and what that would have taken."""
    found: dict[str, list[float]] = {"step": [], "default_latency_ms": [], "default_workspace_bytes": []}
    for at, (_, way) in enumerate(run.timeline.steps):
        if way == 0:
            continue
        latency_ms, workspace_bytes = run.default_of(at)
        found["step"].append(at)
        found["default_latency_ms"].append(_short(latency_ms))
        found["default_workspace_bytes"].append(workspace_bytes)
    return found


def _without_folder(sources: Sequence[str]) -> list[str]:
    """Source lines without the folders that tell others of somebody's machine.

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
    """As people write it; empty where it is not known."""
    return "×".join(map(str, value.shape)) or ("scalar" if value.dtype else "")


def _short(latency_ms: float) -> float:
    """Six digits of a latency, which is more than any is known to."""
    return float(f"{latency_ms:.6g}")


__all__ = ["HELD_BECAUSE", "columns_of", "fates"]
