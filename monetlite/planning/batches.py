"""The largest batch that trains within a memory budget, and the throughput of batches on the way.

No batch is tried until it crashes. The step is traced again at each batch, plain training and the smallest feasible
peak are computed for it, and a bound proves which batches no schedule fits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

from monetlite.allocator.reserved import least_limit, refuse_without_gpu
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.planning.budgets import as_schedule, solve_budget

MAX_PROBES = 64
MAX_BATCH = 2**20
SEARCH_SHARE = 0.4
"""Share of the time for finding the largest batch. The rest goes to solving at the batches that are shown."""
PROBE_SHARE = SEARCH_SHARE / 10
"""Share of the time for one batch on the way."""
POINTS_BEYOND_PLAIN = 4
"""Batches beyond plain training's largest that are solved for."""


class Fit(StrEnum):
    """A batch within a budget: whether, and how, it fits."""

    PLAIN = "plain"
    """Plain training fits."""
    SCHEDULED = "scheduled"
    """A schedule fits, and plain training does not."""
    NOT_FOUND = "not found"
    """No schedule was found, and none is ruled out."""
    IMPOSSIBLE = "impossible"
    """No schedule fits (proven)."""


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """One batch: how it trains within the budget, and how fast.

    Attributes:
        batch: samples in a step.
        peak_bytes, latency_ms: predicted for the step.
        reserved_bytes: on a GPU, if the budget is of that; None if it is of the peak.
        schedule: the schedule that reaches them; None for plain training.
        overhead: step time over plain training's at the same batch, less one.
    """

    batch: int
    peak_bytes: int
    latency_ms: float
    reserved_bytes: int | None
    schedule: Schedule | None
    overhead: float

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.batch / self.latency_ms if self.latency_ms > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """The batches that fit a budget.

    Attributes:
        budget_bytes: of the whole step; of the memory reserved for it on a GPU, if `reserved`.
        step: batches are multiples of this.
        plain_largest: the largest that plain training fits; 0 if none. largest: the largest that a schedule fits.
        proven_impossible: no schedule fits this batch; None if that was not proven of any.
        points: some batches up to the largest, in order.
    """

    budget_bytes: int
    reserved: bool
    step: int
    plain_largest: int
    largest: int
    proven_impossible: int | None
    points: tuple[BatchPoint, ...]


