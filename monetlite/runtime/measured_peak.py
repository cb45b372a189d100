"""The peak of a step after the first, measured while it runs and told beside the planned one."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monetlite.core.announcing import tell
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.profiling.allocated import AllocatedGrowth
from monetlite.profiling.step_additions import OPTIMIZERS
from monetlite.runtime.gradient_delivery import CapturedStep
from monetlite.runtime.serving import as_passed, own_bytes
from monetlite.tracing.step_inputs import Arguments, device_of


class MeasuredPeak:
    """The measured peak of a model's training step, told once.

    On a GPU it is all that torch has allocated there. On a CPU it is what the model and the step take.
    """

    def __init__(self) -> None:
        self._step: CapturedStep | None = None
        self._growth: AllocatedGrowth | None = None
        self._told = False
        self._outputs: list[weakref.ref[torch.Tensor]] = []

    def keep(self, step: CapturedStep) -> None:
        """Note the programs of the step that was captured last, in which nothing is measured."""
        self.drop()
        self._step = None if self._told else step

    def step_begins(self, model: nn.Module, call: Arguments, schedule: Callable[[], Schedule | None]) -> None:
        """Measure a step, unless that was done, or none was captured yet.

        Args:
            model, call: of the step.
            schedule: gives the one that the step runs by, once it has begun.
        """
        self.drop()
        if self._step is None:
            return
        device = device_of(model, tuple(call))
        left_bytes = self._left_bytes(model, call)
        growth = self._growth = AllocatedGrowth(device)

        def watch(what: str) -> None:
            if what != "end":
                return
            ended, by = growth.end(), schedule()
            self.drop()  # nothing of the call is kept
            if ended is None or by is None:
                return
            self._told, self._step = True, None
            before_bytes = growth.before_bytes
            if device != "cuda":
                before_bytes = left_bytes + _resident_bytes(model, call, by)
            smaller = "" if _is_for(by, call) else ", for smaller inputs than planned for"
            measured = format_bytes(before_bytes + ended[1])
            tell(f"planned {format_bytes(by.peak_bytes)}, measured {measured}{smaller}")

        self._step.watch = watch

    def step_gave(self, output: Any) -> None:
        """Note the output of a step, which a caller may hold until it has the next one."""
        if not self._told:
            self._outputs = [weakref.ref(item) for item in as_passed((output,), {})]

    def _left_bytes(self, model: nn.Module, call: Arguments) -> int:
        """Bytes of gradients and outputs of the step before. A caller frees them at some time of this one."""
        gradients = (item.grad for item in [*model.parameters(), *as_passed(*call)] if item.is_leaf)
        left = (*gradients, *(found() for found in self._outputs))
        return own_bytes([item for item in left if item is not None])

    def drop(self) -> None:
        """Measure no longer."""
        if self._growth is not None and self._step is not None:
            self._growth.end()
            self._growth = self._step.watch = None


def _is_for(schedule: Schedule, call: Arguments) -> bool:
    """True if the schedule was solved for inputs of these shapes."""
    planned = sorted(tuple(spec.shape) for spec in schedule.inputs.values())
    return planned == sorted(tuple(tensor.shape) for tensor in as_passed(*call))


def _resident_bytes(model: nn.Module, call: Arguments, schedule: Schedule) -> int:
    """Bytes of the model's tensors, a call's, and of the optimizer's state that a schedule counts."""
    own = own_bytes([*model.parameters(), *model.buffers(), *as_passed(*call)])
    if schedule.optimizer is None:
        return own
    kind, trained = OPTIMIZERS[schedule.optimizer], (item for item in model.parameters() if item.requires_grad)
    return own + sum(kind.state_bytes(item.nbytes, item.numel()) for item in trained)
