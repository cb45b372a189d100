"""`MONeTWrapper`: a module that trains like the one it wraps, by a schedule."""

import contextlib
import copy
import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from monetlite.core.costs import without_costs
from monetlite.core.errors import ModelError, ScheduleMismatch
from monetlite.core.graph import OperatorGraph
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.operators.guards import GuardFailed
from monetlite.operators.random import forked_state
from monetlite.runtime.binding import avoiding, bind, on_this_device
from monetlite.runtime.buffers import eager
from monetlite.runtime.delegation import Delegating
from monetlite.runtime.fitting import Fitting, TooLarge
from monetlite.runtime.gradient_delivery import delivering_backend
from monetlite.runtime.inputs import Schedules, layout_of
from monetlite.runtime.lowering import lower
from monetlite.runtime.outputs import guard_outputs
from monetlite.runtime.reserved_memory import warn_if_unlimited
from monetlite.tracing.build import Arguments, Traced, autocast_dtype, build_graph, device_of, on_its_gpu
from monetlite.tracing.capture import (
    Compiler,
    Joint,
    capture_settings,
    compile_step,
    program_limit,
    refuse_uninitialized,
    too_many_programs,
    training_step,
)
from monetlite.tracing.explaining import explain, own_error
from monetlite.tracing.recording import install_recorders
from monetlite.tracing.signature import tensors_in_order

PLAIN_SHARE = 0.8
"""Of the budget: what plain training may store for inputs that a schedule can't be applied to. The rest is for
workspace."""
_AMOUNT = re.compile(r"[\d.]+\s*(%|[kmgt]?i?b)", re.IGNORECASE)
_CAPTURING = threading.RLock()
"""Held while a program is made, which is not for two threads at a time."""
OneSchedule: TypeAlias = Schedule | str | PathLike[str]


