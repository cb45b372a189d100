"""The search for plans of a model's steps: a first one at once, and a better one beside training."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from monetlite.core.announcing import bettered, planned, tell
from monetlite.core.costs import Profile
from monetlite.core.errors import MonetliteError, ScheduleMismatch
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.operators.random import forked_state
from monetlite.planning.beside_training import PlanningBesideTraining
from monetlite.planning.layouts import layouts_to_try
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.gradient_delivery import CapturedStep
from monetlite.runtime.lowering import lower
from monetlite.runtime.outside_loss import OutsideLoss
from monetlite.runtime.serving import TooLarge, size_served
from monetlite.runtime.varying_step import of_any_size
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.sized_graphs import Limits


class PlannedStep(NamedTuple):
    """A step whose programs may be exchanged.

    Attributes:
        traced: its graph, in each layout.
        schedule: by which it runs.
        resident_bytes: of the model's tensors and of its inputs.
        limits: the sizes that its program serves, where they vary.
    """

    traced: Mapping[str, Traced]
    schedule: Schedule
    resident_bytes: int
    limits: Limits = ()


class ScheduleSearch:
    """The search for plans of the steps of one model.

    Args:
        pricing, solving: options.

    Attributes:
        fitting, outside: what was learnt of the steps: implementations to avoid, memory of the caller's loss.
        clock: the time that they take.
        schedule: the plan in whose place a better one is looked for; None where none is.
    """

    def __init__(self, pricing: PricingOptions, solving: SolvingOptions) -> None:
        self.pricing, self.solving = pricing, solving
        self.fitting, self.outside, self.clock = Fitting(), OutsideLoss(), StepClock()
        self.stop()

    def stop(self) -> None:
        """Look for no better plan."""
        self.schedule: Schedule | None = None
        self._planning: PlanningBesideTraining | None = None
        self.forget()

    def forget(self) -> None:
        """Leave the steps that were noted as they are: others are captured in their place."""
        self._steps: list[tuple[PlannedStep, CapturedStep]] = []

    def layouts(self) -> list[str]:
        """Layouts in which a plan is looked for."""
        return layouts_to_try(self.pricing.layout, self.solving.tolerance, self.pricing.compile)

    def find(
        self,
        traced: Mapping[str, Traced],
        budget: str | int | float,
        device: str,
        *,
        known: Sequence[Schedule] = (),
        limits: Limits = (),
        best: bool = False,
        settle: bool = True,
    ) -> Schedule:
        """A plan of a step, found within seconds; a better one is looked for from here on, if there may be one.

        Args:
            traced: the step in each layout.
            budget: of the step.
            device: that the step runs on.
            known: schedules for the model.
            limits: the sizes that the plan serves, where they vary.
            best: whether to wait for the best plan.
            settle: whether to take all the time that is needed if nothing is found within seconds.

        Raises:
            Those of `monetlite.optimize`.
        """

        def whole(profiles: list[Profile]) -> list[Profile]:
            return [self.outside.counted(of_any_size(item) if limits else item) for item in profiles]

        graphs = [item.graph for item in traced.values()]
        if self.clock.captures:
            limit = f" for up to {self.solving.time_limit:g} s (time_limit)" if best else ""
            tell(f"captured {len(graphs[0].traced)} operators in {self.clock.seconds:.1f} s; planning{limit}")
        # The step must not notice. Measuring draws numbers, and makes real tensors where compiling makes fake ones.
        with without_modes(), forked_state(device), interrupts_kept():
            planning = PlanningBesideTraining(graphs, budget, self.pricing, self.solving, whole)
            schedule = planning.best(known) if best else planning.first(settle=settle)
        # Where sizes vary, a plan for smaller inputs than another one's is good enough.
        largest = all(size_served(item) < size_served(schedule) for item in known)
        looks_on = not planning.finished and (largest or not limits)
        sizes = f" for sizes up to {' x '.join(map(str, limits))}" if limits else ""
        tell(f"plan{sizes}: {planned(schedule)}{'; looking for a better plan beside training' if looks_on else ''}")
        if looks_on:
            self.stop()
            self.schedule, self._planning = schedule, planning
        return schedule

    def remember(self, planned_step: PlannedStep, step: CapturedStep) -> None:
        """Have a captured step run by a better plan, too, once there is one."""
        if planned_step.schedule is self.schedule:
            self._steps.append((planned_step, step))

    def advance(self, seconds: float, device: str) -> tuple[Schedule, Schedule] | None:
        """Go on after a step of so many seconds; the plan in use and the one taken in its place, if one is."""
        if self._planning is None or self.schedule is None:
            return None
        told, before, taken = self._planning.told, self.schedule, None
        with forked_state(device):
            better = self._planning.advance(seconds)
            if better is not None and self._exchange(better, told):
                told.append(bettered(before, better))
                self.schedule, taken = better, (before, better)
            while told:
                tell(told.pop(0))
        if self._planning.finished:
            self.stop()
        return taken

    def _exchange(self, better: Schedule, told: list[str]) -> bool:
        """Run captured steps by another schedule from here on, where it serves them; False if it serves none."""
        done = False
        for item, step in self._steps:
            traced = item.traced.get(better.layout)
            if traced is None or item.limits not in [known.limits for known in step.versions]:
                continue
            try:
                fitted, steps = self.fitting.fit(traced, better, item.resident_bytes)
                step.exchange(*lower(fitted, steps), item.limits, better)
                done = True
            except MonetliteError as error:  # training goes on by the plan that it has
                if not isinstance(error, (ScheduleMismatch, TooLarge)):
                    told.append(f"a better plan is not taken: {error}")
        return done


class StepClock:
    """The time that training steps take, without those in which something is captured or planned.

    Attributes:
        captures: True while a step is captured.
    """

    def __init__(self) -> None:
        self.captures = False
        self._began = time.monotonic()
        self._counts = False
        self._usual_seconds = math.inf

    def border(self) -> float:
        """Begin a step; the time that the last one took, in seconds, 0 if it says nothing.

        Whatever else the caller did since (an evaluation, a pause) counts as one step more at most.
        """
        now = time.monotonic()
        seconds, self._began, counted, self._counts = now - self._began, now, self._counts, True
        if not counted:
            return 0.0
        self._usual_seconds = min(seconds, 2 * self._usual_seconds)
        return self._usual_seconds

    def goes_on(self) -> None:
        """Have what was done since the last border count for nothing."""
        self._began = time.monotonic()

    def skip(self) -> None:
        """Have the present step count for nothing."""
        self._counts = False

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture the present step in a block."""
        self.goes_on()
        self.skip()
        self.captures = True
        try:
            yield
        finally:
            self.captures = False

    @property
    def seconds(self) -> float:
        """Since the last border, or since the capture began."""
        return time.monotonic() - self._began
