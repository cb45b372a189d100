"""Schedules for a budget of reserved memory, which `nvidia-smi` shows, in place of allocated memory.

One is found for a peak of the budget, and one for less. From these `arrange` looks for schedules whose tensors lie
without gaps. Where it finds none, memory has to go back to the GPU within the step, and the budget of the peak is
lowered until that is enough.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from monetlite.allocator.allocator import PAGE_BYTES
from monetlite.allocator.reserved import least_limit, refuse_without_gpu, reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.interrupts import ended_early
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.steps import Step
from monetlite.solving.annealing.arranging import arrange
from monetlite.solving.clock import now
from monetlite.solving.incumbent import Solution
from monetlite.solving.solver import solve_peak

RELEASE_MS = 10.0
"""Assumed cost of giving memory back once, where schedules are compared: it waits for the GPU, and gigabytes are
unmapped and mapped page by page. It is not measured, and no step time has it."""
FOR_THE_PEAK, FOR_LESS, ARRANGING = 0.25, 0.15, 0.6
"""Parts of the time."""
MAX_ROUNDS = 8
"""Rounds with lowered budgets, while nothing fits."""
ROUND_SHARE, MIN_SECONDS = 0.3, 0.5
"""Part of the time left that a round takes, and its least time."""
_LESS = 0.87
"""The second peak that is solved for, over the budget."""
_STEP = 0.004
"""Part of the budget by which it is lowered from round to round, beyond the last schedule's excess."""


class ReservedSolve:
    """A solve for a budget of reserved memory, as `monetlite.solving.solve_profile` says.

    The result is the fastest schedule found that runs within it, `starts` included. Its bound is that of all
    schedules whose peak is within the budget, which are more. Where peaks are within the budget, but no schedule
    that runs within it was found, the result has no steps, and `reserved_bytes` is the least that any schedule
    needs that was seen.

    Attributes:
        candidates: schedules whose bounds hold for the budget.
        lowered: schedules for lower budgets, whose bounds don't.
    """

    def __init__(
        self,
        profile: Profile,
        budget_bytes: int,
        options: SolvingOptions,
        starts: Iterable[tuple[Step, ...]],
        progress: Callable[[Solution], None] | None,
    ) -> None:
        refuse_without_gpu(profile)
        self.profile, self.budget_bytes, self.options, self.progress = profile, budget_bytes, options, progress
        self.starts = list(starts)
        self.began, self.interrupts = now(), ended_early()
        self.candidates: list[Solution] = []
        self.lowered: list[Solution] = []

    def run(self) -> Solution:
        for steps in self.starts:
            with suppress(IllegalSchedule):  # not for these sizes
                self.candidates.append(Solution.of_steps(self.profile, steps, method="start"))
        first = self.solve(self.budget_bytes, FOR_THE_PEAK * self.options.time_limit)
        if first.steps is None:
            return first
        self.candidates.append(first)
        self.look_further(first, first.steps)
        best = _best_within(self.profile, self.budget_bytes, self.candidates)
        return self.result(best or self.lower(first))

    @property
    def interrupted(self) -> bool:
        return ended_early() > self.interrupts

    def solve(self, peak_bytes: int, seconds: float, starts: Iterable[tuple[Step, ...]] = ()) -> Solution:
        """Solve for a peak."""
        options = replace(self.options, time_limit=seconds)
        starts = [*self.starts, *starts]
        return solve_peak(self.profile, peak_bytes, options, starts=starts, progress=self.progress)

    def look_further(self, first: Solution, steps: tuple[Step, ...]) -> None:
        """Look for schedules that reserve less than the first one, or for a faster one if it reserves little."""
        seconds = self.options.time_limit
        if self.interrupted:
            return
        within = reserve(self.profile, steps, expandable=True, limit_bytes=self.budget_bytes)
        if within.fits and not within.releases:
            self.candidates.append(self.solve(self.budget_bytes, (1 - FOR_THE_PEAK) * seconds, [steps]))
            return
        less = self.solve(int(self.budget_bytes * _LESS), FOR_LESS * seconds)
        self.candidates.append(replace(less, lower_bound_ms=0.0))
        if self.interrupted:
            return
        given = [item.steps for item in self.candidates if item.steps is not None]
        arranged = arrange(
            self.profile, given, self.budget_bytes, seconds=seconds * ARRANGING, seed=self.options.seed
        )
        if arranged is not None:
            made = Solution.of_steps(self.profile, arranged, method="arranging")
            self.candidates.append(replace(made, methods=(*first.methods, "arranging")))

    def lower(self, found: Solution) -> Solution | None:
        """Solve for ever lower peaks, until a schedule runs within the budget or the time is up."""
        deadline = self.began + self.options.time_limit
        peak_bytes = self.budget_bytes
        for _ in range(MAX_ROUNDS):
            if found.steps is None or found.peak_bytes is None or now() >= deadline or self.interrupted:
                break
            excess_bytes = max(0, least_limit(self.profile, found.steps) - self.budget_bytes)
            peak_bytes = min(found.peak_bytes, peak_bytes) - excess_bytes - int(self.budget_bytes * _STEP)
            found = self.solve(peak_bytes, max(MIN_SECONDS, ROUND_SHARE * (deadline - now())))
            self.lowered.append(found)
            if best := _best_within(self.profile, self.budget_bytes, [found]):
                return best
        return None

    def result(self, best: Solution | None) -> Solution:
        """The best schedule, or none, with what is proven of the budget."""
        bound_ms = max(item.lower_bound_ms for item in self.candidates)
        proven_bytes = max(item.smallest_proven_bytes for item in self.candidates)
        seconds = now() - self.began
        if best is None or best.latency_ms is None:
            seen = [item.steps for item in (*self.candidates, *self.lowered) if item.steps is not None]
            return Solution(
                status=Status.TIMEOUT,
                lower_bound_ms=bound_ms,
                smallest_proven_bytes=proven_bytes,
                reserved_bytes=min(least_limit(self.profile, steps) for steps in seen),
                seconds=seconds,
            )
        smallest = min(self.candidates, key=lambda item: item.smallest_reached_bytes or self.budget_bytes)
        return replace(
            best,
            lower_bound_ms=bound_ms,
            status=Status.OPTIMAL if best.latency_ms <= bound_ms else Status.FEASIBLE,
            smallest_proven_bytes=proven_bytes,
            smallest_reached_bytes=smallest.smallest_reached_bytes,
            smallest_reached_steps=smallest.smallest_reached_steps,
            seconds=seconds,
        )


def _best_within(profile: Profile, budget_bytes: int, solutions: Iterable[Solution]) -> Solution | None:
    """The best of some solutions that runs within a budget of reserved memory, counting what releases may cost."""
    best: Solution | None = None
    best_ms = float("inf")
    for item in solutions:
        if item.steps is None or item.latency_ms is None or (item.peak_bytes or 0) > budget_bytes:
            continue
        within = reserve(profile, item.steps, expandable=True, limit_bytes=budget_bytes)
        latency_ms = item.latency_ms + RELEASE_MS * within.releases
        if within.fits and latency_ms < best_ms:
            needed_bytes = least_limit(profile, item.steps) if within.releases else within.peak_bytes + PAGE_BYTES
            best, best_ms = replace(item, reserved_bytes=min(needed_bytes, budget_bytes)), latency_ms
    return best
