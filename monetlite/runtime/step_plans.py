"""Plans of one model's training steps: the schedules that it has, and the programs that its captured steps run by.

`StepPlans.plan` gives a captured step its steps: by a schedule that serves it, or by one that is found within
seconds. A better one is looked for beside training, and its programs take the place of the first between two steps.

A schedule also serves other sizes than it was solved for, and its structure says nothing of sizes: a number that
the forward pass reads, an attribute, or tensors inside of an object can make a step larger though no input is. So
the peak of every captured step is predicted and compared with the budget.
"""

import contextlib
import math
import operator
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from monetlite.core.announcing import tell, warn
from monetlite.core.binding import lacking
from monetlite.core.costs import Profile, without_costs
from monetlite.core.errors import InfeasibleBudget, ModelError, MonetliteError, ScheduleMismatch, TraceError
from monetlite.core.graph import OperatorGraph
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, is_percentage, parse_budget
from monetlite.core.weak_calls import weakly
from monetlite.fx.torch_internals.torch_dynamo import captured_shapes
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.fx.varying_sizes import input_sizes
from monetlite.operators.random import forked_state
from monetlite.planning.beside_training import PlanningBesideTraining
from monetlite.planning.layouts import layouts_to_try
from monetlite.planning.pipeline import noteworthy_bytes
from monetlite.profiling.step_additions import with_additions
from monetlite.runtime.call_sizes import CallSizes
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.gradient_delivery import CapturedStep, Unplanned, Version
from monetlite.runtime.lowering import lower
from monetlite.runtime.measured_peak import MeasuredPeak
from monetlite.runtime.open_runs import OpenRuns
from monetlite.runtime.outside_loss import OutsideLoss
from monetlite.runtime.refinement import PlannedStep, Refinement, StepClock, amid_a_step, refined
from monetlite.runtime.serving import (
    TooLarge,
    own_bytes,
    plain_if_smaller,
    same_masks,
    serving_problem,
    size_served,
)
from monetlite.runtime.varying_step import MAX_LIMITS, VaryingStep, is_of_any_size, of_any_size
from monetlite.tracing.capture import Joint, copied
from monetlite.tracing.operator_graph import Traced, build_graph, in_layouts
from monetlite.tracing.sized_graphs import Limits
from monetlite.tracing.step_inputs import (
    Arguments,
    autocast_dtype,
    bucket_bytes,
    device_of,
    tensor_arguments,
    tensors_in_order,
)

_planning = threading.Lock()


class Ran(NamedTuple):
    """A run of a captured step: by which programs, and at which sizes."""

    step: CapturedStep
    version: Version
    sizes: Limits


