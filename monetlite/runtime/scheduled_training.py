"""Training by schedules: the core that `MONeTWrapper` and `within` stand in front of.

A training step, in the order of this file: `__call__` finds a program for the inputs, or has one made (`_first`).
For that, a schedule is found or solved for, and the step is captured as one graph. `partition` turns the graph into
two programs, forward and backward, by the schedule's steps (`plan`). The programs run, and gradients reach autograd
as they become ready (`gradient_delivery`).

With a budget, the first schedule is found within seconds of the capture. A better one is looked for beside
training, and its programs take the place of the first between two steps (`_refine`).

A schedule also serves other sizes than it was solved for, and its structure says nothing of sizes: a number that
the forward pass reads, an attribute, or tensors inside of an object can make a step larger though no input is. So
the peak of every captured step is predicted and compared with the budget.
"""

import contextlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx, nn

from monetlite.core.binding import bind, lacking
from monetlite.core.errors import ModelError, ScheduleMismatch, TraceError
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes, parse_budget
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import is_transformed, without_modes
from monetlite.fx.torch_internals.torch_dynamo import REFUSALS, FailOnRecompileLimitHit, allow_programs
from monetlite.operators.cudnn import with_named_plans
from monetlite.operators.program_calls import GuardFailed
from monetlite.operators.random import forked_state
from monetlite.runtime.announcing import planned, tell
from monetlite.runtime.buffers import eager
from monetlite.runtime.gradient_delivery import CapturedStep, delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.pieces import PLANNING_SHARE, PiecewiseTraining
from monetlite.runtime.reserved_memory import warn_if_unlimited
from monetlite.runtime.serving import (
    TooLarge,
    as_passed,
    input_signature,
    own_bytes,
    plain_if_smaller,
    serving_problem,
    shapes_of,
    size_served,
    values_bytes,
    without_guards,
)
from monetlite.tracing.capture import (
    MAX_PROGRAMS,
    Compiler,
    Joint,
    compile_step,
    copied,
    refuse_uninitialized,
    run_captured,
    too_many_programs,
    training_step,
)
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.step_inputs import (
    Arguments,
    autocast_dtype,
    device_of,
    on_its_gpu,
    tensor_arguments,
    tensors_in_order,
)

if TYPE_CHECKING:
    from monetlite.planning.beside_training import PlanningBesideTraining

MANY_SOLVED = 8
"""Schedules that are solved for one model at training time, before a person is told how to need fewer."""
_AMOUNT = re.compile(r"[\d.,]+\s*(%|b|[kmgt]i?b?)", re.IGNORECASE)
_refining = threading.Lock()
OneSchedule: TypeAlias = Schedule | str | PathLike[str]


@dataclass
class _PlannedStep:
    """A captured step whose programs may be exchanged: its graph, in each layout, and the schedule it runs by."""

    traced: Mapping[str, Traced]
    schedule: Schedule
    resident_bytes: int
    step: CapturedStep | None = None