class Forward:
    """The wrapped model's forward pass as an attribute: with the model's own signature, which callers look at."""

    def __get__(self, wrapper: Any, owner: type) -> Callable[..., Any]:
        if wrapper is None:
            return MONeTWrapper._forward
        call = functools.partial(wrapper._forward)
        functools.update_wrapper(call, wrapper.model.forward)
        return call


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
            (`MOST_SOLVED` times).
        options: with a budget, further arguments of `monetlite.optimize`: device, optimizer, accumulate,
            tolerance, layout, implementations, reserved, time_limit, solver, seed.
        compile: have Inductor compile what runs. The peak is then an estimate, and results differ in their last
            bits.

    Raises:
        ScheduleFileError: the file can't be read.
        ScheduleMismatch: on the first training step, if the schedule was solved for another graph (another
            model, other frozen parameters, another mode of a submodule); names the operator that differs.
        ModelError: neither a schedule nor a budget; on a training step, inputs that no schedule can serve.
        Those of `monetlite.optimize`, on a training step, with a budget.

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
        super().__init__()
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
        # Sharing the dictionaries, rather than registering the model as a child, makes names and state_dict
        # keys the model's own and keeps both views consistent whatever is replaced in either.
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = model.__dict__[shared]
        self.__dict__["model"] = model
        self.__dict__["schedule"] = given[0] if given else None
        self.__dict__["_solving"] = None if budget is None else {"budget": budget, **options}
        self.__dict__["_schedules"] = Schedules(model, given, None if budget is None else self._solve)
        self.__dict__["_fitting"] = Fitting()
        self.__dict__["training"] = model.training
        self.__dict__["_compile"] = compile
        self.__dict__["_step"] = None
        self.__dict__["_ready"] = set()
        self.__dict__["_avoided"] = set()

    forward = Forward()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        model: nn.Module = self.__dict__["model"]
        if not (model.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ModelError(
                "a scheduled training step can't be transformed by torch.func (grad, vmap, jacrev, ...): its "
                "backward pass is a program of its own. Transform the model itself: wrapper.model"
            )
        with on_its_gpu(model, (args, kwargs)):
            try:
                try:
                    output, detached = self._train(args, kwargs)
                except GuardFailed as failed:
                    # Nothing of the step has run; what the weights rule out is left out from here on.
                    self._avoid(failed.operators)
                    output, detached = self._train(args, kwargs)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                raise too_many_programs() from error
        return output if detached is None else guard_outputs(output, detached)

    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = layout_of(args, kwargs)
        if layout in self._ready:
            # Where something other than the inputs is new since the program was made (a parameter is frozen, a
            # submodule in evaluation mode, autocast on), Dynamo wants another program. Nothing has run then.
            with contextlib.suppress(torch._dynamo.exc.TorchDynamoException), program_limit():
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

    def _first(self, layout: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step with inputs of a layout not seen before, which captures and lowers it."""
        refuse_shards(self.model)
        refuse_uninitialized(self.model)
        autocast = autocast_dtype(device_of(self.model, (args, kwargs)))
        self.__dict__["schedule"] = self._schedules.find(args, kwargs, autocast)
        try:
            output = self._capture(args, kwargs)
        except (ScheduleMismatch, TooLarge):
            # The model itself has changed: other parameters are frozen, a submodule is in evaluation mode. Or
            # something other than an input's shape is larger than any schedule was solved for.
            if self._solving is None:
                raise
            self.__dict__["schedule"] = self._schedules.solve(args, kwargs)
            output = self._capture(args, kwargs)
        self._ready.add(layout)
        return output

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step for which a program has to be made."""
        with _CAPTURING:
            return self._captured(args, kwargs)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.__dict__["_example"] = (args, kwargs)
        try:
            with capture_settings():
                return self._compiled()(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = own_error(error)
            if cause is not None:
                raise cause from None
            if install_recorders(self.model, error):
                with capture_settings():
                    return self._compiled()(*args, **kwargs)
            raise explain(error) from error
        finally:
            del self.__dict__["_example"]

    def _solve(self, args: tuple[Any, ...], kwargs: dict[str, Any], starts: Sequence[Schedule]) -> Schedule:
        from monetlite.planning.pipeline import solve_model

        options = dict(self._solving)
        budget = options.pop("budget")
        # Measuring draws random numbers; the step that waits for it must not notice.
        with forked_state(device_of(self.model, (args, kwargs))):
            return solve_model(
                self.model, Arguments(args, kwargs), budget, *split_options(options), starts=starts, runs_here=True
            )

    def _partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced, steps = self._plan(joint)
        warn_if_unlimited(self.schedule, traced.graph.device)
        if self._compile:
            from monetlite.runtime.inductor import as_inductor_fuses

            steps = as_inductor_fuses(traced.graph, steps)
        return lower(traced, steps)

    def _plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step as a graph, and what is to be run of it."""
        if "_example" not in self.__dict__:
            raise _NotAsked
        example, layout = self.__dict__["_example"], self.schedule.layout
        traced = build_graph(joint, self.model, example, layout=layout, autocast=self.schedule.autocast)
        found = self._fitting_schedule(traced)
        if found is None:
            if plain := self._plain_if_smaller(traced.graph):
                return traced, plain
            return traced, bind(self.schedule, traced.graph)
        traced, steps = found
        return traced, avoiding(traced.graph, steps, self._avoided) if self._avoided else steps

    def _fitting_schedule(self, traced: Traced) -> tuple[Traced, tuple[Step, ...]] | None:
        """The steps of the first schedule for this graph that keep to its budget; None where there is none for it.

        Raises:
            TooLarge: all that are for this graph would exceed their budgets.
        """
        args, kwargs = self.__dict__["_example"]
        resident = [*self.model.parameters(), *self.model.buffers(), *tensors_in_order(self.model, args, kwargs)]
        refusal: TooLarge | None = None
        for schedule in self._schedules.serving(args, kwargs, traced.graph.autocast):
            if schedule.structure != traced.graph.structure:
                continue
            here, ported = on_this_device(traced, schedule)
            steps = bind(ported, here.graph)
            try:
                problem = self._fitting.problem(ported, here.graph, steps, resident)
            except TooLarge as error:
                refusal = refusal or error
                continue
            if problem:
                warnings.warn(problem, stacklevel=2)
            self.__dict__["schedule"] = schedule
            return here, steps
        if refusal is not None:
            raise refusal
        return None

    def _plain_if_smaller(self, graph: OperatorGraph) -> tuple[Step, ...] | None:
        """What plain training runs, where inputs are so small that torch runs other operators on them.

        A batch or a sequence of one is not always computed as several are. Nothing has to be recomputed for it, if
        what it stores is well within the budget.
        """
        schedule = self.schedule
        found, expected = ([item.shape for item in of.inputs.values()] for of in (graph, schedule))
        steps = plain_steps(graph)
        peak_bytes = simulate(without_costs(graph), steps).peak_bytes
        if found == expected or peak_bytes > PLAIN_SHARE * schedule.budget_bytes:
            return None
        warnings.warn(
            f"for inputs of shapes {', '.join(map(str, found))} this model runs other operators than its schedule "
            f"is for (as for a batch or a sequence of one). They run as in plain training, which stores "
            f"{format_bytes(peak_bytes)} of the {format_bytes(schedule.budget_bytes)} budgeted",
            stacklevel=2,
        )
        return steps

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

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_step"], state["_ready"], state["_avoided"] = None, set(), set()
        state["_schedules"], state["_fitting"] = self._schedules.all, Fitting()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        solve = None if state["_solving"] is None else self._solve
        schedules = Schedules(state["model"], state["_schedules"], solve)
        super().__setstate__({**state, "_schedules": schedules})  # type: ignore[no-untyped-call]  # torch has no types for it

    def __deepcopy__(self, memo: dict[int, Any]) -> "MONeTWrapper":
        return MONeTWrapper(
            copy.deepcopy(self.model, memo), self._schedules.all, compile=self._compile, **(self._solving or {})
        )

    def extra_repr(self) -> str:
        if self.schedule is None:
            return f"budget={self._solving['budget']}"
        return f"schedule={self.schedule.name}, budget_bytes={self.schedule.budget_bytes}"


def loaded(schedule: OneSchedule) -> Schedule:
    """A schedule, from its file or from the collection if it is named.

    Raises:
        ScheduleFileError: there is none by this name, or it can't be read.
    """
    if isinstance(schedule, Schedule):
        return schedule
    from monetlite.zoo import load_schedule

    return load_schedule(schedule)


def refuse_shards(model: nn.Module) -> None:
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


class _NotAsked(Exception):
    """A program was captured other than through `_first`, so without the settings that captures need."""
