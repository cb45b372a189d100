"""The peak of a step after the first, measured while it runs and told beside the planned one."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from monetlite.core.announcing import tell, warn
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals.torch_dynamo import seconds_captured
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.profiling.allocated import MAX_LATE, AllocatedGrowth
from monetlite.profiling.step_additions import optimizer_kind
from monetlite.runtime.serving import own_bytes
from monetlite.tracing.step_inputs import Arguments, bucket_bytes, device_of

OVER, OVER_BYTES = 0.05, 10**6
"""Share of the budget, and bytes, by which a measured peak exceeds it where that is warned of."""
EXPLAINED = 0.01
"""Share of the budget by which it may still be exceeded without what explains the excess."""


class MeasuredPeak:
    """The measured peak of a model's training step, told once.

    On a GPU it is all that torch has allocated there. On a CPU it is what the model and the step take.
    """

    def __init__(self) -> None:
        self._ended: Callable[[], None] | None = None
        """Called when the backward pass of the step that is measured ends. It holds what measures."""
        self._captured = self._told = False
        self._found: dict[tuple[int, tuple[tuple[int, ...], ...]], list[int]] = {}
        """Growths of the steps that were measured, by their planned peaks and the shapes of their inputs."""
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    def capture_ends(self) -> None:
        """Note that a step was captured, in which nothing is measured."""
        self.drop()
        self._captured = True

    def step_begins(self, model: nn.Module, call: Arguments, schedule: Callable[[], Schedule | None]) -> None:
        """Measure a step, unless that was done, or none was captured yet.

        Args:
            model, call: of the step.
            schedule: gives the one that the step runs by, once it has begun.
        """
        self.drop()
        if self._told or not self._captured:
            return
        device = device_of(model, tuple(call))
        tensors = tensors_among(call)
        # Compiled graphs are passed their parameters, too.
        shapes = tuple(sorted(tuple(item.shape) for item in tensors if not isinstance(item, nn.Parameter)))
        own = [*model.parameters(), *model.buffers(), *tensors]
        gradient_bytes = gradients_of(own)
        held_bytes = own_bytes(own) + gradient_bytes + self._held_outputs()
        parameters = {item for item in own if isinstance(item, nn.Parameter) and item.requires_grad}
        buckets_bytes = bucket_bytes(parameters)
        trained = [(item.nbytes, item.numel()) for item in parameters]
        growth, captured_before = AllocatedGrowth(device), seconds_captured()

        def backward_ended() -> None:
            ended, by = growth.end(), schedule()
            self.drop()
            if ended is None or by is None or seconds_captured() > captured_before:
                return  # in a step in which another model is captured and planned, that takes memory, too
            found = self._found.setdefault((by.peak_bytes, shapes), [])
            found.append(ended[1])
            if growth.was_late and len(found) < MAX_LATE:
                return
            self._told = True
            own_step_bytes = held_bytes + state_bytes(trained, by.optimizer)
            before_bytes = growth.before_bytes if device == "cuda" else own_step_bytes + buckets_bytes
            planned_for = tuple(sorted(tuple(spec.shape) for spec in by.inputs.values()))
            smaller = "" if shapes == planned_for else ", for smaller inputs than planned for"
            peak_bytes = before_bytes + max(found)
            tell(f"planned {format_bytes(by.peak_bytes)}, measured {format_bytes(peak_bytes)}{smaller}")
            other_bytes = before_bytes - own_step_bytes
            if said := over_budget(peak_bytes, by.budget_bytes, other_bytes, gradient_bytes):
                warn(said)

        self._ended = backward_ended

    def backward_ends(self) -> None:
        """Note that the backward pass has ended."""
        if self._ended is not None:
            self._ended()

    def step_gave(self, output: Any) -> None:
        """Note the output of a step, which a caller may hold until it has the next one."""
        if not self._told:
            self._outputs = [weakref.ref(item) for item in tensors_among(output)]

    def _held_outputs(self) -> int:
        """Bytes of outputs of the step before. A caller frees them at some time of this one."""
        return own_bytes([item for found in self._outputs if (item := found()) is not None])

    def drop(self) -> None:
        """Measure no longer."""
        self._ended = None


def gradients_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the gradients that tensors have."""
    return own_bytes([item.grad for item in tensors if item.is_leaf and item.grad is not None])


def over_budget(peak_bytes: int, budget_bytes: int, other_bytes: int, gradient_bytes: int) -> str:
    """The warning of a step's peak that exceeds its budget; empty where it is within it, or a little beyond.

    Args:
        other_bytes: part of the peak that was allocated before the step, and not for it.
        gradient_bytes: of gradients that were there when the step began.
    """
    most_bytes = budget_bytes + max(OVER * budget_bytes, OVER_BYTES)
    if peak_bytes <= most_bytes:
        return ""
    said = f"a step took {format_bytes(peak_bytes)}, more than the budget of {format_bytes(budget_bytes)}. "
    enough_bytes = peak_bytes - (1 + EXPLAINED) * budget_bytes
    if other_bytes >= enough_bytes:
        return said + (
            f"{format_bytes(other_bytes)} of that were in memory before, beside the model, its gradients and its "
            "inputs. An optimizer's state counts in the budget if optimizer= names it. Take what else is there "
            "(another model, data) off the budget"
        )
    if gradient_bytes and gradient_bytes >= enough_bytes:
        return said + (
            f"{format_bytes(gradient_bytes)} of gradients were there when it began. Clear them before the forward "
            "pass (optimizer.zero_grad()). Where they add up over several steps, have accumulate=True count them"
        )
    return said + (
        "A plan is of the model and its loss. What else runs between its forward and its backward pass (another "
        "model, a second backward pass) comes on top: take it off the budget"
    )


def state_bytes(trained: Iterable[tuple[int, int]], optimizer: str | None) -> int:
    """Bytes of an optimizer's state, by the bytes and elements of trained parameters; none without one."""
    return 0 if optimizer is None else sum(itertools.starmap(optimizer_kind(optimizer).state_bytes, trained))
