"""The plan of a graph that `torch.compile` captured: its schedule, and the search for a better one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from monetlite.core.announcing import tell, warn
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.graph import AS_TRACED
from monetlite.core.schedule import Schedule
from monetlite.core.units import is_percentage
from monetlite.core.weak_calls import weakly
from monetlite.planning.pipeline import noteworthy_bytes
from monetlite.runtime.compile_options import CompileOptions
from monetlite.runtime.gradient_delivery import CapturedStep
from monetlite.runtime.lowering import lower
from monetlite.runtime.measured_peak import MeasuredPeak
from monetlite.runtime.schedule_search import PlannedStep, ScheduleSearch
from monetlite.runtime.scheduled_training import loaded
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.step_inputs import Arguments

_solved: dict[tuple[str, str, CompileOptions], Schedule] = {}
"""The last schedules of this process, by graph, device and options."""
_budgets = WeakIdKeyDictionary()
"""Bytes of the largest budget in percent that a parameter's graphs were planned for."""
_peaks: dict[str, MeasuredPeak] = {}
"""Of each structure that has been compiled: it is told once for all sizes of the inputs."""


class GraphPlan:
    """The schedule of a captured graph, and the search for a better one.

    Args:
        traced_in: makes the graph in a layout.
        options: of its compilation.
        resident_bytes: of the model's tensors and of its inputs.
        parameters, device: of the model.

    Attributes:
        schedule: the one in use.

    Raises:
        Those of `monetlite.optimize`.
    """

    def __init__(
        self,
        traced_in: Callable[[str], Traced],
        options: CompileOptions,
        resident_bytes: int,
        parameters: Sequence[nn.Parameter],
        device: str,
    ) -> None:
        graph = traced_in(AS_TRACED).graph
        self._key = graph.fingerprint, graph.device, options
        self._options, self._resident_bytes, self._device = options, resident_bytes, device
        self._parameters = parameters
        self._as_asked = True  # the schedule is within the budget that was given
        self._search = ScheduleSearch(options.pricing, options.solving)
        # What makes graphs holds the tensors that the step was captured with, so all of them are made at once.
        if options.schedule is not None and options.schedule_exists:
            self.schedule = loaded(options.schedule)
            self._traced = {self.schedule.layout: traced_in(self.schedule.layout)}
        else:
            self._traced = {layout: traced_in(layout) for layout in self._search.layouts()}
            self.schedule = _solved.get(self._key) or self._found()
        self._note_if_last()
        self._peak = _peaks.setdefault(self.schedule.structure, MeasuredPeak())

    def _found(self) -> Schedule:
        """A schedule to begin with; the best one if a file is to keep it.

        A share of plain training's peak may be too little for a smaller batch. It is then an earlier graph's.
        """
        budget = self._options.budget
        assert budget is not None
        shared = is_percentage(budget)
        before_bytes = max((_budgets[item] for item in self._parameters if item in _budgets), default=0)
        try:
            schedule = self._found_within(budget)
        except InfeasibleBudget as error:
            if not shared or before_bytes <= error.budget_bytes:
                raise
            self._as_asked = False
            schedule = self._found_within(before_bytes)
        if shared:
            for item in self._parameters:
                _budgets[item] = max(before_bytes, schedule.budget_bytes)
        return schedule

    def _found_within(self, budget: str | int | float) -> Schedule:
        """The same, within this budget."""
        target = self._options.schedule
        schedule = self._search.find(self._traced, budget, self._device, best=target is not None)
        if target is not None:
            schedule.save(target)
        return schedule

    def lowered(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The two programs of the graph."""
        traced = self._traced[self.schedule.layout]
        fitted, steps = self._search.fitting.fit(traced, self.schedule, self._resident_bytes)
        self._search.outside.planned(fitted.graph, steps)
        return lower(fitted, steps)

    def keep(self, step: CapturedStep) -> None:
        """Note what was captured, whose programs a better schedule's may replace."""
        self._captured = step
        self._peak.capture_ends()
        step.watch = weakly(self._watch)
        self._remember()

    def _remember(self) -> None:
        planned = PlannedStep(self._traced, self.schedule, self._resident_bytes)
        self._search.remember(planned, self._captured)

    def _watch(self, ends: bool) -> None:
        """Note that a backward part begins or ends."""
        if ends:
            self._peak.backward_ends()
        else:
            self._search.outside.backward_begins()

    def step_begins(self, graph: fx.GraphModule, arguments: tuple[Any, ...]) -> None:
        """Go on planning, if no run waits for its backward pass, and measure the step that begins."""
        if not self._captured.open_runs():
            self._count_loss()
            self._look_on()
        self._peak.step_begins(graph, Arguments(arguments, {}), lambda: self.schedule)

    def step_gave(self, output: Any) -> None:
        """Note the output of a step, and measure what the caller's loss takes, if that isn't known yet."""
        self._peak.step_gave(output)
        least_bytes = noteworthy_bytes(self.schedule.budget_bytes)
        if self._search.outside.forward_ends(output, self._device, least_bytes):
            self._peak.drop()  # of two records at a time, only one is right

    def _count_loss(self) -> None:
        """Plan once more, if the plan breaks its budget by what a loss outside of the model was found to take."""
        problem = self._search.outside.problem(self.schedule)
        if not problem:
            return
        if self._options.schedule is not None:
            warn(
                f"{problem}. A schedule file can't count it: give a budget alone, or let the model return its loss"
            )
            return
        tell(f"{problem}; planning again")
        self._search.stop()
        self.schedule = self._found()
        self._captured.exchange(*self.lowered(), schedule=self.schedule)
        self._peak.drop()
        self._remember()
        self._note_if_last()

    def _look_on(self) -> None:
        if self._search.schedule is None:
            return
        taken = self._search.advance(self._search.clock.border(), self._device)
        if taken is not None:
            self.schedule = taken[1]
        self._note_if_last()
        self._search.clock.goes_on()

    def _note_if_last(self) -> None:
        """Keep the schedule for later compilations, if no better one is looked for and no file has it."""
        if self._search.schedule is None and self._options.schedule is None and self._as_asked:
            _solved[self._key] = self.schedule
