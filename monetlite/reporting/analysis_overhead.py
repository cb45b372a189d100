"""Where a schedule's step takes longer than plain training's, and where less, operator by operator."""

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from monetlite.core.costs import Profile
from monetlite.core.simulate import Timeline


class Cause(StrEnum):
    """Why an operator's time differs from plain training's."""

    RECOMPUTED = "computed again"
    SLOWER = "slower implementations"
    FASTER = "faster implementations"
    ADDED = "operators that plain training does not run"
    LEFT_OUT = "operators that only plain training runs"
    LAYOUT = "the same implementations in another layout"


@dataclass(frozen=True, kw_only=True)
class Share:
    """One operator's part of the overhead, for one cause.

    Attributes:
        cause: why; operator, module, family: of what.
        implementation: how it runs in the schedule, or in plain training if it does only there.
        runs: how many it is about.
        extra_ms: what they take more than in plain training; below zero if less.
    """

    cause: Cause
    operator: str
    module: str
    family: str
    implementation: str
    runs: int
    extra_ms: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """A schedule's step time beside plain training's. `shares` sum to the difference, to rounding errors."""

    latency_ms: float
    plain_latency_ms: float
    shares: tuple[Share, ...]

    @property
    def extra_ms(self) -> float:
        return self.latency_ms - self.plain_latency_ms

    def of(self, cause: Cause) -> tuple[Share, ...]:
        return tuple(share for share in self.shares if share.cause is cause)


def overhead(profile: Profile, timeline: Timeline, plain: Profile, plain_timeline: Timeline) -> Overhead:
    """Split the difference between a schedule's latency and plain training's.

    Args:
        profile, timeline: the schedule's; plain, plain_timeline: plain training's. Operators are matched by name:
            in another layout there are others, such as conversions.
    """
    shares: list[Share] = []

    def add(of: Profile, index: int, choice: int, cause: Cause, extra_ms: float, runs: int = 1) -> None:
        operator = of.graph.operators[index]
        if extra_ms:
            shares.append(
                Share(
                    cause=cause,
                    operator=operator.name,
                    module=operator.module,
                    family=operator.family,
                    implementation=operator.implementations[choice].name,
                    runs=runs,
                    extra_ms=extra_ms,
                )
            )

    plainly: dict[str, tuple[int, int, float]] = {}
    for (index, choice), latency_ms in zip(plain_timeline.steps, plain_timeline.latencies_ms, strict=True):
        plainly[plain.graph.operators[index].name] = (index, choice, latency_ms)
    again: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    ran: set[int] = set()
    for (index, choice), latency_ms in zip(timeline.steps, timeline.latencies_ms, strict=True):
        if index in ran:
            again[index, choice].append(latency_ms)
            continue
        ran.add(index)
        there = plainly.pop(profile.graph.operators[index].name, None)
        if there is None:
            add(profile, index, choice, Cause.ADDED, latency_ms)
            continue
        extra_ms = latency_ms - there[2]
        cause = Cause.SLOWER if extra_ms > 0 else Cause.FASTER
        add(profile, index, choice, Cause.LAYOUT if choice == there[1] else cause, extra_ms)
    for (index, choice), latencies_ms in again.items():
        add(profile, index, choice, Cause.RECOMPUTED, math.fsum(latencies_ms), len(latencies_ms))
    for index, choice, latency_ms in plainly.values():
        add(plain, index, choice, Cause.LEFT_OUT, -latency_ms)
    found = Overhead(
        latency_ms=timeline.latency_ms, plain_latency_ms=plain_timeline.latency_ms, shares=tuple(shares)
    )
    total_ms = math.fsum(share.extra_ms for share in shares)
    assert math.isclose(total_ms, found.extra_ms, rel_tol=1e-9, abs_tol=1e-9 * found.plain_latency_ms)
    return found


__all__ = ["Cause", "Overhead", "Share", "overhead"]