@interrupts_kept()
def largest_batch(
    price: Callable[[int], Profile],
    budget_bytes: int,
    options: SolvingOptions,
    *,
    first: int,
    step: int = 1,
    progress: Callable[[int, str], None] | None = None,
) -> BatchLimit:
    """Find the largest batch that fits a budget, and the throughput of batches up to it.

    Args:
        price: traces and prices the model's step at a batch.
        budget_bytes: of the whole step.
        options: the time limit is of searching and solving; tracing comes on top.
        first: the batch to begin from.
        step: look at multiples of this only.
        progress: called with a batch and what was found of it.

    Raises:
        InfeasibleBudget: not even the smallest batch fits.
        DeviceError: a budget of reserved memory, and costs that are not a GPU's.
        ModelError: the budget holds a million samples; something else is the matter.
    """
    prober = _Prober(price, budget_bytes, options, progress)
    first = max(step, min(first, MAX_BATCH) // step * step)
    largest = _bisect(first, step, prober.fits_somehow, partial(prober.guess, prober.needed_bytes))
    if largest == 0:
        needed, proven = prober.needed_bytes[step], prober.fits[step] is Fit.IMPOSSIBLE
        how = "at least, by any schedule" if proven else "by the leanest schedule found"
        raise InfeasibleBudget(
            f"a batch of {step} needs {needed} bytes {how}, more than the budget of {budget_bytes}. "
            "Raise the budget, or lower the input size",
            budget_bytes=budget_bytes,
            proven_bytes=needed if proven else 0,
            reached_bytes=None if proven else needed,
        )
    plain_largest = _bisect(largest, step, prober.plain_fits, partial(prober.guess, prober.plain_bytes))
    points = []
    wanted = _spread(plain_largest, largest, step)
    seconds = options.time_limit * (1 - SEARCH_SHARE) / max(1, len(wanted) - (plain_largest > 0))
    for number, batch in enumerate(wanted):
        try:
            points.append(prober.point(batch, seconds))
        except InfeasibleBudget:
            if batch == largest or not options.reserved:
                raise
            continue  # the gaps between its requests happen to be larger than at the largest batch
        if progress is not None:
            progress(batch, f"{points[-1].samples_per_s:.0f} samples/s ({number + 1} of {len(wanted)})")
    impossible = [batch for batch, fit in prober.fits.items() if fit is Fit.IMPOSSIBLE]
    return BatchLimit(
        budget_bytes=budget_bytes,
        reserved=options.reserved,
        step=step,
        plain_largest=plain_largest,
        largest=largest,
        proven_impossible=min(impossible, default=None),
        points=tuple(points),
    )


@dataclass
class _Prober:
    """Looks at batches, each once, and remembers the memory that they take."""

    price: Callable[[int], Profile]
    budget_bytes: int
    options: SolvingOptions
    progress: Callable[[int, str], None] | None
    profiles: dict[int, Profile] = field(default_factory=dict)
    leanest: dict[int, Schedule] = field(default_factory=dict)
    fits: dict[int, Fit] = field(default_factory=dict)
    needed_bytes: dict[int, int] = field(default_factory=dict)
    plain_bytes: dict[int, int] = field(default_factory=dict)

    def _profile(self, batch: int) -> Profile:
        if batch > MAX_BATCH:
            raise ModelError(
                f"a batch of {batch} would fit {self.budget_bytes} bytes: the budget is not what limits this model"
            )
        if batch not in self.profiles:
            profile = self.price(batch)
            if self.options.reserved:
                refuse_without_gpu(profile)
            self.profiles[batch] = profile
            self.plain_bytes[batch] = self._takes_bytes(profile, plain_steps(profile.graph))
        return self.profiles[batch]

    def _takes_bytes(self, profile: Profile, steps: Sequence[Step]) -> int:
        """Bytes of the budget that steps need."""
        return least_limit(profile, steps) if self.options.reserved else simulate(profile, steps).peak_bytes

    def fits_somehow(self, batch: int) -> bool:
        if batch not in self.fits:
            self.fits[batch] = self._fit(batch)
            if self.progress is not None:
                self.progress(batch, str(self.fits[batch]))
        return self.fits[batch] in (Fit.PLAIN, Fit.SCHEDULED)

    def plain_fits(self, batch: int) -> bool:
        self._profile(batch)
        return self.plain_bytes[batch] <= self.budget_bytes

    def _fit(self, batch: int) -> Fit:
        from monetlite.solving.bounding.peak_bound import smallest_budget_bound
        from monetlite.solving.incumbent import Solution
        from monetlite.solving.problem import Problem
        from monetlite.solving.smallest import smallest_budget

        profile = self.options.allowed(self._profile(batch))
        bound_bytes = smallest_budget_bound(Problem.of(profile))
        self.needed_bytes[batch] = bound_bytes
        if self.plain_fits(batch):
            return Fit.PLAIN
        if bound_bytes > self.budget_bytes:
            return Fit.IMPOSSIBLE
        seconds = self.options.time_limit * PROBE_SHARE
        found = smallest_budget(profile, seconds=seconds, seed=self.options.seed)
        steps = found.smallest_reached_steps
        if found.smallest_reached_bytes is None or steps is None:
            return Fit.NOT_FOUND
        self.needed_bytes[batch] = self._takes_bytes(profile, steps)
        if found.smallest_reached_bytes > self.budget_bytes:
            return Fit.IMPOSSIBLE if found.smallest_proven_bytes > self.budget_bytes else Fit.NOT_FOUND
        if self.needed_bytes[batch] <= self.budget_bytes:
            solution = Solution.of_steps(profile, steps, method="search", seconds=seconds)
            solution = replace(solution, smallest_proven_bytes=found.smallest_proven_bytes)
            leanest = as_schedule(profile, self.budget_bytes, solution, self.options.tolerance)
        else:
            # Another schedule's requests may leave smaller gaps than those of the smallest peak.
            try:
                leanest = solve_budget(profile, self.budget_bytes, replace(self.options, time_limit=seconds))
            except InfeasibleBudget:
                return Fit.NOT_FOUND
        self.leanest[batch] = leanest
        return Fit.SCHEDULED

    def point(self, batch: int, seconds: float) -> BatchPoint:
        """Plain training at a batch if that fits, else a schedule that is solved for so long.

        Raises:
            InfeasibleBudget: no schedule was found.
        """
        profile = self._profile(batch)
        plain = simulate(profile, plain_steps(profile.graph))
        if self.plain_fits(batch):
            return BatchPoint(
                batch=batch,
                peak_bytes=plain.peak_bytes,
                latency_ms=plain.latency_ms,
                reserved_bytes=self.plain_bytes[batch] if self.options.reserved else None,
                schedule=None,
                overhead=0.0,
            )
        # The schedule that showed that this batch, or the next larger one, fits.
        serving = [other for other in self.leanest if other >= batch]
        starts = [self.leanest[min(serving)]] if serving else []
        options = replace(self.options, time_limit=seconds)
        schedule = solve_budget(profile, self.budget_bytes, options, starts=starts)
        return BatchPoint(
            batch=batch,
            peak_bytes=schedule.peak_bytes,
            latency_ms=schedule.latency_ms,
            reserved_bytes=schedule.reserved_bytes,
            schedule=schedule,
            overhead=schedule.latency_ms / plain.latency_ms - 1,
        )

    def guess(self, needed: dict[int, int], low: int, high: int | None) -> int | None:
        """The batch at which a line through the two batches nearest to the limit meets the budget."""
        near = sorted(needed, key=lambda batch: abs(batch - (low if high is None else high)))[:2]
        if len(near) < 2 or needed[near[0]] == needed[near[1]]:
            return None
        slope = (needed[near[1]] - needed[near[0]]) / (near[1] - near[0])
        return int(near[0] + (self.budget_bytes - needed[near[0]]) / slope) if slope > 0 else None


def _bisect(
    start: int,
    step: int,
    fits: Callable[[int], bool],
    guess: Callable[[int, int | None], int | None],
) -> int:
    """The largest multiple of `step` that fits, where everything smaller does; 0 if there is none.

    `guess` tells a likely limit between a batch that fits and one that doesn't (None: not known yet).
    """
    low, high, batch = 0, None, start
    width, guessing = math.inf, False
    for _ in range(MAX_PROBES):
        if fits(batch):
            low = max(low, batch)
        else:
            high = batch if high is None else min(high, batch)
        if high is not None and high - low <= step:
            break
        # Guesses that don't halve the open range take turns with doubling and bisection, which do.
        before, width = width, math.inf if high is None else high - low
        guessing = not guessing or (high is not None and width <= before / 2)
        guessed = guess(low, high) if guessing else None
        if guessed is None:
            guessed = 2 * low if high is None else (low + high) // 2
        least, most = low + step, 8 * low if high is None else high - step
        batch = min(max(guessed // step * step, least), max(most, least))
    return low


def _spread(plain_largest: int, largest: int, step: int) -> list[int]:
    """Batches to show: plain training's largest, the largest, and some between, evenly."""
    between = [
        (plain_largest + (largest - plain_largest) * number // POINTS_BEYOND_PLAIN) // step * step
        for number in range(1, POINTS_BEYOND_PLAIN)
    ]
    return sorted({batch for batch in (plain_largest, *between, largest) if batch > 0})
