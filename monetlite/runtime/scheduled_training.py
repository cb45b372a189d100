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
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError, MonetliteError, ScheduleMismatch, TraceError
from monetlite.core.graph import LOSS_ONLY
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes, parse_budget
from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import is_transformed, without_modes
from monetlite.fx.torch_internals.torch_dynamo import REFUSALS, FailOnRecompileLimitHit, allow_programs
from monetlite.fx.varying_sizes import input_sizes
from monetlite.operators.program_calls import GuardFailed
from monetlite.operators.random import forked_state
from monetlite.runtime.announcing import planned, tell
from monetlite.runtime.buffers import eager
from monetlite.runtime.call_sizes import CallSizes
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.gradient_delivery import CapturedStep, Unplanned, delivering_backend
from monetlite.runtime.guarded_outputs import guard_outputs
from monetlite.runtime.lowering import lower
from monetlite.runtime.outside_loss import OutsideLoss
from monetlite.runtime.pieces import PiecewiseTraining
from monetlite.runtime.refinement import PlannedStep, Refinement, StepClock
from monetlite.runtime.serving import (
    TooLarge,
    as_passed,
    own_bytes,
    plain_if_smaller,
    serving_problem,
    shapes_of,
    size_served,
)
from monetlite.runtime.varying_step import MAX_LIMITS, Limits, VaryingStep, is_of_any_size, of_any_size
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
from monetlite.tracing.operator_graph import Traced, build_graph, in_layouts
from monetlite.tracing.step_inputs import (
    Arguments,
    autocast_dtype,
    device_of,
    on_its_gpu,
    tensor_arguments,
    tensors_in_order,
)

MANY_SOLVED = 8
"""Schedules that are solved for one model at training time, before a person is told how to need fewer."""
_AMOUNT = re.compile(r"[\d.,]+\s*(%|b|[kmgt]i?b?)", re.IGNORECASE)
_planning = threading.Lock()
OneSchedule: TypeAlias = Schedule | str | PathLike[str]


