"""Checking a scheduled model against plain training: gradients, buffers, random state, peak and step time."""

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from monetlite.checking.comparing import REORDERED_SUMS, SLACK, difference, differences, negligible
from monetlite.checking.operator_differences import OperatorComparison, PlainStep, ScheduledStep
from monetlite.checking.report import Limits, Report
from monetlite.checking.trainee import (
    Snapshot,
    Trainee,
    changed_weights,
    copied,
    default_loss,
    off_by,
    step_times_ms,
)
from monetlite.core.devices import find_device
from monetlite.core.errors import DeviceError, ModelError
from monetlite.core.schedule import Schedule
from monetlite.profiling.meters import meter_for
from monetlite.runtime.wrapper import MONeTWrapper, loaded
from monetlite.tracing.build import Inputs, split_inputs
from monetlite.tracing.signature import tensors_in_order

MOST_ALLOWED = 0.5
"""What no tolerance reaches: a gradient that is zero everywhere is off by 1."""


def verify(
    model: nn.Module,
    schedule: Schedule | str | PathLike[str],
    example_inputs: Inputs,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    repeats: int = 3,
    seed: int = 0,
    operators: bool | None = None,
    limits: Limits | None = None,
) -> Report:
    """Run one training step plainly and by the schedule, and compare everything they leave behind.

    The model itself is not changed: both run on copies.

    Args:
        model: the module the schedule is for, in training mode (a wrapped one is unwrapped).
        schedule: the schedule, or the file or `zoo:` name that it is loaded from.
        example_inputs: as for `trace`.
        loss: makes a scalar of the model's output; by default its `loss`, or the mean of the squares of
            every floating-point output.
        repeats: timed steps of each.
        seed: of the random numbers of both.
        operators: whether to compare what every operator writes, too, which keeps all of plain training's values in
            main memory for a step; by default only where something differs by more than is allowed.
        limits: what else has to hold for a pass, or need not.

    Raises:
        ScheduleMismatch, ModelError: as `MONeTWrapper`.
    """
    if repeats < 1:
        raise ModelError(f"{repeats} timed steps measure nothing; take at least 1")
    schedule = loaded(schedule)
    if isinstance(model, MONeTWrapper):
        model = model.model
    limits = limits or Limits()
    args, kwargs = split_inputs(example_inputs)
    device = "cuda" if any(item.is_cuda for item in model.parameters()) else "cpu"
    trainee = partial(
        Trainee,
        args=args,
        kwargs=kwargs,
        objective=loss or default_loss,
        device=device,
        accumulate=schedule.accumulate,
        autocast=schedule.autocast,
        optimizer=schedule.optimizer,
    )
    plain = trainee(copied(model))
    scheduled = trainee(
        MONeTWrapper(copied(model), schedule),
        limit_bytes=schedule.budget_bytes if schedule.reserved_bytes is not None else None,
    )
    expected, found = plain.snapshot(seed), scheduled.snapshot(seed)
    unrepeated = _unrepeated(expected, trainee(copied(model)).snapshot(seed))
    allowed = limits.difference
    if allowed is None:
        allowed = max(REORDERED_SUMS, SLACK * unrepeated)
        if schedule.tolerance > 0:
            moved = _sensitivity(plain, expected, schedule.tolerance, seed)
            allowed = min(max(allowed, SLACK * moved), MOST_ALLOWED)
    plain_ms, scheduled_ms = map(statistics.median, step_times_ms((plain, scheduled), repeats))
    shapes = [tuple(item.shape) for item in tensors_in_order(model, args, kwargs)]
    peak, plain_peak = scheduled.peak(), plain.peak()
    report = Report(
        **compare(expected, found, schedule.tolerance),
        peak_bytes=peak.allocated_bytes,
        plain_peak_bytes=plain_peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        plain_reserved_bytes=plain_peak.reserved_bytes,
        budget_bytes=schedule.budget_bytes,
        step_ms=scheduled_ms,
        plain_step_ms=plain_ms,
        predicted_peak_bytes=schedule.peak_bytes,
        predicted_plain_peak_bytes=schedule.plain_peak_bytes,
        predicted_step_ms=schedule.latency_ms,
        predicted_plain_step_ms=schedule.plain_latency_ms,
        kind=schedule.kind,
        device=_priced_on(schedule),
        same_shapes=shapes == [spec.shape for spec in schedule.inputs.values()],
        incomparable=_incomparable(schedule, shapes, device),
        unrepeated=unrepeated,
        allowed_difference=allowed,
        limits=limits,
    )
    if operators or (operators is None and report.largest_difference > allowed):
        del plain, scheduled, found  # whose memory is needed
        report = replace(report, operators=_by_operator(model, schedule, trainee, expected, seed))
    return report


