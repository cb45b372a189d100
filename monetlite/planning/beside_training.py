"""A schedule within seconds of a step's capture, and a better one beside training.

`first` takes the costs of implementations from one run each, as far as two seconds go, and solves for two seconds.
Costs that the cache has are exact. Where plain training fits, it is the first schedule.

`advance` is called between two steps, when nothing else runs: there it measures every implementation, a while at a
time. Then a process solves beside training (`solving_process`).

If `first` finds nothing that fits so, it measures and solves until something does, as waiting would.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from monetlite.core.announcing import tell
from monetlite.core.costs import Profile, without_costs
from monetlite.core.errors import InfeasibleBudget, MonetliteError
from monetlite.core.graph import LOSS, OperatorGraph, ValueKind
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.planning.budgets import as_schedule
from monetlite.planning.layouts import solve_layouts
from monetlite.planning.pipeline import measured_here, price
from monetlite.planning.solving_process import SolvingProcess
from monetlite.profiling.measured import Measurement
from monetlite.profiling.memory_records import may_profile
from monetlite.profiling.step_additions import with_additions
from monetlite.solving.baselines import segment_checkpointing
from monetlite.solving.incumbent import Solution

ROUGH_SECONDS = 1.25, 1.75
"""Time for the first costs: of the default implementations, and of all."""
FIRST_SECONDS, FIRST_OPERATORS = (1.5, 2.0), 400
"""Time for the first schedule, from least to most: a second for so many operators."""
PLAIN_SECONDS = 0.2
"""The same where plain training keeps to the budget, and all costs are known."""
SETTLING_SHARE = 1 / 8
"""Part of the time limit in which a schedule is looked for where none is found so soon."""
MEASURING_SHARE = 0.25
"""Time for measuring between two steps, as a part of the last step's."""


