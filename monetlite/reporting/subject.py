"""What pictures and reports of a schedule are about: its step beside plain training's, by the same costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from monetlite.core.costs import Profile
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.memory import Breakdown, break_down
from monetlite.reporting.text_solve import cost_source


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to run the step, with its memory split."""

    profile: Profile
    breakdown: Breakdown

    @cached_property
    def peak_bytes(self) -> int:
        return self.breakdown.timeline.peak_bytes

    @cached_property
    def latency_ms(self) -> float:
        return self.breakdown.timeline.latency_ms

    @cached_property
    def peak_operator(self) -> str:
        """The name of the operator that needs most memory."""
        timeline = self.breakdown.timeline
        return self.profile.graph.operators[timeline.steps[timeline.peak_step][0]].name


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A schedule beside plain training.

    The figures are those of the profiles, which are not the schedule's own where costs were measured again.
    """

    schedule: Schedule
    plain: Side
    scheduled: Side

    @property
    def overhead(self) -> float:
        """Step time over plain training's, less one."""
        return self.scheduled.latency_ms / self.plain.latency_ms - 1 if self.plain.latency_ms > 0 else 0.0

    @property
    def title(self) -> str:
        """The model and its batch."""
        schedule = self.schedule
        shapes = [spec.shape for spec in schedule.inputs.values() if spec.shape]
        batch = schedule.source.batch if schedule.source is not None else shapes[0][0] if shapes else None
        name = schedule.name.rpartition("/")[2]
        return name if batch is None else f"{name}, batch {batch}"

    @property
    def costs(self) -> str:
        """Where costs come from: `costs estimated for p100`."""
        profile = self.scheduled.profile
        return f"costs {cost_source(profile.device, profile.kind, profile.environment)}"

    @property
    def figures(self) -> str:
        """Peak and step time beside plain training's, in a line."""
        peak, plain_peak = (format_bytes(side.peak_bytes) for side in (self.scheduled, self.plain))
        step, plain_step = (format_ms(side.latency_ms) for side in (self.scheduled, self.plain))
        return f"peak {peak} instead of {plain_peak}; step {step} instead of {plain_step} ({self.overhead:+.1%})"


def subject_of(
    schedule: Schedule, profile: Profile, plain: Profile, steps: Sequence[Step] | None = None
) -> Subject:
    """Simulate a schedule and plain training.

    Args:
        schedule: of the profile's graph.
        profile: its costs; plain: those of the model as plain training lays it out.
        steps: what the schedule amounts to on this device, where that is not `schedule.steps(profile.graph)`.

    Raises:
        ScheduleMismatch: the schedule names what the graph does not have.
        IllegalSchedule: its steps are not legal.
    """
    timeline = simulate(profile, schedule if steps is None else steps)
    before = simulate(plain, plain_steps(plain.graph))
    return Subject(
        schedule=schedule,
        plain=Side(profile=plain, breakdown=break_down(plain, before)),
        scheduled=Side(profile=profile, breakdown=break_down(profile, timeline)),
    )


__all__ = ["Side", "Subject", "subject_of"]
