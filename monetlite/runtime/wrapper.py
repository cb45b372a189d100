"""`MONeTWrapper`: a module that trains like the one it wraps, by a schedule.

A training step, in the order of this file: `_forward` finds a program for the inputs, or has one made
(`_first`). For that, a schedule is found or solved for, and the step is captured as one graph. `_partition` turns
the graph into two programs, forward and backward, by the schedule's steps (`_plan`). The programs run, and
gradients reach autograd as they become ready (`gradient_delivery`).
"""

import contextlib
import copy
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from monetlite.core.errors import ModelError, ScheduleMismatch
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.core.units import parse_budget
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import is_transformed
from monetlite.fx.torch_internals.torch_dynamo import FailOnRecompileLimitHit, TorchDynamoException, allow_programs
from monetlite.operators.program_calls import GuardFailed
from monetlite.operators.random import forked_state
from monetlite.runtime.buffers import eager
from monetlite.runtime.delegation import Delegating
from monetlite.runtime.gradient_delivery import delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.serving import ScheduleSet, TooLarge, input_signature, without_guards
from monetlite.tracing.capture import (
    MAX_PROGRAMS,
    Compiler,
    Joint,
    compile_step,
    refuse_uninitialized,
    run_captured,
    too_many_programs,
    training_step,
)
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.step_inputs import Arguments, autocast_dtype, device_of, on_its_gpu

_AMOUNT = re.compile(r"[\d.]+\s*(%|[kmgt]?i?b)", re.IGNORECASE)
OneSchedule: TypeAlias = Schedule | str | PathLike[str]


class MONeTWrapper(Delegating):
    """Trains a module under a memory budget, by a schedule that was solved for it.

    In training mode with gradients enabled, the forward and backward pass run as the schedule says, with the
    gradients, buffers and random numbers of plain training. In evaluation mode or under `torch.no_grad()`,
    and for everything that is not a forward pass, it is the wrapped module: parameters, buffers, submodules
    and `state_dict()` keys are the module's own.

    Args:
        model: the module the schedule was solved for.
        schedule: a `Schedule`, or the path of a schedule file; or several of them, for inputs of several sizes.
        budget: in place of a schedule, or beside: solve for a schedule when the first step is taken, for the
            inputs that it has, and again whenever inputs are larger than any before or the model has changed
            (`MAX_SOLVED` times).
        options: with a budget, further arguments of `monetlite.optimize`: device, optimizer, accumulate,
            tolerance, layout, implementations, reserved, time_limit, solver, seed.
        compile: have Inductor compile the programs. The peak is then an estimate, and results differ in their last
            bits.

    Raises:
        ScheduleFileError: the file can't be read.
        ScheduleMismatch: on the first training step, if the schedule was solved for another graph (another
            model, other frozen parameters, another mode of a submodule); names the operator that differs.
        ModelError: neither a schedule nor a budget; on a training step, inputs that no schedule can serve.
        MonetliteError: on a training step, with a budget: the errors of `monetlite.optimize`.

    Inputs that are smaller than those a schedule was solved for (the last batch, a shorter sequence) run by the
    same schedule. A model that returns a mapping with a scalar `loss` is trained through that loss; a gradient
    that reaches another output raises an error.

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
        **options: Any,
    ) -> None:
        if isinstance(schedule, str) and budget is None and _AMOUNT.fullmatch(schedule.strip()):
            raise ModelError(
                f"{schedule!r} stands where a schedule goes; for a budget: MONeTWrapper(model, budget={schedule!r})"
            )
        if budget is not None:
            parse_budget(budget, plain_peak_bytes=2**40)
        several = schedule if isinstance(schedule, Sequence) and not isinstance(schedule, str) else (schedule,)
        given = [loaded(item) for item in several]
        if not given and budget is None:
            raise ModelError("give a schedule, or a budget to solve one for: MONeTWrapper(model, budget='6GB')")
        split_options(options)
        if options and budget is None:
            raise ModelError(f"{min(options)!r} is an option of solving, which needs a budget")
        if isinstance(model, MONeTWrapper):
            raise ModelError(
                "the model is wrapped already; wrap the model itself: MONeTWrapper(wrapper.model, ...)"
            )
        super().__init__(model)
        own = self.__dict__
        own["schedule"] = given[0] if given else None
        own["_budget"], own["_options"] = budget, options
        own["_schedules"] = ScheduleSet(model, given, None if budget is None else self._solve)
        own["_compile"] = compile
        own["_step"] = None  # the compiled training step
        own["_ready"] = set()  # signatures of inputs that it has a program for
        own["_avoided"] = set()  # operators whose guarded implementations are not used

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        model: nn.Module = self.__dict__["model"]
        if not (model.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        if is_transformed():
            raise ModelError(
                "a scheduled training step can't be transformed by torch.func (grad, vmap, jacrev, ...): its "
                "backward pass is a program of its own. Transform the model itself: wrapper.model"
            )
        with on_its_gpu(model, (args, kwargs)):
            try:
                try:
                    output, detached = self._train(args, kwargs)
                except GuardFailed as failed:
                    # Nothing of the step has run; implementations that the weights rule out are not used again.
                    self._avoid(failed.operators)
                    output, detached = self._train(args, kwargs)
            except FailOnRecompileLimitHit as error:
                raise too_many_programs() from error
        return output if detached is None else _guard_outputs(output, detached)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = input_signature(args, kwargs)
        if signature in self._ready:
            # Where something other than the inputs is new since the program was made (a parameter is frozen, a
            # submodule in evaluation mode, autocast on), Dynamo wants another program. Nothing has run then.
            with contextlib.suppress(TorchDynamoException), allow_programs(MAX_PROGRAMS):
                return self._compiled()(*args, **kwargs)
        return self._first(signature, args, kwargs)

    def _first(self, signature: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step for inputs of a new signature, which captures and lowers it."""
        _refuse_shards(self.model)
        refuse_uninitialized(self.model)
        autocast = autocast_dtype(device_of(self.model, (args, kwargs)))
        self.__dict__["schedule"] = self._schedules.find(args, kwargs, autocast)
        try:
            output = self._capture(args, kwargs)
        except (ScheduleMismatch, TooLarge):
            # The model itself has changed: other parameters are frozen, a submodule is in evaluation mode. Or
            # something other than an input's shape is larger than any schedule was solved for.
            if self._budget is None:
                raise
            self.__dict__["schedule"] = self._schedules.solve(args, kwargs)
            output = self._capture(args, kwargs)
        self._ready.add(signature)
        return output

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step for which a program has to be made."""
        with patched():  # by one thread at a time
            self.__dict__["_example"] = (args, kwargs)
            try:
                return run_captured(self.model, lambda: self._compiled()(*args, **kwargs))
            finally:
                del self.__dict__["_example"]

    def _compiled(self) -> Callable[..., Any]:
        if self._step is None:
            self.__dict__["_step"] = compile_step(
                training_step(self.model), delivering_backend(self._partition, self._compiler())
            )
        step: Callable[..., Any] = self._step
        return step

    def _compiler(self) -> Compiler:
        if not self._compile:
            return eager
        from monetlite.runtime.inductor import inductor

        return inductor

    def _partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced, steps = self._plan(joint)
        if self._compile:
            from monetlite.runtime.inductor import as_inductor_fuses

            steps = as_inductor_fuses(traced.graph, steps)
        return lower(traced, steps)

    def _plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step as a graph, and the steps to run of it."""
        if "_example" not in self.__dict__:
            raise _NotAsked
        args, kwargs = self.__dict__["_example"]
        found = self.schedule
        traced = build_graph(joint, self.model, (args, kwargs), layout=found.layout, autocast=found.autocast)
        self.__dict__["schedule"], traced, steps = self._schedules.plan(traced, args, kwargs, found)
        return traced, without_guards(traced.graph, steps, self._avoided)

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

    def _solve(self, args: tuple[Any, ...], kwargs: dict[str, Any], starts: Sequence[Schedule]) -> Schedule:
        from monetlite.planning.pipeline import solve_model

        inputs, options = Arguments(args, kwargs), split_options(self._options)
        # Measuring draws random numbers; the step that waits for it must not notice.
        with forked_state(device_of(self.model, (args, kwargs))):
            return solve_model(self.model, inputs, self._budget, *options, starts=starts, runs_here=True)

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"_step": None, "_ready": set(), "_avoided": set()}
        return {**self.__dict__, **fresh, "_schedules": self._schedules.all}

    def __setstate__(self, state: dict[str, Any]) -> None:
        solve = None if state["_budget"] is None else self._solve
        schedules = ScheduleSet(state["model"], state["_schedules"], solve)
        super().__setstate__({**state, "_schedules": schedules})  # type: ignore[no-untyped-call]  # torch has no types for it

    def __deepcopy__(self, memo: dict[int, Any]) -> "MONeTWrapper":
        model = copy.deepcopy(self.model, memo)
        return MONeTWrapper(model, self._schedules.all, budget=self._budget, compile=self._compile, **self._options)

    def extra_repr(self) -> str:
        if self.schedule is None:
            return f"budget={self._budget}"
        return f"schedule={self.schedule.name}, budget_bytes={self.schedule.budget_bytes}"