class PlanningBesideTraining:
    """The search for a schedule of a step that is trained meanwhile.

    Args:
        graphs: what was captured of the step: in each layout of its images, or in pieces.
        budget: as in `monetlite.optimize`.
        pricing, solving: options.
        step: makes profiles of the whole step of those of the graphs. By default each graph is a whole step.

    Attributes:
        finished: nothing better will come.
        told: lines for people about how it went, which the reader removes.
    """

    def __init__(
        self,
        graphs: Sequence[OperatorGraph],
        budget: str | int | float,
        pricing: PricingOptions,
        solving: SolvingOptions,
        step: Callable[[list[Profile]], list[Profile]] = list,
    ) -> None:
        self._budget, self._pricing, self._solving, self._step = budget, pricing, solving, step
        self._graphs = graphs
        self._less_bytes = 0
        measured = [measured_here(graph, pricing) for graph in graphs]
        whole = self._without_costs()
        room_bytes = self._budget_bytes(whole) - whole.graph.resident.total
        self._measurements = [
            Measurement(graph, device, tolerance=solving.tolerance, room_bytes=room_bytes)
            for graph, device in zip(graphs, measured, strict=True)
            if device is not None
        ]
        self._process: SolvingProcess | None = None
        self._first: Schedule | None = None
        self._seconds = 0.0
        self._credit_seconds = 0.0  # time that measuring may take between steps
        self.finished = False
        self.told: list[str] = []

    def first(self, *, settle: bool = True) -> Schedule:
        """A schedule to begin with; with `settle`, all the time that is needed is taken if none is found soon.

        Raises:
            Those of `monetlite.optimize`.
        """
        self._first = self._at_once(settle)
        return self._first

    def _at_once(self, settle: bool) -> Schedule:
        from monetlite.solving.annealing.compiling import await_compiled

        complete = all(item.known for item in self._measurements)
        try:
            return self._found_soon(self._rough() or self._estimated(), complete)
        except InfeasibleBudget as error:
            if not settle:
                raise
            if error.proven_bytes <= error.budget_bytes:
                await_compiled(tell)
        if not complete:
            self._measure()
            with contextlib.suppress(InfeasibleBudget):
                return self._found_soon(self._complete(), complete=True)
        self._measure()
        return self._settled(self._steps(self._complete()))

    def _settled(self, profiles: list[Profile]) -> Schedule:
        """A schedule of a budget for which none is found soon, in a part of the time if that is enough."""
        limited = replace(self._solving, time_limit=SETTLING_SHARE * self._solving.time_limit)
        try:
            schedule = self._solved(profiles, limited)
        except InfeasibleBudget as error:
            if error.proven_bytes > error.budget_bytes:
                raise
            least_bytes = error.reached_bytes
            reached = "" if least_bytes is None else f" (the smallest takes {format_bytes(least_bytes)})"
            tell(
                f"no plan is within {format_bytes(error.budget_bytes)} yet{reached}; looking for "
                f"{self._solving.time_limit:g} s"
            )
            self.finished = True
            return self._solved(profiles, self._solving)
        self.finished = schedule.status is Status.OPTIMAL
        return schedule

    def _rough(self) -> list[Profile]:
        """Costs of one run each: of the default implementations, and of others unless plain training may fit."""
        others = not self._plain_fits(self._without_costs())
        seconds = ROUGH_SECONDS[others] / max(1, len(self._measurements))
        return [item.rough_profile(seconds, alternatives=others) for item in self._measurements]

    def _without_costs(self) -> Profile:
        return self._steps([without_costs(graph) for graph in self._graphs])[0]

    def _plain_fits(self, profile: Profile) -> bool:
        plain_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
        return plain_bytes <= self._budget_bytes(profile) and not self._solving.reserved

    def _found_soon(self, profiles: list[Profile], complete: bool) -> Schedule:
        """A schedule within seconds, by all costs or by the first ones.

        Of default operators, nothing is faster than plain training.

        Args:
            profiles: of the graphs.
            complete: all costs are measured, so that an optimal schedule is the last one.

        Raises:
            InfeasibleBudget: none was found.
        """
        profiles = self._steps(profiles)
        profile, (least, most) = profiles[0], FIRST_SECONDS
        seconds = max(least, min(most, len(profile.graph.operators) / FIRST_OPERATORS))
        if self._plain_fits(profile):
            if not complete:
                plain = Solution.of_steps(profile, plain_steps(profile.graph), method="plain")
                return as_schedule(profile, self._budget_bytes(profile), plain, self._solving.tolerance)
            seconds = PLAIN_SECONDS
        limit = min(seconds, self._solving.time_limit)
        schedule = self._solved(profiles, replace(self._solving, time_limit=limit))
        self.finished = complete and schedule.status is Status.OPTIMAL
        return schedule

    def take_off(self, size_bytes: int) -> None:
        """Plan for so much less than the budget from here on."""
        self._less_bytes += size_bytes

    def best(self, starts: Iterable[Schedule] = ()) -> Schedule:
        """The schedule that all the time finds, from all costs and the schedules `starts`.

        Raises:
            Those of `monetlite.optimize`.
        """
        from monetlite.solving.annealing.compiling import await_compiled

        self._measure()
        self.finished = True
        await_compiled(tell)
        return self._solved(self._steps(self._complete()), self._solving, starts)

    def advance(self, step_seconds: float) -> Schedule | None:
        """Go on for a share of the last step's seconds, while no step runs; the better schedule, once there is one.

        Nothing is measured while a profiler is on: it would be of that. An error ends the search, and is told.
        """
        if self.finished:
            return None
        try:
            return self._advanced(step_seconds)
        except (MonetliteError, OSError) as error:  # training goes on by the plan that it has
            self.finished = True
            self.told.append(f"no better plan is looked for: {error}")
            return None

    def _advanced(self, step_seconds: float) -> Schedule | None:
        if self._process is not None:
            return self._handed_over(self._process)
        if all(item.done == item.total for item in self._measurements):
            assert self._first is not None
            profiles = self._steps(self._complete())
            budget_bytes, layout = self._budget_bytes(profiles[0]), self._pricing.layout
            self._process = SolvingProcess(profiles, budget_bytes, self._solving, layout, self._first)
            return None
        self._credit_seconds += MEASURING_SHARE * step_seconds
        if self._credit_seconds > 0 and may_profile():
            began = time.monotonic()
            self._measure(self._credit_seconds)
            self._credit_seconds -= time.monotonic() - began  # the last call may have taken longer
        return None

    def _handed_over(self, process: SolvingProcess) -> Schedule | None:
        """The next better schedule; the process is over once it has ended and left none."""
        ended = not process.running
        better = process.better()
        if better is None and ended:
            self.finished = True
            if process.failure is not None:
                self.told.append(f"no better plan was found: {process.failure}")
        return better

    def _measure(self, seconds: float = math.inf) -> None:
        began = time.monotonic()
        for item in self._measurements:
            item.run(max(0.0, seconds - (time.monotonic() - began)))
        self._seconds += time.monotonic() - began
        if all(item.done == item.total for item in self._measurements):
            calls = sum(item.total for item in self._measurements)
            large = sum(item.too_large for item in self._measurements)
            left_out = f"; {large} need more than the budget alone, and are not measured" if large else ""
            self.told.append(f"measured {calls} operators in {self._seconds:.1f} s{left_out}")

    def _estimated(self) -> list[Profile]:
        return [price(graph, PricingOptions(device=self._pricing.device), self._solving) for graph in self._graphs]

    def _complete(self) -> list[Profile]:
        return [item.profile() for item in self._measurements] or self._estimated()

    def _steps(self, profiles: list[Profile]) -> list[Profile]:
        return [with_additions(profile, self._pricing) for profile in self._step(profiles)]

    def _solved(
        self, profiles: list[Profile], solving: SolvingOptions, starts: Iterable[Schedule] = ()
    ) -> Schedule:
        """A schedule, from profiles of whole steps."""
        budget_bytes = self._budget_bytes(profiles[0])
        try:
            return solve_layouts(profiles, budget_bytes, solving, layout=self._pricing.layout, starts=starts)
        except InfeasibleBudget as error:
            if unmeasured := sum(item.unmeasured for item in self._measurements):
                raise error.with_line(
                    f"{unmeasured} operators alone need more than this budget and are not measured: their "
                    "workspace comes on top of these figures."
                ) from None
            raise

    def _budget_bytes(self, profile: Profile) -> int:
        plain_bytes = simulate(profile, plain_steps(profile.graph)).peak_bytes
        return parse_budget(self._budget, plain_bytes) - self._less_bytes


def least_stored(graph: OperatorGraph, once: Collection[int]) -> tuple[Step, ...]:
    """Steps that store nothing between forward and backward that can be computed again.

    Outputs are computed again, too: the code that gets them may change them in place. The operators of `once` are
    not run again.
    """
    passing = tuple(
        replace(value, kind=ValueKind.ACTIVATION) if value.kind is ValueKind.OUTPUT else value
        for value in graph.values
    )
    operators = list(graph.operators)
    for index, operator in enumerate(operators):
        if operator.family == LOSS:
            ways = tuple(replace(item, reads=()) for item in operator.implementations)
            operators[index] = replace(operator, implementations=ways)
        elif index in once:
            operators[index] = replace(operator, rerunnable=False)
    return segment_checkpointing(without_costs(replace(graph, values=passing, operators=tuple(operators))), [])
