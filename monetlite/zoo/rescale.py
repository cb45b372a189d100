"""A schedule's choices at another batch or on another device: legal there too, with other figures."""

from dataclasses import replace
from typing import TYPE_CHECKING

from monetlite.core.binding import bind
from monetlite.core.choices import Choices
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.problem import Problem

if TYPE_CHECKING:
    from monetlite.core.costs import Profile


def rescale(schedule: Schedule, profile: "Profile", plain: "Profile") -> Schedule:
    """The same choices with the figures that they have by other costs.

    Args:
        schedule: of the same model, at any batch and for any device.
        profile: the model at the new batch, in the schedule's layout; plain: as plain training runs it.

    Returns:
        A schedule whose budget is its peak, and whose bound is what the operators take at the least: solving
        anew may find a faster one.

    Raises:
        ScheduleMismatch: the graph is another one; says where.
    """
    graph = profile.graph
    profile = profile.within(schedule.tolerance)
    steps = bind(schedule, profile.graph)
    timeline = simulate(profile, steps)
    problem = Problem.of(profile)
    before = simulate(plain, plain_steps(plain.graph))
    return replace(
        schedule,
        fingerprint=graph.fingerprint,
        operator_digests=graph.operator_digests,
        inputs=graph.inputs,
        choices=Choices.of_steps(profile.graph, steps),
        budget_bytes=timeline.peak_bytes,
        peak_bytes=timeline.peak_bytes,
        latency_ms=timeline.latency_ms,
        lower_bound_ms=problem.least_latency_ms,
        status=Status.FEASIBLE,
        plain_peak_bytes=before.peak_bytes,
        plain_latency_ms=before.latency_ms,
        device=profile.device,
        kind=str(profile.kind),
        environment=dict(profile.environment),
        optimizer=profile.optimizer,
        accumulate=profile.accumulate,
        solver="rescaled",
        seconds=0.0,
        smallest_proven_bytes=smallest_budget_bound(problem),
        smallest_reached_bytes=timeline.peak_bytes,
        reserved_bytes=None,
    )


__all__ = ["rescale"]