class StepPlans:
    """Schedules for the training steps of one model, and the captured steps that run by them.

    Args:
        model: the module.
        schedules: those that are given.
        budget: of schedules that have to be solved for; None if none may be.
        options: of solving; `pricing` and `solving` are the same.
        outputs: that the caller gets of a model with a loss: `loss` or `all`.
        wait: whether a step waits for the best schedule.

    Attributes:
        schedules: all of them, those for the smallest inputs first.
        schedule: the one in use; None before the first is solved.
        solved: the number of schedules that were solved for at training time.
        sizes: of the inputs that came.
        fitting, outside, peak: what was learnt of the steps: implementations to avoid, memory of the caller's loss,
            the measured peak.
        runs: of the model whose backward pass is still to come.
        varying: captured steps whose sizes vary.
        refinement: the search beside training; None where none goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        schedules: Sequence[Schedule],
        *,
        budget: str | int | float | None,
        options: Mapping[str, Any],
        outputs: str,
        wait: bool,
    ) -> None:
        self.model = model
        self.schedules = sorted(schedules, key=size_served)
        self.schedule = schedules[0] if schedules else None
        self.budget, self.options, self.outputs, self.wait = budget, options, outputs, wait
        self.pricing, self.solving = split_options(options)
        self.solved = 0
        self.sizes, self.fitting, self.outside, self.peak = CallSizes(), Fitting(), OutsideLoss(), MeasuredPeak()
        self.runs = OpenRuns(self.model, self.budget, self.pricing.optimizer)
        self.refinement: Refinement | None = None
        self._clock = StepClock()
        self._example: Arguments | None = None  # of the step that is being captured
        self._shapes: dict[int, tuple[Any, ...]] = {}  # of its tensors, by their ids
        self._autocast = ""  # dtype of the step that is being planned
        self.forget()

    def forget(self) -> None:
        """Have steps captured anew."""
        self.runs.forget()
        if self.refinement is not None:
            self.refinement.forget()
        self._ran: Ran | None = None  # since the last border between two steps
        self.varying: dict[CapturedStep, VaryingStep] = {}
        self._new_varying: VaryingStep | None = None  # the one that is being captured
        self._planned: PlannedStep | None = None  # the step that is being captured, or planned once more

    @property
    def updates_in_backward(self) -> bool:
        """True if the plans count parameters as updated in the backward pass."""
        return self.pricing.step_in_backward or any(item.step_in_backward for item in self.schedules)

    @contextlib.contextmanager
    def capturing(self, call: Arguments) -> Iterator[None]:
        """Have the steps that are captured in a block be those of a call."""
        self._example = call
        self._clock.goes_on()
        self._clock.skip()
        try:
            yield
        finally:
            self._example, self._shapes, self._planned = None, {}, None

    def note_shapes(self, graph: fx.GraphModule) -> None:
        """Note which sizes of the call's tensors are which symbols of the step that is being captured.

        It ends the capture of a step that nobody asked for, before AOTAutograd's longer part of it.
        """
        self._asked()
        self._shapes = captured_shapes(graph)

    def look_at(self, call: Arguments) -> None:
        """Note the settings of a call that is to be planned."""
        self._autocast = autocast_dtype(device_of(self.model, tuple(call)))

    def measure_loss(self, output: Any, call: Arguments) -> None:
        """Measure what the caller's loss takes, from here to the backward pass, if that isn't known yet."""
        if self.schedule is not None:
            least_bytes = noteworthy_bytes(self.schedule.budget_bytes)
            if self.outside.forward_ends(output, device_of(self.model, tuple(call)), least_bytes):
                self.peak.drop()  # of two records at a time, only one is right

    def count_loss(self) -> bool:
        """Count what a loss outside of the model was found to take; True if that breaks the budget of the plans."""
        schedule = self.schedule
        if schedule is None or not (problem := self.outside.problem(schedule)):
            return False
        if self.budget is None:
            warn(
                f"{problem}. The schedule can't count it; give a budget in its place, "
                f"budget='{format_bytes(schedule.budget_bytes)}', or have the model return its loss"
            )
            return False
        tell(f"{problem}; planning again")
        self.schedules = []  # none of them counts the loss
        self.refinement = None
        return True

    def count_runs(self, call: Arguments) -> bool:
        """Note a run of the model that is to begin; True if more share the budget than it was planned for."""
        if not self.runs.begin(self.schedule, own_bytes(tensors_among(call))):
            return False
        if not self.pricing.step_in_backward:
            self.pricing = replace(self.pricing, accumulate=True)  # as the runs' gradients add up
        self.schedules = []
        self.refinement = None
        return True

    def _run_begins(self, step: CapturedStep, version: Version, sizes: Limits) -> None:
        self.schedule, self._ran = version.schedule, Ran(step, version, sizes)

    def _watch(self, ends: bool) -> None:
        """Note that a backward part begins or ends."""
        if ends:
            self.peak.backward_ends()
        else:
            self.runs.backward_begins()
            self.outside.backward_begins()

    def unserved(self, call: Arguments) -> ModelError:
        tensors, names = tensors_in_order(self.model, *call), tensor_arguments(self.model, *call)
        return ModelError(serving_problem(self.schedules[-1], tensors, self._autocast, names) or "")

    def build(self, joint: Joint, layout: str) -> tuple[Traced, Arguments]:
        """The captured step as a graph, and the inputs that it was captured with."""
        call = self._asked()
        return self._build(joint, call, layout), call

    def _asked(self) -> Arguments:
        """The call that is being captured."""
        if self._example is None:
            raise _NotAsked
        return self._example

    def _build(self, joint: Joint, call: Arguments, layout: str) -> Traced:
        return build_graph(joint, self.model, call, layout=layout, autocast=self._autocast, outputs=self.outputs)

    def plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step as a graph, and the steps to run of it, by the first schedule that keeps to its budget.

        With a budget, a step that no schedule is for is planned at once.

        Raises:
            TooLarge: every schedule for this graph would exceed its budget.
            ScheduleMismatch: all are for other graphs.
        """
        self._new_varying = self._planned = None
        if input_sizes(joint.graph.graph):
            return self._plan_varying(joint)
        if self.sizes.asked:
            self.sizes.fix("the model's code depends on them")
        found = self.schedule
        if found is None:
            return self._plan_at_once(joint)
        if self.budget is None:
            return self._plan_by(found, joint)
        try:
            return self._plan_by(found, copied(joint))
        except (ScheduleMismatch, TooLarge, TraceError):
            # The model itself has changed: other parameters are frozen, a submodule is in evaluation mode. Or
            # something other than an input's shape is larger than any schedule was solved for.
            self.schedule = None
            return self._plan_at_once(joint)

    def _plan_by(self, found: Schedule, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The same, by a schedule or one like it."""
        traced, call = self.build(joint, found.layout)
        resident_bytes, refusal = self._resident_bytes(call), None
        for schedule in self.serving(call):
            same = schedule.structure == traced.graph.structure
            if same and not self._would_run_otherwise(schedule, traced.graph):
                try:
                    fitted = self.fitting.fit(traced, schedule, resident_bytes)
                except TooLarge as error:
                    refusal = refusal or error
                    continue
                self._use(schedule, {schedule.layout: traced}, resident_bytes)
                return fitted
        if refusal is not None:
            raise refusal
        if plain := plain_if_smaller(found, traced.graph):
            return traced, plain
        if self._would_run_otherwise(found, traced.graph):
            raise ScheduleMismatch("tensors lie otherwise in memory than those of the step that was planned")
        return self.fitting.fit(traced, found, resident_bytes)

    def _would_run_otherwise(self, schedule: Schedule, graph: OperatorGraph) -> bool:
        """True for a schedule that would run otherwise than planned, where one for this step can be made."""
        return self.budget is not None and schedule.device == graph.device and lacking(schedule, graph)

    def _plan_at_once(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """The captured step, and the steps to run of it by a schedule found within seconds.

        A share of plain training's peak is not less than what a plan had before: plain training takes less once
        layers are frozen, and a share of that may be too little.
        """
        call = self._asked()
        budget = self._budget_of(call)
        assert budget is not None
        layouts = in_layouts(joint, self._layouts()).items()
        traced = {layout: self._build(own, call, layout) for layout, own in layouts}
        try:
            return self._first_plan(traced, call, budget)
        except InfeasibleBudget as error:
            if self.before_bytes <= error.budget_bytes:
                raise self._without_loss(error, next(iter(traced.values())).graph.outputs_bytes) from None
        return self._first_plan(traced, call, self.before_bytes)

    @property
    def before_bytes(self) -> int:
        """The most bytes that a share of plain training's peak was so far; 0 for a budget in bytes."""
        of_share = self.budget is not None and is_percentage(self.budget)
        return max((schedule.budget_bytes for schedule in self.schedules), default=0) if of_share else 0

    def _without_loss(self, error: InfeasibleBudget, outputs_bytes: int) -> InfeasibleBudget:
        """The error of a first plan, which says so where a loss outside of the model is not known yet."""
        if self.outside.memory is not None or outputs_bytes < noteworthy_bytes(error.budget_bytes):
            return error
        return InfeasibleBudget(
            f"{error}\nA loss of the model's outputs ({format_bytes(outputs_bytes)}) comes on top. What it takes "
            "is not known before a step has run.",
            budget_bytes=error.budget_bytes,
            proven_bytes=error.proven_bytes,
            reached_bytes=error.reached_bytes,
        )

    def _layouts(self) -> Sequence[str]:
        """Layouts in which a plan is looked for."""
        return layouts_to_try(self.pricing.layout, self.solving.tolerance, self.pricing.compile)

    def _first_plan(
        self,
        traced: Mapping[str, Traced],
        call: Arguments,
        budget: str | int | float,
        limits: Limits = (),
        *,
        settle: bool = True,
    ) -> tuple[Traced, tuple[Step, ...]]:
        """A step, and the steps to run of it by a schedule found within seconds, or by the best with `wait`.

        Args:
            traced: the step in each layout.
            call: for which it is planned.
            budget: of the step.
            limits: the sizes that the plan serves, where they vary.
            settle: whether to take all the time that is needed if nothing is found within seconds.
        """
        graphs = [item.graph for item in traced.values()]
        with amid_a_step(device_of(self.model, tuple(call))):
            if self._example is not None:
                tell(f"captured {len(graphs[0].traced)} operators in {self._clock.seconds:.1f} s; planning")

            def whole(profiles: list[Profile]) -> list[Profile]:
                return [self.outside.counted(of_any_size(item) if limits else item) for item in profiles]

            planning = PlanningBesideTraining(graphs, budget, self.pricing, self.solving, whole)
            schedule = planning.best(self.schedules) if self.wait else planning.first(settle=settle)
        self.solved += 1
        self.schedules = sorted([schedule, *self.schedules], key=size_served)
        sizes = f" for sizes up to {' x '.join(map(str, limits))}" if limits else ""
        # Where sizes vary, a plan for smaller inputs than another one's is good enough.
        wanted = not limits or schedule is self.schedules[-1]
        self.refinement = refined(planning, schedule, self.fitting, sizes=sizes, wanted=wanted) or self.refinement
        resident_bytes = self._resident_bytes(call)
        self._use(schedule, traced, resident_bytes, limits)
        return self.fitting.fit(traced[schedule.layout], schedule, resident_bytes)

    def _use(
        self, schedule: Schedule, traced: Mapping[str, Traced], resident_bytes: int, limits: Limits = ()
    ) -> None:
        """Note the schedule of a step that is being planned, whose programs may be exchanged."""
        self.schedule, self._planned = schedule, PlannedStep(traced, schedule, resident_bytes, limits)

    def keep(self, step: CapturedStep) -> None:
        """Note the programs of the step that was captured last."""
        step.run_begins, step.watch = weakly(self._run_begins), weakly(self._watch)
        self.peak.capture_ends()
        self.runs.keep(step)
        (version,) = step.versions
        version.schedule = self.schedule
        if self._new_varying is not None:
            self.varying[step] = self._new_varying
        if self._planned is not None:
            version.limits = self._planned.limits
            self._remember(self._planned, step)

    def _remember(self, planned_step: PlannedStep, step: CapturedStep) -> None:
        """Have a captured step run by a better schedule, too, once there is one."""
        planned_step.step = step
        if self.refinement is not None:
            self.refinement.remember(planned_step)

    def between_steps(self) -> None:
        """Go on planning, in one thread at a time."""
        if (self.refinement is None and not self.varying) or not _planning.acquire(blocking=False):
            return
        try:
            seconds = self._clock.border()
            ran, self._ran = self._ran, None
            if ran is not None and ran.step in self.varying:
                self.varying[ran.step].note(ran.sizes, ran.version, seconds)
            for captured, step in self.varying.items():
                self._plan_smaller(captured, step)
            if self.refinement is not None:
                bettered = ran is None or ran.version.schedule is self.refinement.schedule
                with forked_state(device_of(self.model, ())):
                    taken = self.refinement.advance(seconds if bettered else 0.0)
                if taken is not None:
                    self._replace(*taken)
                if self.refinement.finished:
                    self.refinement = None
            self._clock.goes_on()
        finally:
            _planning.release()

    def _replace(self, before: Schedule, better: Schedule) -> None:
        """Have a better schedule in the place of another."""
        self.schedules = [better if known is before else known for known in self.schedules]
        self.schedule = better if self.schedule is before else self.schedule

    def _plan_varying(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        """A captured step whose sizes vary, at sizes that serve its call, and the steps to run of it."""
        call = self._asked()
        varying, began = self.sizes.varying(call), time.monotonic()
        step = VaryingStep(joint, call, self._shapes, varying, self._build)
        fitted = self._planned_at(step, step.captured, call)
        step.planned(time.monotonic() - began)
        self._new_varying = step
        return fitted

    def _planned_at(self, step: VaryingStep, sizes: Limits, call: Arguments) -> tuple[Traced, tuple[Step, ...]]:
        """A step at sizes that serve a call's, and the steps to run of it.

        Raises:
            ModelError: no schedule serves the call, and there is no budget to solve for.
            TraceError: the step can't be planned for several sizes.
        """
        serving = self.serving(call)
        if not serving and self.budget is None:
            raise self.unserved(call)
        for schedule in filter(is_of_any_size, serving):
            limits = step.limits_of(schedule, call, self._order(schedule, call))
            if any(map(operator.lt, limits, sizes)):
                continue  # a size that no input's shape shows is larger than in the capture
            traced = step.traced_at(limits, schedule.layout)
            resident_bytes = self._resident_bytes(step.example_at(limits))
            with contextlib.suppress(ScheduleMismatch, TooLarge):
                fitted = self.fitting.fit(traced, schedule, resident_bytes)
                self._use(schedule, {schedule.layout: traced}, resident_bytes, limits)
                return fitted
        budget = self._budget_of(call)
        if budget is None:
            raise TraceError("no schedule is for the step at other sizes")
        roomy = step.roomy(sizes)
        largest = max(roomy, self._plain_limits(step, sizes, budget), key=math.prod)
        for limits in dict.fromkeys((largest, roomy)):
            if limits != sizes and not self.wait:  # who waits for a plan waits for one
                with contextlib.suppress(InfeasibleBudget, TraceError):
                    return self._plan_at(step, limits, budget, settle=False)
        return self._plan_at(step, sizes, budget)

    def _plain_limits(self, step: VaryingStep, sizes: Limits, budget: str | int | float) -> Limits:
        """About the largest sizes at which plain training fits; those given where the budget is in percent."""
        if is_percentage(budget):
            return sizes

        def peak_bytes(graph: OperatorGraph) -> int:
            profile = with_additions(self.outside.counted(without_costs(graph)), self.pricing)
            return simulate(profile, plain_steps(profile.graph)).peak_bytes

        with contextlib.suppress(TraceError):  # no plan can be made for others, as it will turn out
            return step.plain_limits(sizes, parse_budget(budget), peak_bytes)
        return sizes

    def _plan_at(
        self, step: VaryingStep, limits: Limits, budget: str | int | float, *, settle: bool = True
    ) -> tuple[Traced, tuple[Step, ...]]:
        """A step at these sizes, and the steps to run of it by a schedule found within seconds."""
        traced = step.in_layouts(limits, self._layouts())
        return self._first_plan(traced, step.example_at(limits), budget, limits, settle=settle)

    def plan_sizes(self, unplanned: Unplanned, call: Arguments) -> bool:
        """Plan a captured step for larger sizes than before; False if each size has to be captured by itself."""
        self.look_at(call)
        self.peak.drop()
        self._clock.skip()
        began = time.monotonic()
        try:
            made = self._planned_at(self.varying[unplanned.step], unplanned.sizes, call)
        except TraceError as error:
            self.sizes.fix(str(error))
            return False
        self._add_program(unplanned.step, *made, began)
        return True

    def _plan_smaller(self, captured: CapturedStep, step: VaryingStep) -> None:
        """Plan for smaller sizes, too, once what they lost by a plan for larger ones would have paid for that."""
        wanted = step.worth_planning(captured.versions)
        if wanted is not None and self.budget is not None:
            began = time.monotonic()
            try:
                limits, most_bytes = wanted
                self._add_program(
                    captured, *self._plan_at(step, limits, self._share(step, limits, most_bytes)), began
                )
            except MonetliteError as error:  # training goes on by the plans that it has
                step.planned(time.monotonic() - began)
                tell(f"no plan for smaller sizes was found: {error}")

    def _share(self, step: VaryingStep, limits: Limits, most_bytes: int) -> int:
        """The budget of a run of these sizes, one that larger runs have had for themselves at most."""
        share = self._budget_of(step.example_at(limits))
        return most_bytes if share is None or is_percentage(share) else min(most_bytes, parse_budget(share))

    def _add_program(self, captured: CapturedStep, traced: Traced, steps: tuple[Step, ...], began: float) -> None:
        """Have a step whose sizes vary run by the steps that were planned for it."""
        assert self._planned is not None
        version = captured.exchange(*lower(traced, steps), self._planned.limits, self.schedule)
        if len(captured.versions) > MAX_LIMITS:
            smaller = [known for known in captured.versions[:-1] if known is not version]
            captured.versions.remove(smaller[-1])
        self.varying[captured].planned(time.monotonic() - began)
        self._remember(self._planned, captured)

    def _budget_of(self, call: Arguments) -> str | int | float | None:
        """The budget of a run with a call's inputs."""
        return self.runs.budget_of(own_bytes(tensors_among(call)))

    def _resident_bytes(self, call: Arguments) -> int:
        """Bytes of the model's tensors and of a call's; and of buckets, which no schedule counts that was given."""
        parameters = list(self.model.parameters())
        buckets_bytes = 0 if self.budget is None else bucket_bytes(parameters)
        return own_bytes([*parameters, *self.model.buffers(), *tensors_among(call)]) + buckets_bytes

    def serving(self, call: Arguments) -> list[Schedule]:
        """The schedules that can serve a call's inputs, those for the smallest inputs first."""
        ordered = [(schedule, self._order(schedule, call)) for schedule in self.schedules]
        return [
            schedule
            for schedule, tensors in ordered
            if serving_problem(schedule, tensors, self._autocast) is None
            and (self.budget is None or same_masks(schedule, tensors))
        ]

    def _order(self, schedule: Schedule, call: Arguments) -> list[torch.Tensor]:
        """A call's tensors in the order in which a schedule has them.

        Files written before inputs were put into the signature's order have them as they were passed.
        """
        tensors = tensors_in_order(self.model, *call)
        return tensors if serving_problem(schedule, tensors, schedule.autocast) is None else tensors_among(call)


class _NotAsked(Exception):
    """A program was captured other than through `ScheduledTraining`, so without the settings that captures need."""
