"""The search for a better plan than the first, beside training, and the exchange of programs for it."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from monetlite.core.announcing import bettered, planned, tell
from monetlite.core.errors import MonetliteError, ScheduleMismatch
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.operators.random import forked_state
from monetlite.planning.beside_training import PlanningBesideTraining
from monetlite.runtime.fitting import Fitting
from monetlite.runtime.gradient_delivery import CapturedStep
from monetlite.runtime.lowering import lower
from monetlite.runtime.serving import TooLarge
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.sized_graphs import Limits


@dataclass
class PlannedStep:
    """A captured step whose programs may be exchanged.

    Attributes:
        traced: its graph, in each layout.
        schedule: by which it runs.
        resident_bytes: of the model's tensors and of its inputs.
        limits: the sizes that its program serves, where they vary.
        step: what was captured; None until it is.
    """

    traced: Mapping[str, Traced]
    schedule: Schedule
    resident_bytes: int
    limits: Limits = ()
    step: CapturedStep | None = None


@contextlib.contextmanager
def amid_a_step(device: str) -> Iterator[None]:
    """Plan within a training step on a device, which must not notice.

    Measuring draws random numbers. Compiling makes fake tensors of what is computed meanwhile, and operators are
    measured on real ones.
    """
    with without_modes(), forked_state(device), interrupts_kept():
        yield


def refined(
    planning: PlanningBesideTraining, first: Schedule, fitting: Fitting, *, sizes: str = "", wanted: bool = True
) -> "Refinement | None":
    """Tell of a first plan, and look for a better one, if that is wanted and there may be one.

    Args:
        planning, first, fitting: as for `Refinement`.
        sizes: that the plan is for, in words.
        wanted: whether to look for a better one.
    """
    wanted = wanted and not planning.finished
    tell(f"plan{sizes}: {planned(first)}{'; looking for a better plan beside training' if wanted else ''}")
    return Refinement(planning, first, fitting) if wanted else None


class Refinement:
    """A first plan that is used, and a better one that is looked for.

    Args:
        planning: the search.
        schedule: the first plan.
        fitting: of the model's schedules.

    Attributes:
        schedule: the plan that is used.
    """

    def __init__(self, planning: PlanningBesideTraining, schedule: Schedule, fitting: Fitting) -> None:
        self.schedule = schedule
        self._planning, self._fitting = planning, fitting
        self._steps: list[PlannedStep] = []

    @property
    def finished(self) -> bool:
        return self._planning.finished

    def remember(self, step: PlannedStep) -> None:
        """Note a captured step, if it runs by the plan that is used."""
        if step.schedule is self.schedule:
            self._steps.append(step)

    def forget(self) -> None:
        """Leave the steps that were noted as they are: others are captured in their place."""
        self._steps.clear()

    def advance(self, seconds: float) -> tuple[Schedule, Schedule] | None:
        """Go on after a step of so many seconds; the plan in use and the one taken in its place, if one is."""
        better = self._planning.advance(seconds)
        told, taken = self._planning.told, None
        if better is not None and self._exchange(better):
            told.append(bettered(self.schedule, better))
            taken, self.schedule = (self.schedule, better), better
        while told:
            tell(told.pop(0))
        return taken

    def _exchange(self, better: Schedule) -> bool:
        """Run captured steps by another schedule from here on, where it serves them; False if it serves none."""
        done = False
        for item in self._steps:
            traced, step = item.traced.get(better.layout), item.step
            if traced is None or step is None or item.limits not in [known.limits for known in step.versions]:
                continue
            try:
                fitted, steps = self._fitting.fit(traced, better, item.resident_bytes)
                step.exchange(*lower(fitted, steps), item.limits, better)
                done = True
            except MonetliteError as error:  # training goes on by the plan that it has
                if not isinstance(error, (ScheduleMismatch, TooLarge)):
                    self._planning.told.append(f"a better plan is not taken: {error}")
        return done


class StepClock:
    """The time that training steps take, without those in which something is captured or planned."""

    def __init__(self) -> None:
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

    @property
    def seconds(self) -> float:
        """Since the last border."""
        return time.monotonic() - self._began
