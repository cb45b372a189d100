"""The memory of a step along its time or its operators: what timelines draw, and what they are made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from monetlite.reporting.memory import Holding
from monetlite.reporting.subject import Side, Subject

MOST_COLUMNS = 2000
"""Finer than a picture shows."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Steps along an axis: `steps[i]` stands from `edges[i]` to `edges[i + 1]`.

    Steps too narrow to be seen share a column, which shows the one of them that holds most memory.
    """

    edges: tuple[float, ...]
    steps: tuple[int, ...]


def columns(widths: Sequence[float], memory_bytes: Sequence[int], extent: float) -> Columns:
    """Columns for steps of these widths, on an axis that is `extent` long.

    A step that takes no time is given what can just be seen of the next one's width.
    """
    least = extent / MOST_COLUMNS
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
    return Columns(edges=tuple(edges), steps=tuple(chosen))


def columns_of(side: Side, *, by_time: bool, extent: float) -> Columns:
    """The columns of one panel: in ms, or in operators run."""
    timeline = side.breakdown.timeline
    widths = timeline.latencies_ms if by_time else (1.0,) * len(timeline.steps)
    return columns(widths, timeline.memory_bytes, extent)


def extent_of(subject: Subject, *, by_time: bool) -> float:
    """How long an axis is that both ways to run the step fit, in ms or in operators run."""
    sides = (subject.plain, subject.scheduled)
    return max(side.latency_ms if by_time else len(side.breakdown.timeline.steps) for side in sides) or 1.0


def timeline_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """Every step of plain training and of the schedule: what runs, when, and what memory is held for, in bytes."""
    for label, side in (("plain", subject.plain), ("scheduled", subject.scheduled)):
        timeline, graph = side.breakdown.timeline, side.profile.graph
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
                **{
                    f"{holding.replace(' ', '_')}_bytes": side.breakdown.bytes_of[holding][at]
                    for holding in Holding
                },
            }


def timeline_facts(subject: Subject) -> dict[str, Any]:
    """What a timeline shows, for `--json`: the peaks, where they are, and what is held there, in bytes."""

    def facts(side: Side) -> dict[str, Any]:
        timeline = side.breakdown.timeline
        return {
            "steps": len(timeline.steps),
            "backward_begins": side.breakdown.backward_begins,
            "latency_ms": side.latency_ms,
            "peak_bytes": side.peak_bytes,
            "peak_step": timeline.peak_step,
            "peak_operator": side.peak_operator,
            "peak_holds_bytes": {
                str(holding): side.breakdown.bytes_of[holding][timeline.peak_step] for holding in Holding
            },
        }

    return {"plain": facts(subject.plain), "scheduled": facts(subject.scheduled)}


__all__ = ["Columns", "columns", "columns_of", "extent_of", "timeline_facts", "timeline_rows"]
