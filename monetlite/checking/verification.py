"""Checking a scheduled model against plain training: gradients, buffers, random state, peak and step time."""

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from monetlite.checking.operator_differences import OperatorComparison, PlainStep, ScheduledStep, WatchedWrapper
from monetlite.checking.report import Report, VerificationLimits
from monetlite.checking.step_differences import SLACK, Reference
from monetlite.checking.trainee import Trainee, copied, default_loss, leaf_copies, step_times_ms
from monetlite.core.costs import cost_device, cost_source
from monetlite.core.devices import find_device
from monetlite.core.errors import DeviceError, ModelError
from monetlite.core.graph import LOSS_ONLY
from monetlite.core.schedule import Schedule
from monetlite.profiling.memory_use import available_bytes
from monetlite.profiling.meters import meter_for
from monetlite.runtime.scheduled_training import loaded
from monetlite.runtime.wrapper import MONeTWrapper
from monetlite.tracing.step_inputs import Inputs, on_its_gpu, require_module, split_inputs, tensors_in_order

MAX_ALLOWED = 0.5
"""Largest difference that any tolerance allows: a gradient that is zero everywhere is off by 1."""
OPERATORS_SHARE = 3
"""Memory that comparing operators takes, over plain training's peak: all values of the step are kept."""
ROUNDING = 1.0
"""Tolerance at which two plain steps are compared: all that differs is rounding."""


