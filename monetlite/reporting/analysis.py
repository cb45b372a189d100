"""The analysis of a schedule beside plain training, which text, plots and the HTML page are made from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from monetlite.core.costs import Profile, cost_source
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.source import batch_of
from monetlite.core.step_analysis import StepAnalysis
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, format_ms


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A schedule beside plain training.

    The figures are those of the profiles, which differ from the schedule's own where costs were measured again.
    """

    schedule: Schedule
    plain: StepAnalysis
    scheduled: StepAnalysis

    @property
    def overhead(self) -> float:
        """Step time over plain training's, less one."""
        return self.scheduled.latency_ms / self.plain.latency_ms - 1 if self.plain.latency_ms > 0 else 0.0

    @property
    def title(self) -> str:
        """The model and its batch."""
        batch = batch_of(self.schedule.source, self.schedule.inputs)
        name = self.schedule.name.rpartition("/")[2]
        return name if batch is None else f"{name}, batch {batch}"

    @property
    def costs(self) -> str:
        """Source of the costs: `estimated for p100`."""
        return cost_source(self.scheduled.profile)

    @property
    def figures(self) -> str:
        """Peak and step time beside plain training's, in a line."""
        peak, plain_peak = (format_bytes(side.peak_bytes) for side in (self.scheduled, self.plain))
        step, plain_step = (format_ms(side.latency_ms) for side in (self.scheduled, self.plain))
        return f"peak {peak} instead of {plain_peak}; step {step} instead of {plain_step} ({self.overhead:+.1%})"

    @property
    def as_solved(self) -> bool:
        """True if peak and latency are those that the solver promised. Its bound holds then."""
        same_time = math.isclose(self.scheduled.latency_ms, self.schedule.latency_ms, rel_tol=1e-6)
        return same_time and self.scheduled.peak_bytes == self.schedule.peak_bytes


def analyse(schedule: Schedule, profile: Profile, plain: Profile, steps: Sequence[Step] | None = None) -> Analysis:
    """Simulate a schedule and plain training.

    Args:
        schedule: of the profile's graph.
        profile: its costs.
        plain: the costs of plain training, whose images may have another layout.
        steps: the schedule's steps on this device, where they are not `schedule.steps(profile.graph)`.

    Raises:
        ScheduleMismatch: the schedule names what the graph does not have.
        IllegalSchedule: its steps are not legal.
    """
    return Analysis(
        schedule=schedule,
        plain=StepAnalysis(profile=plain, timeline=simulate(plain, plain_steps(plain.graph))),
        scheduled=StepAnalysis(profile=profile, timeline=simulate(profile, schedule if steps is None else steps)),
    )


def budget_in_words(schedule: Schedule, budget_bytes: int | None = None) -> str:
    """A schedule's budget, or another one of its kind: `6 GB`, or `6 GB of reserved memory`."""
    of = "" if schedule.reserved_bytes is None else " of reserved memory"
    return format_bytes(schedule.budget_bytes if budget_bytes is None else budget_bytes) + of
