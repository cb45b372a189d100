"""Plans of captured steps whose sizes vary: for which sizes, and for smaller ones once that pays."""

import contextlib
import math
import operator
import time
from typing import NamedTuple

from monetlite.core.announcing import tell
from monetlite.core.costs import without_costs
from monetlite.core.errors import InfeasibleBudget, MonetliteError, ScheduleMismatch, TraceError
from monetlite.core.graph import OperatorGraph
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import is_percentage, parse_budget
from monetlite.profiling.step_additions import with_additions
from monetlite.runtime.fitting import Fitted
from monetlite.runtime.gradient_delivery import CapturedStep, Version
from monetlite.runtime.lowering import lower
from monetlite.runtime.model_schedules import ModelSchedules
from monetlite.runtime.serving import TooLarge
from monetlite.runtime.varying_step import MAX_LIMITS, VaryingStep, is_of_any_size
from monetlite.tracing.sized_graphs import Limits
from monetlite.tracing.step_inputs import Arguments


class Ran(NamedTuple):
    """A run of a captured step: by which programs, and at which sizes."""

    step: CapturedStep
    version: Version
    sizes: Limits


class VaryingPlans:
    """Plans of the captured steps of one model whose sizes vary.

    Args:
        schedules: of the model.

    Attributes:
        steps: those steps.
    """

    def __init__(self, schedules: ModelSchedules) -> None:
        self._schedules, self._search = schedules, schedules.search
        self.steps: dict[CapturedStep, VaryingStep] = {}

    def planned_at(self, step: VaryingStep, sizes: Limits, call: Arguments) -> Fitted:
        """A step at sizes that serve a call's, and the steps to run of it.

        Raises:
            ModelError: no schedule serves the call, and there is no budget to solve for.
            TraceError: the step can't be planned for several sizes.
        """
        schedules = self._schedules
        serving = schedules.serving(call)
        if not serving and schedules.budget is None:
            raise schedules.unserved(call)
        for schedule in filter(is_of_any_size, serving):
            limits = step.limits_of(schedule, call, schedules.order(schedule, call))
            if any(map(operator.lt, limits, sizes)):
                continue  # a size that no input's shape shows is larger than in the capture
            traced = {schedule.layout: step.traced_at(limits, schedule.layout)}
            with contextlib.suppress(ScheduleMismatch, TooLarge):
                return schedules.use(schedule, traced, step.example_at(limits), limits)
        budget = schedules.budget_of(call)
        if budget is None:
            raise TraceError("no schedule is for the step at other sizes")
        roomy = step.roomy(sizes)
        largest = max(roomy, self._plain_limits(step, sizes, budget), key=math.prod)
        for limits in dict.fromkeys((largest, roomy)):
            if limits != sizes and not schedules.wait:  # who waits for a plan waits for one
                with contextlib.suppress(InfeasibleBudget, TraceError):
                    return self._plan_at(step, limits, budget, settle=False)
        return self._plan_at(step, sizes, budget)

    def _plain_limits(self, step: VaryingStep, sizes: Limits, budget: str | int | float) -> Limits:
        """About the largest sizes at which plain training fits; those given where the budget is in percent."""
        if is_percentage(budget):
            return sizes

        def peak_bytes(graph: OperatorGraph) -> int:
            profile = with_additions(self._search.outside.counted(without_costs(graph)), self._search.pricing)
            return simulate(profile, plain_steps(profile.graph)).peak_bytes

        with contextlib.suppress(TraceError):  # no plan can be made for others, as it will turn out
            return step.plain_limits(sizes, parse_budget(budget), peak_bytes)
        return sizes

    def _plan_at(
        self, step: VaryingStep, limits: Limits, budget: str | int | float, *, settle: bool = True
    ) -> Fitted:
        """A step at these sizes, and the steps to run of it by a schedule found within seconds."""
        traced = step.in_layouts(limits, self._search.layouts())
        return self._schedules.solve(traced, step.example_at(limits), budget, limits, settle=settle)

    def plan_sizes(self, captured: CapturedStep, sizes: Limits, call: Arguments) -> None:
        """Plan a captured step for a call of larger sizes than before.

        Raises:
            Those of `planned_at`.
        """
        began = time.monotonic()
        self._add_program(captured, self.planned_at(self.steps[captured], sizes, call), began)

    def advance(self, ran: Ran | None, seconds: float) -> None:
        """Note a run that took so long; plan for smaller sizes once what they lost would have paid for that."""
        if ran is not None and ran.step in self.steps:
            self.steps[ran.step].note(ran.sizes, ran.version, seconds)
        if self._schedules.budget is None:
            return
        for captured, step in self.steps.items():
            wanted = step.worth_planning(captured.versions)
            if wanted is not None:
                self._plan_smaller(captured, step, *wanted)

    def _plan_smaller(self, captured: CapturedStep, step: VaryingStep, limits: Limits, most_bytes: int) -> None:
        """Plan for smaller sizes, within a budget that larger runs have had for themselves at most."""
        began = time.monotonic()
        try:
            budget = self._schedules.budget_of(step.example_at(limits))
            if budget is not None and not is_percentage(budget):
                most_bytes = min(most_bytes, parse_budget(budget))
            self._add_program(captured, self._plan_at(step, limits, most_bytes), began)
        except MonetliteError as error:  # training goes on by the plans that it has
            step.planned(time.monotonic() - began)
            tell(f"no plan for smaller sizes was found: {error}")

    def _add_program(self, captured: CapturedStep, planned: Fitted, began: float) -> None:
        """Have a step whose sizes vary run by the steps that were planned for it."""
        made = self._schedules.planned
        assert made is not None
        version = captured.exchange(*lower(*planned), made.limits, made.schedule)
        if len(captured.versions) > MAX_LIMITS:
            smaller = [known for known in captured.versions[:-1] if known is not version]
            captured.versions.remove(smaller[-1])
        self.steps[captured].planned(time.monotonic() - began)
        self._search.remember(made, captured)
