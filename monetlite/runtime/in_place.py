"""Training of a module by a schedule in place: the same object, as `nn.Module.compile` compiles one."""

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from monetlite.core.errors import ModelError
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.torch_modules import call_instead, called_instead
from monetlite.runtime.scheduled_training import OneSchedule, ScheduledTraining, refuse_scheduled
from monetlite.runtime.wrapper import MONeTWrapper
from monetlite.tracing.step_inputs import require_module

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def within(
    model: ModuleT,
    schedule: OneSchedule | Sequence[OneSchedule] = (),
    *,
    budget: str | int | float | None = None,
    compile: bool = False,
    wait: bool = False,
    whole: bool = False,
    **options: Any,
) -> ModuleT:
    """Have a module train under a memory budget, in place: the same object, class, signature and state.

    Calls in training mode with gradients enabled run by the schedule. Evaluation, `generate`, saving, loading and
    `isinstance` are the module's own, so transformers' Trainer, accelerate, peft, TRL and Lightning take it as it
    is. `release` takes the schedule off again. Copies of the module don't have it.

    The arguments are those of `MONeTWrapper`, and training steps raise its errors.

    Returns:
        The module itself.

    Raises:
        ModelError: no module; or it is scheduled, wrapped or compiled already; neither a schedule nor a budget.
        ScheduleFileError: the file can't be read.

    Example:
        >>> import torch, monetlite
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        >>> model = monetlite.within(model, budget="100%", device="rtx-4090", time_limit=5)
        >>> model(torch.randn(4, 8)).sum().backward()
        >>> type(model).__name__, monetlite.schedule_of(model).status.name
        ('Sequential', 'OPTIMAL')
    """
    if isinstance(model, MONeTWrapper):
        raise ModelError("the model is wrapped already; give the model itself: monetlite.within(wrapper.model)")
    refuse_scheduled(model)
    if called_instead(model) is not None:
        raise ModelError("model.compile() was called on the model; schedule a model that is not compiled")
    training = ScheduledTraining(model, schedule, budget=budget, compile=compile, wait=wait, whole=whole, **options)
    call_instead(model, training)
    return model


def release(model: ModuleT) -> ModuleT:
    """Take the schedule off a module that `within` was called on. Training is plain from then on.

    Returns:
        The module itself.

    Raises:
        ModelError: it has no schedule.
    """
    training_of(model)
    call_instead(model, None)
    return model


def schedule_of(model: nn.Module) -> Schedule | None:
    """The schedule that a module's last training step ran by; None if there is a budget and no step was taken yet.

    Args:
        model: a module that `within` was called on, or a `MONeTWrapper`.

    Raises:
        ModelError: it has no schedule.
    """
    return model.schedule if isinstance(model, MONeTWrapper) else training_of(model).schedules.current


def training_of(model: nn.Module) -> ScheduledTraining:
    """The object that runs the training steps of a module that `within` was called on.

    Raises:
        ModelError: it was not.
    """
    require_module(model)
    training = called_instead(model)
    if not isinstance(training, ScheduledTraining):
        lost = "" if training is None else ", or model.compile() took its plan off"
        raise ModelError(f"monetlite.within was not called on this {type(model).__name__}{lost}")
    return training
