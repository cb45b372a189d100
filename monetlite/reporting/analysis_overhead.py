"""Operators that make a schedule's step longer than plain training's, and those that make it shorter."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from monetlite.core.costs import Profile
from monetlite.reporting.analysis import Analysis


class Cause(StrEnum):
    """Causes of a difference from plain training's time."""

    RECOMPUTED = "computed again"
    SLOWER = "slower implementations"
    FASTER = "faster implementations"
    ADDED = "operators that plain training does not run"
    LEFT_OUT = "operators that only plain training runs"
    LAYOUT = "the same implementations in another layout"


@dataclass(frozen=True, kw_only=True)
class OverheadShare:
    """One operator's part of the overhead, for one cause.

    Attributes:
        cause, operator, module, family: as they are called.
        implementation: of the schedule's runs, or of plain training's if the schedule has none.
        runs: number of runs counted.
        extra_ms: their time beyond plain training's; negative if they take less.
    """

    cause: Cause
    operator: str
    module: str
    family: str
    implementation: str
    runs: int
    extra_ms: float


def overhead_shares(analysis: Analysis) -> tuple[OverheadShare, ...]:
    """Shares of the difference between a schedule's latency and plain training's; they sum to it.

    Operators are matched by name and family: another layout has others, such as conversions.
    """
    shares: list[OverheadShare] = []
    scheduled, plain = analysis.scheduled, analysis.plain

    def add(of: Profile, index: int, choice: int, cause: Cause, extra_ms: float, runs: int = 1) -> None:
        operator = of.graph.operators[index]
        if extra_ms:
            shares.append(
                OverheadShare(
                    cause=cause,
                    operator=operator.name,
                    module=operator.module,
                    family=operator.family,
                    implementation=operator.implementations[choice].name,
                    runs=runs,
                    extra_ms=extra_ms,
                )
            )

    waiting: dict[tuple[str, str], tuple[int, int, float]] = {}
    for (index, choice), latency_ms in zip(plain.timeline.steps, plain.timeline.latencies_ms, strict=True):
        operator = plain.graph.operators[index]
        waiting[operator.name, operator.family] = (index, choice, latency_ms)
    repeated: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    timeline = scheduled.timeline
    for (index, choice), latency_ms, again in zip(
        timeline.steps, timeline.latencies_ms, scheduled.again, strict=True
    ):
        if again:
            repeated[index, choice].append(latency_ms)
            continue
        operator = scheduled.graph.operators[index]
        there = waiting.pop((operator.name, operator.family), None)
        if there is None:
            add(scheduled.profile, index, choice, Cause.ADDED, latency_ms)
            continue
        extra_ms = latency_ms - there[2]
        cause = Cause.SLOWER if extra_ms > 0 else Cause.FASTER
        add(scheduled.profile, index, choice, Cause.LAYOUT if choice == there[1] else cause, extra_ms)
    for (index, choice), latencies_ms in repeated.items():
        add(scheduled.profile, index, choice, Cause.RECOMPUTED, math.fsum(latencies_ms), len(latencies_ms))
    for index, choice, latency_ms in waiting.values():
        add(plain.profile, index, choice, Cause.LEFT_OUT, -latency_ms)
    total_ms, difference_ms = extra_ms_of(shares), scheduled.latency_ms - plain.latency_ms
    assert math.isclose(total_ms, difference_ms, rel_tol=1e-9, abs_tol=1e-9 * plain.latency_ms)
    return tuple(shares)


def extra_ms_of(shares: Iterable[OverheadShare]) -> float:
    return math.fsum(share.extra_ms for share in shares)