def compare(expected: Snapshot, found: Snapshot, tolerance: float = 0.0) -> dict[str, Any]:
    """What one step leaves behind beside what another does, as `Report` has it."""
    return {
        "gradients": differences(
            expected.gradients, found.gradients, negligible(expected.gradients.values(), tolerance)
        ),
        "buffers": differences(expected.buffers, found.buffers, negligible(expected.buffers.values(), tolerance)),
        "loss": difference(expected.loss, found.loss),
        "random_state": torch.equal(expected.random_state, found.random_state),
    }


def _by_operator(
    model: nn.Module, schedule: Schedule, trainee: Callable[..., Trainee], expected: Snapshot, seed: int
) -> OperatorComparison:
    """Run both steps again, node by node."""
    plain = PlainStep()
    captured = compare(expected, trainee(plain.wrap(copied(model), schedule)).snapshot(seed))
    scheduled = ScheduledStep(plain, schedule.tolerance, expected.gradients.values())
    trainee(scheduled.wrap(copied(model), schedule)).snapshot(seed)
    left = (captured["loss"], *captured["gradients"].values(), *captured["buffers"].values())
    return OperatorComparison(
        runs=scheduled.runs,
        again=scheduled.again,
        differing=tuple(sorted(scheduled.differing, key=lambda item: -item.difference)),
        captured=max(left),
    )


def _priced_on(schedule: Schedule) -> str:
    return schedule.device if schedule.kind == "estimated" else schedule.environment.get("device", schedule.device)


def _incomparable(schedule: Schedule, shapes: list[tuple[int, ...]], device: str) -> tuple[str, ...]:
    """Why a schedule's predictions are not of a step here, each as what the predictions are."""
    found = []
    here, there = meter_for(device).environment(), _priced_on(schedule)
    if schedule.kind == "estimated":
        known = ""
        with contextlib.suppress(DeviceError):
            known = find_device(here["device"]).name
        if known != there:
            found.append(f"estimated for {there} (this is {here['device']})")
    elif there != here["device"]:
        found.append(f"measured on {there} (this is {here['device']})")
    elif (threads := schedule.environment.get("threads")) not in (None, here.get("threads")):
        found.append(f"measured with {threads} threads ({here.get('threads')} now)")
    solved = [spec.shape for spec in schedule.inputs.values()]
    if shapes != solved:
        found.append(f"for inputs of {', '.join('×'.join(map(str, shape)) for shape in solved)}")
    return tuple(found)


def _unrepeated(first: Snapshot, second: Snapshot) -> float:
    """How far the gradients of two plain steps are apart, where kernels add up in no fixed order."""
    apart = differences(first.gradients, second.gradients, negligible(first.gradients.values(), 1.0))
    return max(difference(first.loss, second.loss), *apart.values(), 0.0)


def _sensitivity(plain: Trainee, expected: Snapshot, tolerance: float, seed: int) -> float:
    """How far a plain step's gradients move when every weight is off by a fraction of itself, up or down."""
    with changed_weights(plain.model, off_by(tolerance, seed)):
        moved = plain.snapshot(seed)
    least = negligible(expected.gradients.values(), tolerance)
    return max(differences(expected.gradients, moved.gradients, least).values(), default=0.0)


__all__ = ["REORDERED_SUMS", "Limits", "Report", "verify"]
