"""A schedule and plain training, simulated and split: what everything on the page is said of."""

from dataclasses import dataclass
from enum import StrEnum

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph, Phase
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import plain_steps
from monetlite.reporting.memory import Breakdown, break_down


class Part(StrEnum):
    """What a step is of."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "run again"
    EXTRA = "extra"
    """Run for the first time, and plain training never runs it: it packs a mask, for instance."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training step: its costs, its memory, and the part that each of its steps is of."""

    profile: Profile
    breakdown: Breakdown
    parts: tuple[Part, ...]

    @property
    def graph(self) -> OperatorGraph:
        return self.profile.graph

    @property
    def timeline(self) -> Timeline:
        return self.breakdown.timeline

    @property
    def peak_operator(self) -> str:
        """The operator that runs at the peak."""
        return self.graph.operators[self.timeline.steps[self.timeline.peak_step][0]].name

    def default_of(self, at: int) -> tuple[float, int]:
        """(latency in ms, workspace in bytes) of a step, were it run by its operator's default implementation."""
        cost = self.profile.costs[self.timeline.steps[at][0]][0]
        return cost.of_run(again=self.parts[at] is Part.AGAIN)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A schedule and what it is compared with."""

    schedule: Schedule
    scheduled: Run
    plain: Run

    @property
    def overhead(self) -> float:
        """Step time over plain training's, less one."""
        plain_ms = self.plain.timeline.latency_ms
        return self.scheduled.timeline.latency_ms / plain_ms - 1 if plain_ms > 0 else 0.0


def pair_up(schedule: Schedule, profile: Profile, plain: Profile) -> Pair:
    """Simulate a schedule and plain training.

    Raises:
        ScheduleMismatch, IllegalSchedule: the schedule is not one of the profile's graph.
    """
    of_plain = simulate(plain, plain_steps(plain.graph))
    in_plain = frozenset(plain.graph.operators[index].name for index, _ in of_plain.steps)
    return Pair(
        schedule=schedule,
        scheduled=_run(profile, simulate(profile, schedule), in_plain),
        plain=_run(plain, of_plain, in_plain),
    )


def _run(profile: Profile, timeline: Timeline, in_plain: frozenset[str]) -> Run:
    breakdown = break_down(profile, timeline)
    parts: list[Part] = []
    ran: set[int] = set()
    for at, (index, _) in enumerate(timeline.steps):
        operator = profile.graph.operators[index]
        if index in ran:
            parts.append(Part.AGAIN)
        elif operator.name not in in_plain:
            parts.append(Part.EXTRA)
        elif operator.phase is Phase.BACKWARD or at >= breakdown.backward_begins:
            parts.append(Part.BACKWARD)
        else:
            parts.append(Part.FORWARD)
        ran.add(index)
    return Run(profile=profile, breakdown=breakdown, parts=tuple(parts))


__all__ = ["Pair", "Part", "Run", "pair_up"]