def verify(
    model: nn.Module,
    schedule: Schedule | str | PathLike[str],
    example_inputs: Inputs,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    repeats: int = 3,
    seed: int = 0,
    operators: bool | None = None,
    limits: VerificationLimits | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run one training step plainly and by the schedule, and compare their results.

    Both run on copies of the model, which have one copy of its weights.

    Args:
        model: the module the schedule is for, in training mode (a wrapped one is unwrapped).
        schedule: the schedule, or the file or `zoo:` name that it is loaded from.
        example_inputs: as for `trace`.
        loss: makes a scalar of the model's output; by default its `loss`, or the mean of the squares of
            every floating-point output.
        repeats: timed steps of each.
        seed: of the random numbers of both.
        operators: compare what every operator writes, too, which keeps all of plain training's values in main
            memory for a step; by default only where something differs by more than is allowed.
        limits: what else is required for a pass.
        progress: called with a line about each piece of work.

    Raises:
        ScheduleMismatch, ModelError: as `MONeTWrapper`.
    """
    if repeats < 1:
        raise ModelError(f"{repeats} timed steps measure nothing; take at least 1")
    require_module(model)
    if isinstance(model, MONeTWrapper):
        model = model.model
    memo: dict[int, Any] = {}
    copied(model, memo)
    own = {at: memo[at] for at in _tensors(model) if at in memo}
    with on_its_gpu(model, example_inputs):
        return verify_own(
            model,
            loaded(schedule),
            example_inputs,
            own,
            loss=loss,
            repeats=repeats,
            seed=seed,
            operators=operators,
            limits=limits,
            progress=progress,
        )


def verify_own(
    model: nn.Module,
    schedule: Schedule,
    example_inputs: Inputs,
    own: dict[int, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    repeats: int = 3,
    seed: int = 0,
    operators: bool | None = None,
    limits: VerificationLimits | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Compare a training step by the schedule with a plain one, as `verify` does, with one set of weights.

    Args:
        model: as in `verify`; its modules are copied, and called nowhere.
        schedule: the schedule.
        example_inputs: as in `verify`.
        own: tensors to train in place of the model's, by the id of these; by default the model's own.
        loss, repeats, seed, operators, limits, progress: as in `verify`.
    """
    own = _tensors(model) if own is None else own
    limits = limits or VerificationLimits()
    args, kwargs = split_inputs(example_inputs)
    device = "cuda" if any(item.is_cuda for item in model.parameters()) else "cpu"

    def trainee(model: nn.Module) -> Trainee:
        return Trainee(
            model,
            *leaf_copies(args, kwargs),
            loss or default_loss,
            device,
            accumulate=schedule.accumulate,
            step_in_backward=schedule.step_in_backward,
            holds_outputs=schedule.outputs != LOSS_ONLY,
            autocast=schedule.autocast,
            optimizer=schedule.optimizer,
        )

    say = progress or (lambda _: None)
    # Both have the same weights, buffers and places for gradients; each step begins from cleared ones.
    plain, scheduled = trainee(copied(model, dict(own))), trainee(MONeTWrapper(copied(model, dict(own)), schedule))
    if schedule.reserved_bytes is not None:
        scheduled.limit_bytes = schedule.budget_bytes
    say("training a step plainly")
    reference = Reference(plain, seed)
    say("training a step by the schedule")
    differences = reference.compare(reference.take(scheduled), schedule.tolerance)
    say("training a step plainly again")
    repeated = reference.compare(reference.take(plain), ROUNDING)
    unrepeated = max(repeated.loss, repeated.largest_of_gradients)
    allowed = limits.difference
    if allowed is None:
        allowed = max(reference.reordered_sums, SLACK * unrepeated)
        if schedule.tolerance > 0:
            moved = reference.nudged(schedule.tolerance, schedule.tolerance).largest_of_gradients
            allowed = min(max(allowed, SLACK * moved), MAX_ALLOWED)
    say(f"timing {repeats} steps of each")
    plain_ms, scheduled_ms = map(statistics.median, step_times_ms((plain, scheduled), repeats))
    shapes = [tuple(item.shape) for item in tensors_in_order(model, args, kwargs)]
    say("measuring the memory of each")
    memory = scheduled.memory()
    scheduled.forget_state()
    plain_memory = plain.memory()
    report = Report(
        **vars(differences),
        peak_bytes=memory.peak_bytes,
        plain_peak_bytes=plain_memory.peak_bytes,
        reserved_bytes=memory.reserved_bytes,
        plain_reserved_bytes=plain_memory.reserved_bytes,
        budget_bytes=schedule.budget_bytes,
        of_reserved=schedule.reserved_bytes is not None,
        step_ms=scheduled_ms,
        plain_step_ms=plain_ms,
        predicted_peak_bytes=schedule.peak_bytes,
        predicted_plain_peak_bytes=schedule.plain_peak_bytes,
        predicted_step_ms=schedule.latency_ms,
        predicted_plain_step_ms=schedule.plain_latency_ms,
        kind=schedule.kind,
        device=cost_device(schedule),
        same_shapes=shapes == [spec.shape for spec in schedule.inputs.values()],
        incomparable=_incomparable(schedule, shapes, device),
        unrepeated=unrepeated,
        allowed_difference=allowed,
        limits=limits,
    )
    if operators is None and report.largest_difference > allowed:
        there = available_bytes()
        operators = there is None or there > OPERATORS_SHARE * plain_memory.peak_bytes
        if not operators:
            say("operators are not compared, for lack of memory; --operators does all the same")
    if operators:
        say("comparing operator by operator")
        del plain, scheduled, reference.plain  # whose memory is needed
        report = replace(report, operators=_by_operator(model, own, schedule, trainee, reference))
    return report


def _by_operator(
    model: nn.Module,
    own: dict[int, Any],
    schedule: Schedule,
    trainee: Callable[[nn.Module], Trainee],
    reference: Reference,
) -> OperatorComparison:
    """Run both steps again, node by node."""
    plain = PlainStep()
    captured = reference.compare(reference.take(trainee(WatchedWrapper(copied(model, dict(own)), schedule, plain))))
    scheduled = ScheduledStep(plain, schedule.tolerance, reference.expected.gradients.values())
    reference.take(trainee(WatchedWrapper(copied(model, dict(own)), schedule, scheduled)))
    return OperatorComparison(
        runs=scheduled.runs,
        again=scheduled.again,
        differing=tuple(sorted(scheduled.differing, key=lambda item: -item.difference)),
        captured=captured.largest_difference,
    )


def _tensors(model: nn.Module) -> dict[int, Any]:
    """A model's parameters and buffers, by their ids."""
    return {id(item): item for item in (*model.parameters(), *model.buffers())}


def _incomparable(schedule: Schedule, shapes: list[tuple[int, ...]], device: str) -> tuple[str, ...]:
    """Reasons why a schedule's predictions are not of a step here, each as what the predictions are."""
    found = []
    here = meter_for(device).environment()
    name = here["device"]
    if schedule.kind == "estimated":
        with contextlib.suppress(DeviceError):
            name = find_device(name).name
    if cost_device(schedule) != name:
        found.append(f"{cost_source(schedule)} (this is {here['device']})")
    elif (threads := schedule.environment.get("threads")) not in (None, here.get("threads")):
        found.append(f"measured with {threads} threads ({here.get('threads')} now)")
    solved = [spec.shape for spec in schedule.inputs.values()]
    if shapes != solved:
        found.append(f"for inputs of {', '.join('×'.join(map(str, shape)) for shape in solved)}")
    return tuple(found)
