"""`MONeTWrapper`: a module that trains like the one it wraps, by a schedule."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from monetlite.errors import ModelError, MonetliteError
from monetlite.operators.cudnn import with_named_plans
from monetlite.operators.guards import GuardFailed
from monetlite.runtime.binding import avoiding, bind
from monetlite.runtime.delivery import delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.schedule import Schedule
from monetlite.tracing.build import build_graph
from monetlite.tracing.capture import (
    Joint,
    capture_settings,
    compile_step,
    explain,
    has_loss,
    training_step,
)


class MONeTWrapper(nn.Module):
    """Trains a module under a memory budget, by a schedule that was solved for it.

    In training mode with gradients enabled, the forward and backward pass run as the schedule says, with the
    gradients, buffers and random numbers of plain training. In evaluation mode or under `torch.no_grad()`,
    and for everything that is not a forward pass, it is the wrapped module: parameters, buffers, submodules
    and `state_dict()` keys are the module's own.

    Args:
        model: the module the schedule was solved for.
        schedule: a `Schedule`, or the path of a schedule file.

    Raises:
        ScheduleFileError: the file can't be read.
        ScheduleMismatch: on the first training step, if the schedule was solved for another graph (another
            model, other frozen parameters, another mode of a submodule); names the operator that differs.
        ModelError: on a training step whose inputs the schedule can't serve.

    A batch smaller than the one the schedule was solved for runs by the same schedule. A model that returns
    a mapping with a scalar `loss` is trained through that loss; a gradient that reaches another output
    raises an error.

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

    def __init__(self, model: nn.Module, schedule: Schedule | str | PathLike[str]) -> None:
        super().__init__()
        if not isinstance(schedule, Schedule):
            from monetlite.files import load_schedule

            schedule = load_schedule(schedule)
        if isinstance(model, MONeTWrapper):
            raise ModelError(
                "the model is wrapped already; wrap the model itself: MONeTWrapper(wrapper.model, ...)"
            )
        # Sharing the dictionaries, rather than registering the model as a child, makes names and state_dict
        # keys the model's own and keeps both views consistent whatever is replaced in either.
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = model.__dict__[shared]
        self.__dict__["model"] = model
        self.__dict__["schedule"] = schedule
        self.__dict__["training"] = model.training
        self.__dict__["_step"] = None
        self.__dict__["_ready"] = set()
        self.__dict__["_avoided"] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model: nn.Module = self.__dict__["model"]
        if not (model.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        try:
            output = self._train(args, kwargs)
        except GuardFailed as failed:
            # Nothing of the step has run; what the weights rule out is left out from here on.
            self._avoid(failed.operators)
            output = self._train(args, kwargs)
        return guard_outputs(output) if has_loss(output) else output

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = _layout(args, kwargs)
        if layout in self._ready:
            # Where something other than the inputs is new since the program was made (a parameter is frozen, a
            # submodule in evaluation mode, autocast on), Dynamo wants another program. Nothing has run then.
            with contextlib.suppress(torch._dynamo.exc.TorchDynamoException):
                return self._compiled()(*args, **kwargs)
        return self._first(layout, args, kwargs)

    def _avoid(self, operators: Sequence[str]) -> None:
        """Make another program, without those operators' guarded implementations, for the steps to come."""
        self._avoided.update(operators)
        self.__dict__["_step"] = None
        self._ready.clear()
        listed = ", ".join(operators[:3]) + (f" and {len(operators) - 3} more" if len(operators) > 3 else "")
        warnings.warn(
            f"the weights of {listed} are zero, or too small beside their biases, to take the gradient of the "
            "normalisation from its output as the schedule says; it is taken from the input from here on, which "
            "is kept for that: the peak may be higher than predicted by its size. To hold the budget, solve "
            "again with a tolerance below 1e-4",
            stacklevel=4,
        )

    def _compiled(self) -> Callable[..., Any]:
        if self._step is None:
            self.__dict__["_step"] = compile_step(training_step(self.model), delivering_backend(self._partition))
        step: Callable[..., Any] = self._step
        return step

    def _first(self, layout: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step with inputs of a layout not seen before, which captures and lowers it."""
        check_inputs(self.schedule, (args, kwargs))
        self.__dict__["_example"] = (args, kwargs)
        try:
            with capture_settings():
                output = self._compiled()(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = _own_error(error)
            if cause is not None:
                raise cause from None
            raise explain(error) from error
        finally:
            del self.__dict__["_example"]
        self._ready.add(layout)
        return output

    def _partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        if "_example" not in self.__dict__:
            raise _NotAsked
        traced = build_graph(joint, self.model, self.__dict__["_example"], layout=self.schedule.layout)
        schedule = self.schedule
        if schedule.structure == traced.graph.structure:
            graph, choices = with_named_plans(traced.graph, schedule.choices)
            traced, schedule = replace(traced, graph=graph), replace(schedule, choices=choices)
        steps = bind(schedule, traced.graph)
        return lower(traced, avoiding(traced.graph, steps, self._avoided) if self._avoided else steps)

    def train(self, mode: bool = True) -> "MONeTWrapper":
        self.model.train(mode)
        self.__dict__["training"] = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "MONeTWrapper":
        self.model._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or "model" not in self.__dict__:
                raise
            return getattr(self.__dict__["model"], name)

    def __getitem__(self, index: Any) -> Any:
        container: Any = self.model
        return container[index]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_step"], state["_ready"], state["_avoided"] = None, set(), set()
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "MONeTWrapper":
        return MONeTWrapper(copy.deepcopy(self.model, memo), self.schedule)

    def extra_repr(self) -> str:
        return f"schedule={self.schedule.name}, budget_bytes={self.schedule.budget_bytes}"


class _NotAsked(Exception):
    """A program was captured other than through `_first`, so without the settings that captures need."""


def guard_outputs(output: Any) -> Any:
    """Make every output beside the loss refuse a gradient, rather than lose it in silence."""
    anchor = torch.empty(0, requires_grad=True)

    def guard(path: tuple[Any, ...], item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.is_floating_point() and path[0] != pytree.MappingKey("loss"):
            return _Refuse.apply(item, anchor, pytree.keystr(path))  # type: ignore[no-untyped-call]  # torch has no types for it
        return item

    guarded = {
        name: item if name == "loss" else pytree.tree_map_with_path(guard, {name: item})[name]
        for name, item in output.items()
    }
    return type(output)(**guarded)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ModelError(
            f"a gradient reached output{ctx.name}, but a model that returns a loss is scheduled for that loss "
            "alone. Compute everything that is trained on inside the model's loss, or call .detach() on the output"
        )


Layout = tuple[Any, ...]


def _layout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layout:
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    described = (
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return (*described, str(structure))


def check_inputs(schedule: Schedule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Check that a schedule can serve these inputs, before anything is compiled.

    Raises:
        ModelError: another number of tensors, another dtype, another shape than a smaller batch.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    expected = list(schedule.inputs.values())
    if len(tensors) != len(expected):
        raise ModelError(
            f"the schedule was solved for {len(expected)} input tensors, this call has {len(tensors)}; "
            "solve a schedule for these inputs"
        )
    for number, (tensor, spec) in enumerate(zip(tensors, expected, strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype:
            raise ModelError(
                f"input {number} is {dtype}, the schedule was solved for {spec.dtype}; "
                f"convert the input, or solve a schedule for {dtype}"
            )
        shape = tuple(tensor.shape)
        same_rest = len(shape) == len(spec.shape) and shape[1:] == spec.shape[1:]
        if not same_rest or (shape and shape[0] > spec.shape[0]):
            raise ModelError(
                f"input {number} has shape {shape}, the schedule was solved for {spec.shape} and serves smaller "
                "batches of it; solve a schedule for this shape"
            )


def _own_error(error: BaseException | None) -> MonetliteError | None:
    """The error of ours that Dynamo wrapped, if it did."""
    while error is not None:
        if isinstance(error, MonetliteError):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None