class ScheduledTraining:
    """The training steps of one model, by its schedules.

    A schedule solved for some inputs also serves smaller ones: a smaller batch, a shorter sequence. Of those that
    serve a step, the one for the smallest inputs is taken. If none does, one is solved for, within the budget if
    there is one.

    Attributes:
        model: the module.
        schedules: all of them, those for the smallest inputs first.
        schedule: the one in use; None before the first is solved.
        outputs: that the caller gets of a model with a loss: `loss` or `all`.
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
        if given and budget is not None:
            options = {"outputs": given[0].outputs, **options}
        self.outputs = options.get("outputs") or (given[0].outputs if given else LOSS_ONLY)
        self.model = model
        self.schedules = sorted(given, key=size_served)
        self.schedule = given[0] if given else None
        self.budget, self.compile, self.options = budget, compile, options
        self.whole = whole
        # Inductor's programs and what the allocator reserves are too costly to plan twice.
        self.wait = wait or compile or solving.reserved
        self._solved = 0
        self._begin()

    def _begin(self) -> None:
        """Know nothing of steps."""
        self._pieces: PiecewiseTraining | None = None  # if it can't be captured whole
        self._refinement: Refinement | None = None  # of the schedule in use
        self._outside = OutsideLoss()
        self._clock = StepClock()
        self._sizes = CallSizes()
        self._fitting = Fitting()
        self._example: Arguments | None = None  # of the step that is being captured
        self._autocast = ""  # dtype of the step that is being captured
        self._warned_of_shapes = False
        self._forget()

    def _forget(self) -> None:
        """Have programs made anew."""
        self._step: Callable[..., Any] | None = None  # the compiled training step
        self._ready: set[object] = set()  # signatures of inputs that it has a program for
        self._varying: dict[CapturedStep, VaryingStep] = {}
        self._new_varying: tuple[VaryingStep, Limits] | None = None  # the one that is being captured

    def __getstate__(self) -> dict[str, Any]:
        known = "model schedules schedule budget compile options outputs whole wait"
        return {name: getattr(self, name) for name in known.split()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._solved = 0
        self._begin()

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
        call = Arguments(args, kwargs)
        with on_its_gpu(self.model, (args, kwargs)):
            self._count_loss()
            self._between_steps()
            try:
                output, detached = self._train_as_planned(call)
            except FailOnRecompileLimitHit as error:
                raise too_many_programs() from error
            self._note_schedule()
            if detached is None and self.schedule is not None and self._pieces is None:
                from monetlite.planning.pipeline import noteworthy_bytes

                least_bytes = noteworthy_bytes(self.schedule.budget_bytes)
                self._outside.forward_ends(output, device_of(self.model, tuple(call)), least_bytes)
        return output if detached is None else guard_outputs(output, detached)

    def _count_loss(self) -> None:
        """Count what a loss outside of the model was found to take, and plan again if that breaks the budget."""
        found, schedule = self._outside.measured(), self.schedule
        if found is None or schedule is None:
            return
        peak_bytes = max(self._outside.peak_bytes(), schedule.peak_bytes)
        if peak_bytes <= schedule.budget_bytes:
            return
        problem = (
            f"with the loss outside of the model, this step takes at least {format_bytes(peak_bytes)}, over the "
            f"budget of {format_bytes(schedule.budget_bytes)}"
        )
        if self.budget is None:
            warnings.warn(
                f"{problem}. The schedule can't count it; give a budget in its place, "
                f"budget='{format_bytes(schedule.budget_bytes)}', or have the model return its loss",
                stacklevel=4,
            )
            return
        tell(f"{problem}; planning again")
        self.schedules = []  # none of them counts the loss
        self._refinement = None
        self._forget()

    def _note_schedule(self) -> None:
        """Note the schedule of a step whose sizes vary: each step has the one for its sizes."""
        for captured, step in self._varying.items():
            if captured.last_sizes:
                self.schedule = step.schedules[captured.limits_for(captured.last_sizes)]

    def _train_as_planned(self, call: Arguments) -> Any:
        """Run a step, and once more where it ended before anything of it had run, with what was missing."""
        try:
            return self._train(call)
        except Unplanned as unplanned:
            self._plan_sizes(unplanned, call)
            return self._train_as_planned(call)
        except GuardFailed as failed:
            # Implementations that the weights rule out are not used again.
            self._fitting.avoid(failed.operators)
            self._forget()
            return self._train(call)

    def _train(self, call: Arguments) -> Any:
        if self._pieces is not None:
            return self._in_pieces(call)
        if self._sizes.signature(call) in self._ready:
            # Where something other than the inputs is new since the program was made (a parameter is frozen, a
            # submodule in evaluation mode, autocast on), Dynamo wants another program. Nothing has run then.
            with contextlib.suppress(*REFUSALS), allow_programs(MAX_PROGRAMS):
                return self._compiled()(*call.args, **call.kwargs)
        return self._first(call)

    def _first(self, call: Arguments) -> Any:
        """Run a step for inputs of a new signature, which captures and lowers it."""
        if not self.compile:
            self._sizes.note(call)
        if len({shapes_of(known) for known in self._ready}) >= MAX_PROGRAMS:
            self._forget()  # Dynamo keeps no more
            self._warn_of_shapes()
        _refuse_shards(self.model)
        refuse_uninitialized(self.model)
        self._autocast = autocast_dtype(device_of(self.model, tuple(call)))
        serving = self._serving(call, self._autocast)
        if not serving and self.budget is None:
            raise self._unserved(call)
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
        self._ready.add(self._sizes.signature(call))
        return output

    def _unserved(self, call: Arguments) -> ModelError:
        tensors, names = tensors_in_order(self.model, *call), tensor_arguments(self.model, *call)
        return ModelError(serving_problem(self.schedules[-1], tensors, self._autocast, names) or "")

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

        def run() -> Any:
            return run_captured(self.model, lambda: self._compiled()(*call.args, **call.kwargs))

        with patched():  # by one thread at a time
            self._example = call
            self._clock.goes_on()
            self._clock.skip()
            try:
                with self._sizes.asked_to_vary(call) as asked:
                    try:
                        return run()
                    except TraceError as error:
                        if not asked:
                            raise
                        self._sizes.fix(str(error))
                return run()
            finally:
                self._example = None

    def _compiled(self) -> Callable[..., Any]:
        if self._step is None:
            backend = delivering_backend(self._partition, self.compiler(), self._keep)
            self._step = compile_step(training_step(self.model, self.outputs), backend)
        return self._step

    def compiler(self) -> Compiler:
        if not self.compile:
            return eager
        from monetlite.runtime.inductor import inductor

        return inductor

    def _partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced, steps = self.plan(joint)
        self._outside.planned(traced.graph, steps)
        if self.compile:
            from monetlite.runtime.inductor import as_inductor_fuses

            steps = as_inductor_fuses(traced.graph, steps)
        return lower(traced, steps)

    def build(self, joint: Joint, layout: str) -> tuple[Traced, Arguments]:
        """The captured step as a graph, and the inputs that it was captured with."""
        if self._example is None:
            raise _NotAsked
        return self._build(joint, self._example, layout), self._example

    def _build(self, joint: Joint, call: Arguments, layout: str) -> Traced:
        return build_graph(joint, self.model, call, layout=layout, autocast=self._autocast, outputs=self.outputs)

    def plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step as a graph, and the steps to run of it, by the first schedule that keeps to its budget.

        Raises:
            TooLarge: every schedule for this graph would exceed its budget.
            ScheduleMismatch: all are for other graphs.
        """
        if input_sizes(joint.graph.graph):
            return self._plan_varying(joint)
        if self._sizes.asked:
            self._sizes.fix("the model's code depends on them")
        found = self.schedule
        if found is None:
            return self._plan_at_once(joint)
        traced, call = self.build(joint, found.layout)
        resident_bytes, refusal = self._resident_bytes(call), None
        for schedule in self._serving(call, traced.graph.autocast):
            if schedule.structure == traced.graph.structure:
                try:
                    fitted = self._fitting.fit(traced, schedule, resident_bytes)
                except TooLarge as error:
                    refusal = refusal or error
                    continue
                self._use(schedule, {schedule.layout: traced}, resident_bytes)
                return fitted
        if refusal is not None:
            raise refusal
        if plain := plain_if_smaller(found, traced.graph):
            return traced, plain
        return self._fitting.fit(traced, found, resident_bytes)

    def _plan_at_once(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step, and the steps to run of it by a schedule found within seconds."""
        from monetlite.planning.budgets import layouts_to_try

        assert self.budget is not None
        assert self._example is not None
        pricing, solving = split_options(self.options)
        layouts = layouts_to_try(pricing.layout, solving.tolerance)
        traced = {layout: self.build(own, layout)[0] for layout, own in in_layouts(joint, layouts).items()}
        return self._first_plan(traced, self._example, self.budget)

    def _first_plan(
        self,
        traced: Mapping[str, Traced],
        call: Arguments,
        budget: str | int | float,
        limits: Limits = (),
        *,
        settle: bool = True,
    ) -> tuple[Traced, tuple[Step, ...]]:
        """A step, and the steps to run of it by a schedule found within seconds.

        Args:
            traced: the step in each layout.
            call: for which it is planned.
            budget: of the step.
            limits: the sizes that the plan serves, where they vary.
            settle: whether to take all the time that is needed if nothing is found within seconds.
        """
        from monetlite.planning.beside_training import PlanningBesideTraining

        pricing, solving = split_options(self.options)
        graphs = [item.graph for item in traced.values()]
        # Compiling makes fake tensors of what is computed meanwhile; operators are measured on real ones. Measuring
        # draws random numbers; the step that waits for it must not notice.
        with without_modes(), forked_state(device_of(self.model, tuple(call))), interrupts_kept():
            if self._example is not None:
                tell(f"captured {graphs[0].traced_count} operators in {self._clock.seconds:.1f} s; planning")

            def whole(profiles: list[Profile]) -> list[Profile]:
                return [self._outside.counted(of_any_size(item) if limits else item) for item in profiles]

            planning = PlanningBesideTraining(graphs, budget, pricing, solving, whole)
            schedule = planning.first(settle=settle)
        self._solved += 1
        self.schedules = sorted([schedule, *self.schedules], key=size_served)
        # A plan for smaller inputs than another one's is good enough as it is.
        bettered = not planning.finished and (not limits or schedule is self.schedules[-1])
        if bettered:
            self._refinement = Refinement(planning, schedule, self._fitting)
        sizes = f" for sizes up to {' x '.join(map(str, limits))}" if limits else ""
        tell(f"plan{sizes}: {planned(schedule)}{'; looking for a better plan beside training' if bettered else ''}")
        resident_bytes = self._resident_bytes(call)
        self._use(schedule, traced, resident_bytes, limits)
        return self._fitting.fit(traced[schedule.layout], schedule, resident_bytes)

    def _use(
        self, schedule: Schedule, traced: Mapping[str, Traced], resident_bytes: int, limits: Limits = ()
    ) -> None:
        """Note the schedule of a step that is being planned, whose programs may be exchanged."""
        self.schedule = schedule
        if self._refinement is not None:
            self._refinement.remember(PlannedStep(traced, schedule, resident_bytes, limits))

    def _keep(self, step: CapturedStep) -> None:
        """Note the programs of the step that was captured last."""
        self._outside.keep(step)
        if self._new_varying is not None:
            (varying, limits), self._new_varying = self._new_varying, None
            self._varying[step] = varying
            step.serve(step.current, limits)
        if self._refinement is not None:
            self._refinement.keep(step)

    def _between_steps(self) -> None:
        """Go on planning, in one thread at a time."""
        if (self._refinement is None and not self._varying) or not _planning.acquire(blocking=False):
            return
        try:
            seconds = self._clock.border()
            for captured, step in self._varying.items():
                self._plan_smaller(captured, step, seconds)
            if self._refinement is not None:
                with forked_state(device_of(self.model, ())):
                    taken = self._refinement.advance(seconds)
                if taken is not None:
                    self._replace(*taken)
                if self._refinement.finished:
                    self._refinement = None
            self._clock.goes_on()
        finally:
            _planning.release()

    def _replace(self, before: Schedule, better: Schedule) -> None:
        """Have a better schedule in the place of another."""
        self.schedules = [better if known is before else known for known in self.schedules]
        self.schedule = better if self.schedule is before else self.schedule
        for step in self._varying.values():
            step.schedules = {
                limits: better if known is before else known for limits, known in step.schedules.items()
            }

    def _plan_varying(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """A captured step whose sizes vary, at sizes that serve its call, and the steps to run of it."""
        call = self._example
        if call is None:
            raise _NotAsked
        step, began = VaryingStep(joint, call, self._sizes.varying(call), self._build), time.monotonic()
        traced, steps, limits = self._planned_at(step, step.captured, call)
        step.planned(time.monotonic() - began, [limits])
        self._new_varying = step, limits
        return traced, steps

    def _planned_at(
        self, step: VaryingStep, sizes: Limits, call: Arguments
    ) -> tuple[Traced, tuple[Step, ...], Limits]:
        """A step at sizes that serve a call's, the steps to run of it, and the sizes that they serve.

        Raises:
            ModelError: no schedule serves the call, and there is no budget to solve for.
            TraceError: the step can't be planned for several sizes.
        """
        serving = self._serving(call, self._autocast)
        if not serving and self.budget is None:
            raise self._unserved(call)
        if not serving and self.wait:
            serving = [self._solve(call)]
        for schedule in filter(is_of_any_size, serving):
            limits = step.limits_of(schedule, call, self._order(schedule, call))
            traced = step.traced_at(limits, schedule.layout)
            resident_bytes = self._resident_bytes(step.example_at(limits))
            with contextlib.suppress(ScheduleMismatch, TooLarge):
                fitted = self._fitting.fit(traced, schedule, resident_bytes)
                step.schedules[limits] = schedule
                self._use(schedule, {schedule.layout: traced}, resident_bytes, limits)
                return *fitted, limits
        if serving or self.budget is None:
            raise TraceError("no schedule is for the step at other sizes")
        limits = step.roomy(sizes)
        if limits != sizes:
            with contextlib.suppress(InfeasibleBudget, TraceError):
                return *self._plan_at(step, limits, self.budget, settle=False), limits
        return *self._plan_at(step, sizes, self.budget), sizes

    def _plan_at(
        self, step: VaryingStep, limits: Limits, budget: str | int | float, *, settle: bool = True
    ) -> tuple[Traced, tuple[Step, ...]]:
        """A step at these sizes, and the steps to run of it by a schedule found within seconds."""
        from monetlite.planning.budgets import layouts_to_try

        pricing, solving = split_options(self.options)
        traced = step.in_layouts(limits, layouts_to_try(pricing.layout, solving.tolerance))
        planned_step = self._first_plan(traced, step.example_at(limits), budget, limits, settle=settle)
        assert self.schedule is not None
        step.schedules[limits] = self.schedule
        return planned_step

    def _plan_sizes(self, unplanned: Unplanned, call: Arguments) -> None:
        """Plan a captured step for larger sizes than before, or have each size captured by itself."""
        captured, step = unplanned.step, self._varying[unplanned.step]
        self._autocast = autocast_dtype(device_of(self.model, tuple(call)))
        self._clock.skip()
        began = time.monotonic()
        try:
            made = self._planned_at(step, unplanned.sizes, call)
        except TraceError as error:
            self._sizes.fix(str(error))
            self._forget()
            return
        self._add_program(captured, made, began)

    def _plan_smaller(self, captured: CapturedStep, step: VaryingStep, seconds: float) -> None:
        """Plan for smaller sizes, too, once what they lost by a plan for larger ones would have paid for that."""
        sizes, captured.last_sizes = captured.last_sizes, ()
        if sizes:
            step.note(sizes, captured.limits_for(sizes), seconds)
        wanted = step.worth_planning()
        if wanted is not None and self.budget is not None:
            began = time.monotonic()
            try:
                self._add_program(captured, (*self._plan_at(step, *wanted), wanted[0]), began)
            except MonetliteError as error:  # training goes on by the plans that it has
                step.planned(time.monotonic() - began, captured.by_size)
                tell(f"no plan for smaller sizes was found: {error}")

    def _add_program(
        self, captured: CapturedStep, made: tuple[Traced, tuple[Step, ...], Limits], began: float
    ) -> None:
        """Have a step whose sizes vary run by these steps at sizes up to these limits."""
        traced, steps, limits = made
        captured.serve(captured.exchange(*lower(traced, steps)), limits)
        while len(captured.by_size) > MAX_LIMITS:
            captured.by_size.pop(list(captured.by_size)[-2])
        self._varying[captured].planned(time.monotonic() - began, captured.by_size)
        if self._refinement is not None:
            self._refinement.keep(captured)

    def _resident_bytes(self, call: Arguments) -> int:
        """Bytes of the model's tensors and of a call's."""
        return own_bytes([*self.model.parameters(), *self.model.buffers(), *as_passed(*call)])

    def _serving(self, call: Arguments, autocast: str) -> list[Schedule]:
        """The schedules that can serve a call's inputs, those for the smallest inputs first."""
        return [
            schedule
            for schedule in self.schedules
            if serving_problem(schedule, self._order(schedule, call), autocast) is None
        ]

    def _order(self, schedule: Schedule, call: Arguments) -> list[torch.Tensor]:
        """A call's tensors in the order in which a schedule has them.

        Files written before inputs were put into the signature's order have them as they were passed.
        """
        tensors = tensors_in_order(self.model, *call)
        return tensors if serving_problem(schedule, tensors, schedule.autocast) is None else as_passed(*call)

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
            solved = solve_model(
                self.model,
                call,
                self.budget,
                *options,
                starts=self.schedules,
                runs_here=True,
                step=self._outside.counted,
            )
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


class _NotAsked(Exception):
    """A program was captured other than through `_first`, so without the settings that captures need."""