def loaded(schedule: OneSchedule) -> Schedule:
    """A schedule, from its file or from the collection if it is named.

    Raises:
        ScheduleFileError: there is none by this name, or it can't be read.
    """
    if isinstance(schedule, Schedule):
        return schedule
    from monetlite.zoo.collection import load_schedule

    return load_schedule(schedule)


def _refuse_shards(model: nn.Module) -> None:
    """Refuse a model that `fully_shard` has been applied to inside: its hooks would have to be captured.

    Raises:
        ModelError: names the module.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ModelError(
                f"fully_shard has been applied to {name or 'the model'} inside of the wrapper, where its hooks "
                "can't be captured. Wrap first, and shard what is wrapped: fully_shard(MONeTWrapper(block, ...))"
            )


def _guard_outputs(output: Any, detached: Mapping[Any, Sequence[bool]]) -> Any:
    """Make outputs beside the loss refuse a gradient, rather than lose it in silence.

    Args:
        output: a mapping made by `detach_all_but_loss`; its items are replaced.
        detached: for each item beside the loss, by name, which of its tensors were detached.
    """
    anchor = torch.empty(0, requires_grad=True)

    def guard(path: tuple[Any, ...], item: Any) -> Any:
        if isinstance(item, torch.Tensor) and next(was_detached):
            return _RefuseGradient.apply(item, anchor, pytree.keystr(path))  # type: ignore[no-untyped-call]  # torch has no types for it
        return item

    for name, flags in detached.items():
        was_detached = iter(flags)
        output[name] = pytree.tree_map_with_path(guard, {name: output[name]})[name]
    return output


class _RefuseGradient(torch.autograd.Function):
    """The same tensor to every reader: not a view to autograd, which would refuse changes in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ModelError(
            f"a gradient reached output{ctx.name}, but a model that returns a loss is scheduled for that loss "
            "alone. Compute everything that is trained on inside the model's loss, or call .detach() on the output"
        )


class _NotAsked(Exception):
    """A program was captured other than through `_first`, so without the settings that captures need."""
