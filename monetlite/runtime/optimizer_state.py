"""A warning where the optimizer of a training loop keeps state that the plan doesn't count."""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from monetlite.core.announcing import warn
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.profiling.step_additions import OPTIMIZERS
from monetlite.runtime.backward_updates import is_updated
from monetlite.runtime.measured_peak import state_bytes
from monetlite.runtime.model_schedules import ModelSchedules

NOTEWORTHY_SHARE = 0.02
"""Share of the budget."""


_watched = weakref.WeakSet[ModelSchedules]()
_told = weakref.WeakSet[Optimizer]()


def watch_state(schedules: ModelSchedules) -> None:
    """Warn, once, where the first optimizer that steps parameters of a model keeps state that is not counted."""
    _watched.add(schedules)
    _listen()


@functools.cache
def _listen() -> None:
    """Hear of every step of an optimizer, from now on: taking a hook away breaks a step that is at its hooks."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    for schedules in list(_watched):
        own = {item for item in schedules.model.parameters() if item.requires_grad}
        trained = [item for group in optimizer.param_groups for item in group["params"] if item in own]
        alone = any(item.grad is not None and is_updated(item) for item in trained)  # in the backward pass
        if trained and schedules.current is not None and not alone:
            _watched.discard(schedules)
            _look(optimizer, trained, schedules.current, given=schedules.budget is None)


def _look(optimizer: Optimizer, trained: list[nn.Parameter], schedule: Schedule, *, given: bool) -> None:
    kept = sum(
        item.nbytes
        for parameter in trained
        for item in optimizer.state.get(parameter, {}).values()
        if isinstance(item, torch.Tensor) and item.device == parameter.device
    )
    uncounted = kept - state_bytes([(item.nbytes, item.numel()) for item in trained], schedule.optimizer)
    if uncounted <= NOTEWORTHY_SHARE * schedule.budget_bytes or optimizer in _told:
        return
    _told.add(optimizer)
    class_name = type(optimizer).__name__
    names = [name for name, kind in OPTIMIZERS.items() if kind.state and kind.made_by.endswith(f".{class_name}")]
    if not names:
        advice = "Lower the budget by as much"
    elif given:
        advice = f"Solve a schedule with optimizer={names[0]!r} (--optimizer {names[0]})"
    else:
        advice = f"Give optimizer={names[0]!r} beside the budget"
    warn(
        f"{class_name} keeps {format_bytes(uncounted)} of state, which the budget of "
        f"{format_bytes(schedule.budget_bytes)} does not count. {advice}"
    )
