"""Plans of one model's training steps: the steps that its captured graphs run, by its schedules.

`StepPlans.plan` gives a captured step its steps: by a schedule that serves it, or by one that is found within
seconds. A better one is looked for beside training, and its programs take the place of the first between two steps.

A schedule also serves other sizes than it was solved for, and its structure says nothing of sizes: a number that
the forward pass reads, an attribute, or tensors inside of an object can make a step larger though no input is. So
the peak of every captured step is predicted and compared with the budget.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from monetlite.core.announcing import tell, warn
from monetlite.core.binding import lacking
from monetlite.core.errors import InfeasibleBudget, ScheduleMismatch, TraceError
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.core.weak_calls import weakly
from monetlite.fx.torch_internals.torch_dynamo import captured_shapes
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.fx.varying_sizes import input_sizes
from monetlite.planning.pipeline import noteworthy_bytes
from monetlite.runtime.call_sizes import CallSizes
from monetlite.runtime.fitting import Fitted
from monetlite.runtime.gradient_delivery import CapturedStep, Unplanned, Version
from monetlite.runtime.measured_peak import MeasuredPeak
from monetlite.runtime.model_schedules import ModelSchedules
from monetlite.runtime.serving import TooLarge, own_bytes, plain_if_smaller
from monetlite.runtime.varying_plans import Ran, VaryingPlans
from monetlite.runtime.varying_step import VaryingStep
from monetlite.tracing.capture import Joint, copied
from monetlite.tracing.operator_graph import Traced, build_graph, in_layouts
from monetlite.tracing.sized_graphs import Limits
from monetlite.tracing.step_inputs import Arguments

_planning = threading.Lock()


class StepPlans:
    """Plans of the captured steps of one model.

    Args:
        schedules: of the model.
        outputs: that the caller gets of a model with a loss: `loss` or `all`.

    Attributes:
        sizes: of the inputs that came.
        peak: the measured peak of steps.
        varying: plans of the captured steps whose sizes vary.
    """

    def __init__(self, schedules: ModelSchedules, outputs: str) -> None:
        self._schedules, self._search, self.outputs = schedules, schedules.search, outputs
        self.sizes, self.peak = CallSizes(), MeasuredPeak()
        self._example: Arguments | None = None  # of the step that is being captured
        self._shapes: dict[int, tuple[Any, ...]] = {}  # of its tensors, by their ids
        self.forget()

    def forget(self) -> None:
        """Have steps captured anew."""
        self._schedules.runs.forget()
        self._search.forget()
        self._ran: Ran | None = None  # since the last border between two steps
        self.varying = VaryingPlans(self._schedules)
        self._new_varying: VaryingStep | None = None  # the one that is being captured
        self._schedules.planned = None

    @contextlib.contextmanager
    def capturing(self, call: Arguments) -> Iterator[None]:
        """Have the steps that are captured in a block be those of a call."""
        self._example = call
        try:
            with self._search.clock.capturing():
                yield
        finally:
            self._example, self._shapes, self._schedules.planned = None, {}, None

    def note_shapes(self, graph: fx.GraphModule) -> None:
        """Note which sizes of the call's tensors are which symbols of the step that is being captured.

        It ends the capture of a step that nobody asked for, before AOTAutograd's longer part of it.
        """
        self.asked()
        self._shapes = captured_shapes(graph)

    def measure_loss(self, output: Any, call: Arguments) -> None:
        """Measure what the caller's loss takes, from here to the backward pass, if that isn't known yet."""
        schedule = self._schedules.current
        if schedule is not None:
            device, least_bytes = self._schedules.device_of(call), noteworthy_bytes(schedule.budget_bytes)
            if self._search.outside.forward_ends(output, device, least_bytes):
                self.peak.drop()  # of two records at a time, only one is right

    def count_loss(self) -> bool:
        """Count what a loss outside of the model was found to take; True if that breaks the budget of the plans."""
        schedule = self._schedules.current
        if schedule is None or not (problem := self._search.outside.problem(schedule)):
            return False
        if self._schedules.budget is None:
            warn(
                f"{problem}. The schedule can't count it; give a budget in its place, "
                f"budget='{format_bytes(schedule.budget_bytes)}', or have the model return its loss"
            )
            return False
        tell(f"{problem}; planning again")
        self._schedules.drop()
        return True

    def count_runs(self, call: Arguments) -> bool:
        """Note a run of the model that is to begin; True if more share the budget than it was planned for."""
        schedules, search = self._schedules, self._search
        if not schedules.runs.begin(schedules.current, own_bytes(tensors_among(call))):
            return False
        if not search.pricing.step_in_backward:
            search.pricing = replace(search.pricing, accumulate=True)  # as the runs' gradients add up
        schedules.drop()
        return True

    def _run_begins(self, step: CapturedStep, version: Version, sizes: Limits) -> None:
        self._schedules.current, self._ran = version.schedule, Ran(step, version, sizes)

    def _watch(self, ends: bool) -> None:
        """Note that a backward part begins or ends."""
        if ends:
            self.peak.backward_ends()
        else:
            self._schedules.runs.backward_begins()
            self._search.outside.backward_begins()

    def asked(self) -> Arguments:
        """The call that is being captured."""
        if self._example is None:
            raise _NotAsked
        return self._example

    def build(self, joint: Joint, call: Arguments, layout: str) -> Traced:
        """A captured step as a graph, for the inputs of a call."""
        model, autocast = self._schedules.model, self._schedules.autocast
        return build_graph(joint, model, call, layout=layout, autocast=autocast, outputs=self.outputs)

    def plan(self, joint: Joint) -> Fitted:
        """The captured step as a graph, and the steps to run of it, by the first schedule that keeps to its budget.

        With a budget, a step that no schedule is for is planned at once.

        Raises:
            TooLarge: every schedule for this graph would exceed its budget.
            ScheduleMismatch: all are for other graphs.
        """
        self._new_varying = self._schedules.planned = None
        if input_sizes(joint.graph.graph):
            return self._plan_varying(joint)
        if self.sizes.asked:
            self.sizes.fix("the model's code depends on them")
        found = self._schedules.current
        if found is None:
            return self._plan_at_once(joint)
        if self._schedules.budget is None:
            return self._plan_by(found, joint)
        try:
            return self._plan_by(found, copied(joint))
        except (ScheduleMismatch, TooLarge, TraceError):
            # The model itself has changed: other parameters are frozen, a submodule is in evaluation mode. Or
            # something other than an input's shape is larger than any schedule was solved for.
            self._schedules.current = None
            return self._plan_at_once(joint)

    def _plan_by(self, found: Schedule, joint: Joint) -> Fitted:
        """The same, by a schedule or one like it."""
        call, refusal = self.asked(), None
        traced = self.build(joint, call, found.layout)
        for schedule in self._schedules.serving(call):
            same = schedule.structure == traced.graph.structure
            if same and not self._would_run_otherwise(schedule, traced.graph):
                try:
                    return self._schedules.use(schedule, {schedule.layout: traced}, call)
                except TooLarge as error:
                    refusal = refusal or error
        if refusal is not None:
            raise refusal
        if plain := plain_if_smaller(found, traced.graph):
            return traced, plain
        if self._would_run_otherwise(found, traced.graph):
            raise ScheduleMismatch("tensors lie otherwise in memory than those of the step that was planned")
        return self._search.fitting.fit(traced, found, self._schedules.resident_bytes(call))

    def _would_run_otherwise(self, schedule: Schedule, graph: OperatorGraph) -> bool:
        """True for a schedule that would run otherwise than planned, where one for this step can be made."""
        solves = self._schedules.budget is not None
        return solves and schedule.device == graph.device and lacking(schedule, graph)

    def _plan_at_once(self, joint: Joint) -> Fitted:
        """The captured step, and the steps to run of it by a schedule found within seconds.

        A share of plain training's peak is not less than what a plan had before: plain training takes less once
        layers are frozen, and a share of that may be too little.
        """
        call = self.asked()
        budget, before_bytes = self._schedules.budget_of(call), self._schedules.before_bytes
        assert budget is not None
        layouts = in_layouts(joint, self._search.layouts()).items()
        traced = {layout: self.build(own, call, layout) for layout, own in layouts}
        try:
            return self._schedules.solve(traced, call, budget)
        except InfeasibleBudget as error:
            if before_bytes <= error.budget_bytes:
                raise self._without_loss(error, next(iter(traced.values())).graph.outputs_bytes) from None
        return self._schedules.solve(traced, call, before_bytes)

    def _without_loss(self, error: InfeasibleBudget, outputs_bytes: int) -> InfeasibleBudget:
        """The error of a first plan, which says so where a loss outside of the model is not known yet."""
        if self._search.outside.memory is not None or outputs_bytes < noteworthy_bytes(error.budget_bytes):
            return error
        return error.with_line(
            f"A loss of the model's outputs ({format_bytes(outputs_bytes)}) comes on top. What it takes is not "
            "known before a step has run."
        )

    def _plan_varying(self, joint: Joint) -> Fitted:
        """A captured step whose sizes vary, at sizes that serve its call, and the steps to run of it."""
        call, began = self.asked(), time.monotonic()
        step = VaryingStep(joint, call, self._shapes, self.sizes.varying(call), self.build)
        fitted = self.varying.planned_at(step, step.captured, call)
        step.planned(time.monotonic() - began)
        self._new_varying = step
        return fitted

    def plan_sizes(self, unplanned: Unplanned, call: Arguments) -> bool:
        """Plan a captured step for larger sizes than before; False if each size has to be captured by itself."""
        self._schedules.look_at(call)
        self.peak.drop()
        self._search.clock.skip()
        try:
            self.varying.plan_sizes(unplanned.step, unplanned.sizes, call)
        except TraceError as error:
            self.sizes.fix(str(error))
            return False
        return True

    def keep(self, step: CapturedStep) -> None:
        """Note the programs of the step that was captured last."""
        step.run_begins, step.watch = weakly(self._run_begins), weakly(self._watch)
        self.peak.capture_ends()
        self._schedules.runs.keep(step)
        (version,) = step.versions
        version.schedule = self._schedules.current
        if self._new_varying is not None:
            self.varying.steps[step] = self._new_varying
        if (planned := self._schedules.planned) is not None:
            version.limits = planned.limits
            self._search.remember(planned, step)

    def between_steps(self) -> None:
        """Go on planning, in one thread at a time."""
        looks_on = self._search.schedule is not None or self.varying.steps
        if not looks_on or not _planning.acquire(blocking=False):
            return
        try:
            seconds = self._search.clock.border()
            ran, self._ran = self._ran, None
            self.varying.advance(ran, seconds)
            bettered = ran is None or ran.version.schedule is self._search.schedule
            self._schedules.look_on(seconds if bettered else 0.0)
            self._search.clock.goes_on()
        finally:
            _planning.release()


class _NotAsked(Exception):
    """A program was captured other than through `ScheduledTraining`, so without the settings that captures need."""