class ScheduledTraining:
    """The training steps of one model, by its schedules.

    A schedule solved for some inputs also serves smaller ones: a smaller batch, a shorter sequence. Of those that
    serve a step, the one for the smallest inputs is taken. If none does, one is solved for, within the budget if
    there is one.

    Workspace of a captured graph is not known. Once the graph that a schedule was solved for has been captured, its
    workspace there is assumed for other sizes too; before, none is counted.

    Attributes:
        model: the module.
        schedules: all of them, those for the smallest inputs first.
        schedule: the one in use; None before the first is solved.
        budget, compile, options: see `MONeTWrapper`.
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
        if isinstance(schedule, str) and budget is None and _AMOUNT.fullmatch(schedule.strip()):
            raise ModelError(
                f"{schedule!r} stands where a schedule goes; give a budget by its name: budget={schedule!r}"
            )
        if budget is not None:
            parse_budget(budget, plain_peak_bytes=2**40)
        several = schedule if isinstance(schedule, Sequence) and not isinstance(schedule, str) else (schedule,)
        given = [loaded(item) for item in several]
        if not given and budget is None:
            raise ModelError("give a schedule, or a budget to solve one for: budget='6GB'")
        _, solving = split_options(options)
        if options and budget is None:
            raise ModelError(f"{min(options)!r} is an option of solving, which needs a budget")
        self.model = model
        self.schedules = sorted(given, key=size_served)
        self.schedule = given[0] if given else None
        self.budget, self.compile, self.options = budget, compile, options
        self.whole = whole
        # Inductor's programs and what the allocator reserves are too costly to plan twice.
        self.wait = wait or compile or solving.reserved
        self._solved = 0
        self._pieces: PiecewiseTraining | None = None  # if it can't be captured whole
        self._planning: PlanningBesideTraining | None = None
        self._planned: list[_PlannedStep] = []  # captured steps that run by the schedule which is being bettered
        self._border = time.monotonic()  # when the last step began
        self._captured = True  # the last step was captured, so its time says nothing
        self._workspace_bytes: dict[tuple[str, int], int] = {}
        self._example: Arguments | None = None  # of the step that is being captured
        self._warned_of_shapes = False
        self._autocast = ""  # dtype of the step that is being captured
        self._avoided: set[str] = set()  # operators whose guarded implementations are not used
        self._forget()

    def _forget(self) -> None:
        """Have programs made anew."""
        self._step: Callable[..., Any] | None = None  # the compiled training step
        self._ready: set[object] = set()  # signatures of inputs that it has a program for

    def __getstate__(self) -> dict[str, Any]:
        forgotten: dict[str, Any] = {
            "_step": None,
            "_ready": set(),
            "_planning": None,
            "_planned": [],
            "_example": None,
            "_pieces": None,
        }
        return {**vars(self), **forgotten, "_avoided": set(), "_solved": 0}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a training step, whose backward pass autograd runs.

        Raises:
            The errors of `MONeTWrapper`.
        """
        if is_transformed():
            raise ModelError(
                "a scheduled training step can't be transformed by torch.func (grad, vmap, jacrev, ...): its "
                "backward pass is a program of its own. Transform the model itself: wrapper.model, or the model "
                "after monetlite.release(model)"
            )
        with on_its_gpu(self.model, (args, kwargs)):
            if self._planning is not None:
                self._refine()
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
        if self._pieces is not None:
            return self._in_pieces(Arguments(args, kwargs))
        signature = input_signature(args, kwargs)
        if signature in self._ready:
            # Where something other than the inputs is new since the program was made (a parameter is frozen, a
            # submodule in evaluation mode, autocast on), Dynamo wants another program. Nothing has run then.
            with contextlib.suppress(*REFUSALS), allow_programs(MAX_PROGRAMS):
                return self._compiled()(*args, **kwargs)
        return self._first(signature, args, kwargs)

    def _first(self, signature: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step for inputs of a new signature, which captures and lowers it."""
        if len({shapes_of(known) for known in self._ready}) >= MAX_PROGRAMS:
            self._forget()  # Dynamo keeps no more
            self._warn_of_shapes()
        _refuse_shards(self.model)
        refuse_uninitialized(self.model)
        self._autocast = autocast = autocast_dtype(device_of(self.model, (args, kwargs)))
        call = Arguments(args, kwargs)
        serving = self._serving(call, autocast)
        if not serving and self.budget is None:
            tensors = tensors_in_order(self.model, *call)
            names = tensor_arguments(self.model, *call)
            raise ModelError(serving_problem(self.schedules[-1], tensors, autocast, names) or "")
        if serving:
            self.schedule = serving[0]
            try:
                output = self._capture(call)
            except (ScheduleMismatch, TooLarge):
                # The model itself has changed: other parameters are frozen, a submodule is in evaluation mode. Or
                # something other than an input's shape is larger than any schedule was solved for.
                if self.budget is None:
                    raise
                output = self._solve_and_capture(call)
        else:
            output = self._solve_and_capture(call)
        self._ready.add(signature)
        return output

    def _warn_of_shapes(self) -> None:
        if not self._warned_of_shapes:
            self._warned_of_shapes = True
            warnings.warn(
                f"inputs came in more than {MAX_PROGRAMS} shapes. Each is compiled when it comes, for seconds, "
                f"and after {MAX_PROGRAMS} all are compiled anew; pad to fewer (pad_to_multiple_of)",
                stacklevel=6,
            )

    def _solve_and_capture(self, call: Arguments) -> Any:
        """Run a step for which a schedule has to be found, too."""
        if self._solved == MANY_SOLVED:
            warnings.warn(
                f"{MANY_SOLVED} schedules have been solved, each for larger inputs than any before; begin with the "
                "largest, whose schedule serves all, or pad to a few sizes (pad_to_multiple_of in the collator)",
                stacklevel=6,
            )
        try:
            self.schedule = self._solve(call) if self.wait else None
            return self._capture(call)
        except TraceError as error:
            if self.whole or self.compile or split_options(self.options)[1].reserved:
                raise
            assert self.budget is not None
            self._pieces = PiecewiseTraining(self.model, self.budget, self.options, self.wait, error)
        try:
            return self._in_pieces(call)
        except BaseException:
            self._pieces = None  # the model may well be captured whole on other inputs
            raise

    def _in_pieces(self, call: Arguments) -> Any:
        """Run a step of a model that can't be captured whole."""
        assert self._pieces is not None
        output = self._pieces(call.args, call.kwargs)
        self.schedule = self._pieces.schedule
        return output

    def _capture(self, call: Arguments) -> Any:
        """Run a step for which a program has to be made."""
        with patched():  # by one thread at a time
            self._example, self._captured, self._border = call, True, time.monotonic()
            try:
                return run_captured(self.model, lambda: self._compiled()(*call.args, **call.kwargs))
            finally:
                self._example = None

    def _compiled(self) -> Callable[..., Any]:
        if self._step is None:
            self._step = compile_step(
                training_step(self.model), delivering_backend(self._partition, self.compiler(), self._keep)
            )
        return self._step

    def compiler(self) -> Compiler:
        if not self.compile:
            return eager
        from monetlite.runtime.inductor import inductor

        return inductor

    def _partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced, steps = self.plan(joint)
        if self.compile:
            from monetlite.runtime.inductor import as_inductor_fuses

            steps = as_inductor_fuses(traced.graph, steps)
        return lower(traced, steps)

    def build(self, joint: Joint, layout: str) -> tuple[Traced, Arguments]:
        """The captured step as a graph, and the inputs that it was captured with."""
        if self._example is None:
            raise _NotAsked
        built = build_graph(joint, self.model, self._example, layout=layout, autocast=self._autocast)
        return built, self._example

    def plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step as a graph, and the steps to run of it, by the first schedule that keeps to its budget.

        Raises:
            TooLarge: every schedule for this graph would exceed its budget.
            ScheduleMismatch: all are for other graphs.
        """
        found = self.schedule
        if found is None:
            return self._plan_at_once(joint)
        traced, call = self.build(joint, found.layout)
        resident_bytes, refusal = self._resident_bytes(call), None
        for schedule in self._serving(call, traced.graph.autocast):
            if schedule.structure == traced.graph.structure:
                try:
                    fitted, steps = self.fit(traced, schedule, resident_bytes)
                except TooLarge as error:
                    refusal = refusal or error
                    continue
                self.schedule = schedule
                self._remember({schedule.layout: traced}, schedule, resident_bytes)
                return fitted, without_guards(fitted.graph, steps, self._avoided)
        if refusal is not None:
            raise refusal
        if plain := plain_if_smaller(found, traced.graph):
            return traced, plain
        traced, steps = self.fit(traced, found, resident_bytes)
        return traced, without_guards(traced.graph, steps, self._avoided)

    def _plan_at_once(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step, and the steps to run of it by a schedule found within seconds."""
        from monetlite.planning.beside_training import PlanningBesideTraining
        from monetlite.planning.budgets import layouts_to_try
        from monetlite.planning.pipeline import unplanned_loss

        assert self.budget is not None
        assert self._example is not None
        pricing, solving = split_options(self.options)
        layouts = layouts_to_try(pricing.layout, solving.tolerance)
        # Building a graph changes the joint graph, which every layout begins from.
        joints = [joint, *(copied(joint) for _ in layouts[1:])]
        traced = {layout: self.build(own, layout)[0] for own, layout in zip(joints, layouts, strict=True)}
        graphs = {layout: item.graph for layout, item in traced.items()}
        # Compiling makes fake tensors of what is computed meanwhile; operators are measured on real ones. Measuring
        # draws random numbers; the step that waits for it must not notice.
        with without_modes(), forked_state(device_of(self.model, self._example)), interrupts_kept():
            operators = graphs[layouts[0]].traced_count
            tell(f"captured {operators} operators in {time.monotonic() - self._border:.1f} s; planning")
            planning = PlanningBesideTraining(list(graphs.values()), self.budget, pricing, solving)
            schedule = planning.first()
        if outside := unplanned_loss(graphs[layouts[0]], schedule.budget_bytes):
            warnings.warn(outside, stacklevel=3)
        self._solved += 1
        self.schedules = sorted([schedule, *self.schedules], key=size_served)
        self.schedule = schedule
        self._planning, self._planned = (None if planning.finished else planning), []
        more = "" if planning.finished else "; looking for a better plan beside training"
        tell(f"plan: {planned(schedule)}{more}")
        resident_bytes = self._resident_bytes(self._example)
        self._remember(traced, schedule, resident_bytes)
        fitted, steps = self.fit(traced[schedule.layout], schedule, resident_bytes)
        return fitted, without_guards(fitted.graph, steps, self._avoided)

    def _remember(self, traced: Mapping[str, Traced], schedule: Schedule, resident_bytes: int) -> None:
        """Note a step that is being captured, if its programs may be exchanged."""
        if self._planning is not None:
            self._planned.append(_PlannedStep(traced, schedule, resident_bytes))

    def _keep(self, step: CapturedStep) -> None:
        """Note the programs of the step that was captured last."""
        if self._planned and self._planned[-1].step is None:
            self._planned[-1].step = step

    def _refine(self) -> None:
        """Go on planning for a part of the last step's time, and take a better schedule if there is one."""
        planning, now = self._planning, time.monotonic()
        if planning is None or not _refining.acquire(blocking=False):
            return
        try:
            with forked_state(device_of(self.model, ())):
                better = planning.advance(0.0 if self._captured else PLANNING_SHARE * (now - self._border))
            if better is not None and self._exchange(better):
                planning.told.append(f"better plan, from this step on: {planned(better)}")
            while planning.told:
                tell(planning.told.pop(0))
            if planning.finished:
                self._planning, self._planned = None, []
        finally:
            self._border, self._captured = time.monotonic(), False
            _refining.release()

    def _exchange(self, better: Schedule) -> bool:
        """Run captured steps by another schedule from here on, where it serves them; False if it serves none."""
        done = False
        for item in self._planned:
            traced, before = item.traced.get(better.layout), item.schedule
            if traced is None or item.step is None:
                continue
            try:
                fitted, steps = self.fit(traced, better, item.resident_bytes)
            except (ScheduleMismatch, TooLarge):
                continue
            item.step.exchange(*lower(fitted, without_guards(fitted.graph, steps, self._avoided)))
            self.schedules = [better if known is before else known for known in self.schedules]
            self.schedule = better if self.schedule is before else self.schedule
            item.schedule, done = better, True
        return done

    def _resident_bytes(self, call: Arguments) -> int:
        """Bytes of the model's tensors and of a call's."""
        return own_bytes([*self.model.parameters(), *self.model.buffers(), *as_passed(*call)])

    def fit(self, traced: Traced, schedule: Schedule, resident_bytes: int) -> tuple[Traced, tuple[Step, ...]]:
        """The steps of a schedule on a captured step, by implementations that exist on this device.

        Args:
            traced: the captured step.
            schedule: for its graph.
            resident_bytes: of the model's tensors, and of those that the step is called with.

        Raises:
            ScheduleMismatch: the schedule is for another graph, or not legal on this one.
            TooLarge: the steps would exceed its budget.
        """
        if schedule.structure == traced.graph.structure:
            # Skips implementations whose tolerance is wider than the schedule's.
            allowed = traced.graph.available(traced.graph.device).restricted(
                lambda item: item.tolerance <= schedule.tolerance
            )
            graph, choices = with_named_plans(allowed, schedule.choices)
            traced, schedule = replace(traced, graph=graph), replace(schedule, choices=choices)
        graph = traced.graph
        warn_if_unlimited(schedule, graph.device)
        steps = bind(schedule, graph)
        key = (schedule.fingerprint, schedule.peak_bytes)
        peak_bytes = values_bytes(schedule, graph, steps) + resident_bytes
        if graph.fingerprint == schedule.fingerprint:
            self._workspace_bytes[key] = max(0, schedule.peak_bytes - peak_bytes)
            return traced, steps
        peak_bytes += self._workspace_bytes.get(key, 0)
        # `bind` has warned of steps that run by default because this device lacks implementations.
        if peak_bytes <= schedule.peak_bytes or lacking(schedule, graph):
            return traced, steps
        problem = (
            f"by the schedule of {schedule.name} this step takes at least {format_bytes(peak_bytes)} "
            f"({peak_bytes} bytes), where {format_bytes(schedule.peak_bytes)} were predicted and "
            f"{format_bytes(schedule.budget_bytes)} ({schedule.budget_bytes} bytes) are the budget. It was solved "
            "for other sizes than the model has with these inputs: a number or flag that the forward pass reads, "
            "tensors inside of objects, or an attribute or a layer of the model"
        )
        if peak_bytes > schedule.budget_bytes:
            raise TooLarge(f"{problem}. Solve a schedule for these inputs and the model as it is, or give a budget")
        warnings.warn(problem, stacklevel=2)
        return traced, steps

    def _serving(self, call: Arguments, autocast: str) -> list[Schedule]:
        """The schedules that can serve a call's inputs, those for the smallest inputs first."""
        # Files written before inputs were put into the signature's order have them as they were passed.
        orders = [tensors_in_order(self.model, *call), as_passed(*call)]
        return [
            schedule
            for schedule in self.schedules
            if any(serving_problem(schedule, tensors, autocast) is None for tensors in orders)
        ]

    def _avoid(self, operators: Sequence[str]) -> None:
        """Make another program, without those operators' guarded implementations, for the steps to come."""
        self._avoided.update(operators)
        self._forget()
        listed = ", ".join(operators[:3]) + (f" and {len(operators) - 3} more" if len(operators) > 3 else "")
        warnings.warn(
            f"the weights of {listed} are zero, or too small beside their biases, to take the gradient of the "
            "normalisation from its output as the schedule says; it is taken from the input from here on, which "
            "is kept for that: the peak may be higher than predicted by its size. To hold the budget, solve "
            "again with a tolerance below 1e-4",
            stacklevel=5,
        )

    def _solve(self, call: Arguments) -> Schedule:
        """Solve for a call's inputs and the model as it is, beginning from the other schedules.

        Raises:
            Those of `monetlite.optimize`.
        """
        from monetlite.planning.pipeline import solve_model

        assert self.budget is not None
        options = split_options(self.options)
        # Measuring draws random numbers; the step that waits for it must not notice.
        with forked_state(device_of(self.model, call)):
            solved = solve_model(self.model, call, self.budget, *options, starts=self.schedules, runs_here=True)
        self._solved += 1
        self.schedules = sorted([solved, *self.schedules], key=size_served)
        return solved


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
