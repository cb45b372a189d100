"""The memory of a step along its time or its operators, for pictures and for files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from monetlite.reporting.analysis import Analysis, Holding, StepAnalysis

MAX_COLUMNS = 2000
"""Columns that a picture can show."""


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """Steps along an axis: `steps[i]` stands from `edges[i]` to `edges[i + 1]`.

    Steps too narrow to be seen share a column, which shows the one of them that holds most memory.
    """

    edges: tuple[float, ...]
    steps: tuple[int, ...]


def columns(widths: Sequence[float], memory_bytes: Sequence[int], extent: float) -> StepColumns:
    """Columns for steps of these widths, on an axis that is `extent` long.

    A step that takes no time gets the smallest visible width, from the next one's.
    """
    least = extent / MAX_COLUMNS
    ends = tuple(accumulate(widths))
    edges, chosen = [0.0], []
    waiting: list[int] = []

    def close() -> None:
        edges.append(max(ends[waiting[-1]], edges[-1] + least))
        chosen.append(max(waiting, key=memory_bytes.__getitem__))
        waiting.clear()

    for at, width in enumerate(widths):
        if waiting and width >= least:
            close()
        waiting.append(at)
        if ends[at] - edges[-1] >= least * (1 - 1e-9):
            close()
    if waiting:
        close()
    return StepColumns(edges=tuple(edges), steps=tuple(chosen))


def step_columns(side: StepAnalysis, *, by_time: bool, extent: float) -> StepColumns:
    """The columns of one panel: in ms, or in operators run."""
    timeline = side.timeline
    widths = timeline.latencies_ms if by_time else (1.0,) * len(timeline.steps)
    return columns(widths, timeline.memory_bytes, extent)


def extent_of(analysis: Analysis, *, by_time: bool) -> float:
    """Length of an axis that both ways to run the step fit, in ms or in operators run."""
    sides = (analysis.plain, analysis.scheduled)
    return max(side.latency_ms if by_time else len(side.timeline.steps) for side in sides) or 1.0


def timeline_rows(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """Every step of plain training and of the schedule: its operator, time, and memory in bytes by purpose."""
    for label, side in (("plain", analysis.plain), ("scheduled", analysis.scheduled)):
        timeline, graph = side.timeline, side.graph
        begins = (0.0, *accumulate(timeline.latencies_ms))
        for at, (index, choice) in enumerate(timeline.steps):
            operator = graph.operators[index]
            yield {
                "run": label,
                "step": at,
                "operator": operator.name,
                "implementation": operator.implementations[choice].name,
                "begins_ms": begins[at],
                "latency_ms": timeline.latencies_ms[at],
                "memory_bytes": timeline.memory_bytes[at],
                **{f"{holding.replace(' ', '_')}_bytes": side.bytes_of[holding][at] for holding in Holding},
            }


def timeline_facts(analysis: Analysis) -> dict[str, Any]:
    """The peaks, their operators, and the memory there in bytes by purpose, for `--json`."""

    def facts(side: StepAnalysis) -> dict[str, Any]:
        timeline = side.timeline
        return {
            "steps": len(timeline.steps),
            "backward_begins": side.border,
            "latency_ms": side.latency_ms,
            "peak_bytes": side.peak_bytes,
            "peak_step": timeline.peak_step,
            "peak_operator": side.peak_operator,
            "peak_holds_bytes": {str(holding): size for holding, size in side.peak_bytes_of.items()},
        }

    return {"plain": facts(analysis.plain), "scheduled": facts(analysis.scheduled)}
