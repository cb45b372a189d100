"""`MONeTWrapper`: a module that trains like the one it wraps, by a schedule.

Attributes, items, modes and state are those of the model behind it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn

from monetlite.core.errors import ModelError
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.torch_modules import (
    apply_to_tensors,
    load_own_contents,
    own_contents,
    share_contents,
)
from monetlite.runtime.scheduled_training import (
    DATA_PARALLEL,
    OneSchedule,
    ScheduledTraining,
    refuse_scheduled,
)

OWN = frozenset(vars(nn.Module()))
"""Instance attributes that every module has."""


class ForwardOfModel:
    """The attribute `forward`: calls `_forward`, and has the model's own signature, which callers look at."""

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        if instance is None:
            found: Callable[..., Any] = owner._forward
            return found
        call = functools.partial(instance._forward)
        functools.update_wrapper(call, instance.model.forward)
        return call


def _of_model(operation: Callable[..., Any]) -> Any:
    """A method that applies an operation to the model."""

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return operation(self.__dict__["model"], *arguments, **keywords)

    return method


def _defines(model: nn.Module, name: str) -> bool:
    """Look for an attribute of a module without evaluating it."""
    return name in vars(model) or hasattr(type(model), name) or name in own_contents(model)


class MONeTWrapper(nn.Module):
    """Trains a module under a memory budget, by a schedule that was solved for it.

    In training mode with gradients enabled, the forward and backward pass run as the schedule says, with the
    gradients, buffers and random numbers of plain training. In evaluation mode or under `torch.no_grad()`,
    and for everything that is not a forward pass, it is the wrapped module: parameters, buffers, submodules
    and `state_dict()` keys are the module's own.

    Args:
        model: the module the schedule was solved for.
        schedule: a `Schedule`, or the path of a schedule file; or several of them, for inputs of several sizes.
        budget: in place of a schedule, or beside: solve for a schedule when the first step is taken, for the
            inputs that it has, and again whenever inputs are larger than any before or the model has changed.
        options: with a budget, further arguments of `monetlite.optimize`: device, optimizer, accumulate,
            step_in_backward, tolerance, layout, outputs, implementations, reserved, time_limit, gap, solver, seed.
        compile: with a budget, have Inductor compile regions of operators (see `monetlite.optimize`). With a
            schedule that was solved without, have it compile the programs whole: the peak is then an estimate.
            Results differ in their last bits.
        wait: with a budget, wait in the first step until all operators are measured and the best schedule is found.
            By default the first step runs by a schedule found within seconds of its capture. A better one, which is
            looked for beside training, takes its place between two steps. The results are the same.
        whole: with a budget, refuse a model that can't be captured as one graph. By default it is planned in the
            pieces that can be, with a warning; code between them runs as in plain training.

    Raises:
        ScheduleFileError: the file can't be read.
        ScheduleMismatch: on the first training step, if the schedule was solved for another graph (another
            model, other frozen parameters, another mode of a submodule); names the operator that differs.
        ModelError: no module, or one that has a schedule; neither a schedule nor a budget; on a training step,
            inputs that no schedule can serve.
        MonetliteError: on a training step, with a budget: the errors of `monetlite.optimize`.

    Inputs that are smaller than those a schedule was solved for (the last batch, a shorter sequence) run by the
    same schedule. A model that returns a mapping with a scalar `loss` is trained through that loss; a gradient
    that reaches another output raises an error, but with `outputs="trained"`. Other outputs of more than two
    dimensions are computed only with that or with `outputs="all"`; without it, reading them raises `ModelError`.

    Example:
        >>> import torch, monetlite
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        >>> x = torch.randn(4, 8)
        >>> schedule = monetlite.optimize(model, x, budget="100%", device="rtx-4090", time_limit=5)
        >>> trained = monetlite.MONeTWrapper(model, schedule)
        >>> trained(x).sum().backward()
        >>> trained[0].weight.grad.shape
        torch.Size([32, 8])
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: OneSchedule | Sequence[OneSchedule] = (),
        *,
        budget: str | int | float | None = None,
        compile: bool = False,
        wait: bool = False,
        whole: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(model, MONeTWrapper):
            raise ModelError(
                "the model is wrapped already; wrap the model itself: MONeTWrapper(wrapper.model, ...)"
            )
        refuse_scheduled(model)
        training = ScheduledTraining(
            model, schedule, budget=budget, compile=compile, wait=wait, whole=whole, **options
        )
        super().__init__()
        # Sharing the dictionaries, rather than registering the model as a child, makes names and state_dict
        # keys the model's own and keeps both views consistent whatever is replaced in either.
        share_contents(self, model)
        self.__dict__.update(training=model.training, model=model, _training=training)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the last step; None if there is a budget and no step was taken yet."""
        found: Schedule | None = self.__dict__["_training"].schedules.current
        return found

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        trains = own["model"].training and torch.is_grad_enabled()
        return own["_training" if trains else "model"](*args, **kwargs)

    forward = ForwardOfModel()
    __getitem__ = _of_model(operator.getitem)
    __setitem__ = _of_model(operator.setitem)
    __delitem__ = _of_model(operator.delitem)
    __len__ = _of_model(len)
    __iter__ = _of_model(iter)
    __contains__ = _of_model(operator.contains)

    def __bool__(self) -> bool:
        return True  # whatever its length, and for models that have none

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        self.model.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        load_own_contents(self.model, *arguments)

    def _replicate_for_data_parallel(self) -> Any:
        raise ModelError(DATA_PARALLEL)

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        self.__dict__["training"] = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        apply_to_tensors(self.model, fn, recurse)
        return self

    def _keeps(self, name: str) -> bool:
        """Tell whether an attribute of that name is the wrapper's own, and not the model's.

        Its own are those that every module has, and notes that a library makes about the module it was given, under
        a private name that the model doesn't have.
        """
        model = self.__dict__.get("model")
        if model is None or name in OWN or hasattr(type(self), name):
            return True
        return name.startswith("_") and not _defines(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self.__dict__[name] = value
            if "model" in self.__dict__:
                self.model.training = value
        elif name in ("model", "schedule") and "model" in self.__dict__:
            raise ModelError(
                f"wrapper.{name} can't be replaced: what is compiled depends on it. Wrap again, "
                "MONeTWrapper(model, schedule); an attribute of that name of the model itself is set by "
                f"wrapper.model.{name} = ..."
            )
        elif self._keeps(name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._keeps(name):
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or "model" not in self.__dict__:
                raise
            return getattr(self.__dict__["model"], name)

    def __reduce__(self) -> Any:
        """Copy or pickle a wrapper: its model and schedules are wrapped anew, and it has the same hooks."""
        training, given = self._training, self._training.schedules
        options = {"compile": training.compile, **given.options, "wait": given.wait, "whole": training.whole}
        wrap = functools.partial(MONeTWrapper, budget=given.budget, **options)
        state = self.__getstate__()  # type: ignore[no-untyped-call]  # torch has no types for it
        own = {name: value for name, value in state.items() if name not in ("model", "_training")}
        return wrap, (self.model, given.known), own

    def extra_repr(self) -> str:
        if self.schedule is None:
            return f"budget={self._training.schedules.budget}"
        return f"schedule={self.schedule.name}, budget_bytes={self.schedule.budget_bytes}"
