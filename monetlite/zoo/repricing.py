"""A schedule's model built, traced and priced again; a schedule's choices at another batch or on another device."""

from dataclasses import replace
from typing import TYPE_CHECKING

from monetlite.core.binding import bind
from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.devices import find_device
from monetlite.core.errors import ModelError
from monetlite.core.graph import AS_TRACED, OperatorGraph
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.source import ModelSource, is_shareable
from monetlite.core.steps import plain_steps
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.problem import Problem

if TYPE_CHECKING:
    from monetlite.models import BuiltModel


def build(source: ModelSource, meta: bool = True) -> "BuiltModel":
    """Build a model and its inputs, on the meta device unless said otherwise.

    Raises:
        ModelError: the name is not one of a built-in or a library's model, or the model can't be built.
    """
    import torch

    from monetlite.models import build_model

    if not is_shareable(source.model):
        raise ModelError(f"{source.model!r:.80} is not the name of a built-in, hf:, timm: or torchvision: model")
    return build_model(
        source.model,
        batch=source.batch,
        input_size=source.input_size,
        sequence_length=source.sequence_length,
        dtype=None if source.dtype is None else getattr(torch, source.dtype),
        meta=meta,
    )


def traced(
    source: ModelSource, autocast: str = "", layout: str = AS_TRACED, device: str | None = None
) -> OperatorGraph:
    """Trace the training step of a model, on a named device if one is given.

    Raises:
        ModelError, TraceError, DeviceError: the model can't be built, or not be traced.
    """
    import torch

    from monetlite.tracing import trace

    built = build(source)
    with torch.autocast("cpu", getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
        graph = trace(built.model, built.example_inputs, device=device, layout=layout)
    return replace(graph, name=built.name)


def estimated(graph: OperatorGraph, device: str, optimizer: str | None, accumulate: bool) -> Profile:
    """Estimate the costs of a graph on a device.

    Raises:
        DeviceError: an unknown device.
        ModelError: an unknown optimizer.
    """
    from monetlite.planning.pricing import profile

    return profile(graph, find_device(device).name, optimizer=optimizer, accumulate=accumulate)


def rescale(schedule: Schedule, profile: Profile, plain: Profile) -> Schedule:
    """Price the choices of a schedule by other costs: at another batch or on another device.

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


__all__ = ["build", "estimated", "rescale", "traced"]
