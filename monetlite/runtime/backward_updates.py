"""Updates of parameters in the backward pass: each one when its gradient arrives, which is freed then.

The optimizer steps with one parameter at a time: `param_groups` has that one alone while it does. State, settings
and their schedulers stay the optimizer's own. A parameter then has a `UsedGradient` until the optimizer's own step,
which finds no gradients. Whatever wants a gradient in between (a norm over all of them, a scaler, a second backward
pass) gets an error, as there is none any more.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals.torch_dispatch import changes_of_each

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
_LIBRARIES = ("torch.optim.", "bitsandbytes.optim.", "torchao.optim.")
"""Modules of optimizers that update each parameter by itself."""
_updated = WeakIdKeyDictionary()
"""Parameters that are updated in the backward pass, as keys; copies and what is loaded from a file are not."""


def step_in_backward(optimizer: OptimizerT) -> OptimizerT:
    """Have an optimizer update each parameter in the backward pass, as soon as its gradient is there.

    Gradients then never add up: each is freed once its parameter is updated. The training loop stays as it is:
    `optimizer.step()` and `zero_grad()` find nothing left to do, and settings, schedulers, `state_dict` and
    `load_state_dict` work as ever. The weights are those of plain training, bit for bit.

    Call it before the first step, on an optimizer that has all trained parameters, and tell the plan:
    `monetlite.within(model, budget="6GB", optimizer="adamw", step_in_backward=True)`.

    What needs all gradients at once raises `ModelError` on its first use: clipping by their norm, `GradScaler`,
    and `optimizer.step(closure)`. So does a second backward pass before `optimizer.step()`, as in accumulation or
    after a step that was left out. Hooks of single
    parameters (`register_hook`) get each gradient before its update. Hooks of the optimizer's step are called for
    each parameter, too.

    Args:
        optimizer: one of `torch.optim` (but LBFGS), bitsandbytes or torchao.

    Returns:
        The optimizer itself.

    Raises:
        ModelError: the optimizer is another one, does so already, or its parameters have gradients; several
            processes train together.

    Example:
        >>> import torch, monetlite
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = monetlite.step_in_backward(torch.optim.AdamW(model.parameters(), lr=0.1))
        >>> before = model.weight.detach().clone()
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> torch.equal(before, model.weight)
        False
        >>> optimizer.step()
    """
    BackwardUpdates(optimizer)
    return optimizer


class BackwardUpdates:
    """The hooks by which an optimizer updates parameters in the backward pass; args and errors as above."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _refuse_others(optimizer)
        self._optimizer = optimizer
        self._lock = threading.Lock()  # each GPU's gradients arrive in a thread of their own
        self._stepping = False
        self._used: dict[int, dict[str, Any]] = {}
        """Settings that groups of parameters were last updated by."""
        self._updated: set[torch.Tensor] = set()
        """Parameters that were updated since the optimizer's last step."""
        places = enumerate(optimizer.param_groups)
        self._group_of = {item: number for number, group in places for item in group["params"]}
        for parameter in self._group_of:
            if is_updated(parameter):
                raise ModelError("a parameter of this optimizer is updated in the backward pass already")
            if parameter.grad is not None:
                raise ModelError(
                    "a parameter has a gradient already, which would be added to the next; call "
                    "optimizer.zero_grad() before monetlite.step_in_backward(optimizer)"
                )
        self._hooks = [optimizer.register_step_pre_hook(self._step_begins)]
        for parameter in self._group_of:
            _updated[parameter] = True
            if parameter.is_floating_point() or parameter.is_complex():
                self._hooks.append(_hooked(parameter, self._update))

    def remove(self) -> None:
        """Have the optimizer step as ever again."""
        for hook in self._hooks:
            hook.remove()
        self._forget_gradients()
        for parameter in self._group_of:
            del _updated[parameter]

    def _update(self, parameter: torch.Tensor) -> None:
        _refuse_processes()
        optimizer = self._optimizer
        with self._lock:
            if parameter in self._updated:
                raise ModelError(
                    "a parameter gets a second gradient before optimizer.step(). With step_in_backward the first "
                    "backward pass has updated it already, and neither zero_grad() nor a step that is left out "
                    "takes that back. Call optimizer.step() after each backward pass; where a pass is not to train "
                    "these parameters (an attack on inputs, another network's loss), freeze them or use "
                    "torch.autograd.grad"
                )
            self._updated.add(parameter)
            groups, number = optimizer.param_groups, self._group_of[parameter]
            group = groups[number]
            self._used[number] = self._settings(group)
            alone = {**group, "params": [parameter]}
            optimizer.param_groups, self._stepping = [alone], True
            try:
                type(optimizer).step(optimizer)  # what schedulers put in its place only counts steps
            finally:
                optimizer.param_groups, self._stepping = groups, False
            changed = {name for name, value in alone.items() if value is not group.get(name)} - {"params"}
            if changed:
                raise ModelError(
                    f"{type(optimizer).__name__} changes {min(changed)} of all parameters together when it steps, "
                    "so it can't step with one at a time; take step_in_backward away"
                )
            parameter.grad = UsedGradient.of(parameter)

    def _step_begins(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping:
            return
        if any(item is not None for item in (*args[1:], *kwargs.values())):
            raise ModelError(
                "optimizer.step(closure) runs the backward pass inside of the step; with step_in_backward, call "
                "loss.backward() and then optimizer.step()"
            )
        self._forget_gradients()
        self._updated.clear()
        used, self._used = self._used, {}
        for number, settings in used.items():
            now = self._settings(self._optimizer.param_groups[number])
            if changed := [name for name, value in settings.items() if now[name] != value]:
                raise ModelError(
                    f"{changed[0]} was changed between the backward pass, which has updated the parameters, and "
                    "optimizer.step(); with step_in_backward, change it before the backward pass"
                )

    def _settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """The settings of a group of parameters; of one in a tensor, which tensor, and how often it was written."""
        found = {name: group[name] for name in self._optimizer.defaults if name in group}
        return {
            name: (id(item), *changes_of_each([item])) if isinstance(item, torch.Tensor) else item
            for name, item in found.items()
        }

    def _forget_gradients(self) -> None:
        for parameter in self._group_of:
            if isinstance(parameter.grad, UsedGradient):
                parameter.grad = None


class UsedGradient(torch.Tensor):
    """A gradient that is no longer there: without memory, and with an error for whoever uses it."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> torch.Tensor:
        """The used gradient of a parameter."""
        return parameter.detach().as_subclass(cls)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # torch calls it so
        raise ModelError(
            f"{func} asks for a gradient that is gone: monetlite.step_in_backward(optimizer) has updated the "
            "parameter and freed it. Norms of all gradients (for clipping, or as transformers' Trainer logs them), "
            "GradScaler and gradient accumulation need all gradients, so they can't be had together with it. After "
            "each backward pass, call optimizer.step()"
        )


def is_updated(parameter: torch.Tensor) -> bool:
    """True for a parameter that an optimizer updates in the backward pass."""
    return parameter in _updated


def _hooked(parameter: torch.Tensor, function: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """A hook that gets a parameter when its gradient is there, now or once it is no longer frozen."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]  # torch has no types for it
        return hook
    finally:
        parameter.requires_grad_(trained)


def refuse_without_updates(model: nn.Module) -> None:
    """Refuse a model whose plan counts updates in the backward pass, and that has a parameter without.

    Raises:
        ModelError: names the parameter.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_updated(parameter):
            raise ModelError(
                f"step_in_backward is planned, and {name} would keep its gradient: no optimizer updates it in "
                "the backward pass. Before the first step, call monetlite.step_in_backward(optimizer), with an "
                "optimizer of all trained parameters; freeze those that are not trained"
            )


def _refuse_others(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that may look at several parameters at once."""
    _refuse_processes()
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith(_LIBRARIES) or isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            f"{kind.__module__}.{kind.__name__} may look at several parameters at once, and with step_in_backward "
            "it would get one at a time; take an optimizer of torch.optim (but LBFGS), bitsandbytes or torchao, "
            "and before a library wraps it"
        )


def _refuse_processes() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ModelError(
            "several processes train together: with step_in_backward each would update its weights by its own "
            "gradients, before they are averaged (DDP, FSDP). Take step_in_backward away"
        )
