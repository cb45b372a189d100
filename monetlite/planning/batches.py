"""The largest batch that trains within a memory budget, and the throughput of batches on the way.

No batch is tried until it crashes. The step is traced at a few batches, and its costs at the others follow from
those (`batch_costs`), so that every batch is looked at. A bound proves which batches no schedule fits. Among the
others, searches for the smallest peak look for the largest that a schedule fits: choices that were found for one
batch are priced at all. The largest batch is traced before it is told.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from monetlite.allocator.reserved import least_limit, refuse_without_gpu
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError
from monetlite.core.graph import ValueKind
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes
from monetlite.planning.advice import LeastPeak
from monetlite.planning.batch_costs import Unlike, at_batch, same_step
from monetlite.planning.budgets import as_schedule, solve_budget
from monetlite.solving.baselines import known_schedules
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem

MAX_PROBES = 64
MAX_BATCH = 2**20
SEARCH_SHARE, MIN_SEARCH_SHARE = 0.4, 0.15
"""Part of the time after the first traces for finding the largest batch, and the least part of the whole time. The
rest is for solving at the batches that are shown."""
PROBE_SHARE = 1 / 3
"""Part of the time left for finding the largest batch that one search takes."""
MIN_SECONDS = 0.5
"""The least time of a solve, and the least for finding the largest batch."""
MAX_FAILURES = 4
"""Searches that may fail in a row at the next larger batch."""
MAX_CORRECTIONS = 8
"""Traces of a largest batch that may turn out to be another step than the others say."""
POINTS_BEYOND_PLAIN = 4
"""Batches beyond plain training's largest that are solved for."""


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
        proven_impossible: no schedule fits this batch, nor a larger one; None if that was not proven of any. No
            schedule was found for those between it and `largest`.
        points: some batches up to the largest, in order.
        profile: the costs at the largest.
    """

    budget_bytes: int
    reserved: bool
    step: int
    plain_largest: int
    largest: int
    proven_impossible: int | None
    points: tuple[BatchPoint, ...]
    profile: Profile


@interrupts_kept()
def largest_batch(
    price: Callable[[int], Profile],
    budget_bytes: int,
    options: SolvingOptions,
    *,
    first: int,
    step: int = 1,
    progress: Callable[[int, str], None] | None = None,
    price_plain: Callable[[int], Profile] | None = None,
) -> BatchLimit:
    """Find the largest batch that fits a budget, and the throughput of batches up to it.

    Args:
        price: traces and prices the model's step at a batch.
        budget_bytes: of the whole step.
        options: the time limit is of the whole call. Two or three traces are made even where they take longer.
        first: the batch to begin from.
        step: look at multiples of this only.
        progress: called with a batch and what was found of it.
        price_plain: the same as `price` for plain training, where schedules are of another layout of the step.

    Raises:
        InfeasibleBudget: not even the smallest batch fits.
        DeviceError: a budget of reserved memory, and costs that are not a GPU's.
        ModelError: the budget holds a million samples; something else is the matter.
    """
    deadline = time.monotonic() + options.time_limit
    first = max(step, min(first, MAX_BATCH) // step * step)
    plain = None
    if price_plain is not None:
        plain = _Prober(price_plain, budget_bytes, options, step, lambda batch, found: None)
    prober = _Prober(price, budget_bytes, options, step, progress or (lambda batch, found: None), plain)
    for _ in range(MAX_CORRECTIONS):
        possible = prober.largest_possible(first)
        plain_largest = prober.largest_of_plain(possible)
        left = deadline - time.monotonic() - prober.trace_seconds
        largest = prober.search(
            plain_largest, possible, max(MIN_SEARCH_SHARE * options.time_limit, SEARCH_SHARE * left)
        )
        if prober.confirm(max(largest, step)):
            break
    if largest == 0:
        raise prober.nothing_fits()
    beyond = possible + step
    if deadline - time.monotonic() > 2 * prober.trace_seconds or prober.trace_seconds < MIN_SECONDS:
        prober.confirm(beyond)
    points = []
    wanted = _spread(plain_largest, largest, step)
    for number, batch in enumerate(reversed(wanted)):
        left = deadline - time.monotonic()
        if 0 < number < len(wanted) - 1 and left < MIN_SECONDS * (len(wanted) - number):
            continue
        seconds = max(MIN_SECONDS, left / max(1, len(wanted) - number - (plain_largest > 0)))
        with suppress(InfeasibleBudget):  # the gaps between its requests happen to be larger than at the largest
            points.append(prober.point(batch, seconds))
            prober.tell(batch, f"{points[-1].samples_per_s:.0f} samples/s")
    return BatchLimit(
        budget_bytes=budget_bytes,
        reserved=options.reserved,
        step=step,
        plain_largest=plain_largest,
        largest=largest,
        proven_impossible=prober.smallest_impossible(),
        points=tuple(reversed(points)),
        profile=prober.profile(largest),
    )


@dataclass
class _Prober:
    """Looks at batches, and remembers the memory that they take and the schedules that were found."""

    price: Callable[[int], Profile]
    budget_bytes: int
    options: SolvingOptions
    step: int
    tell: Callable[[int, str], None]
    plain: "_Prober | None" = None
    """Prober of plain training, where that is of another layout."""
    traced: dict[int, Profile] = field(default_factory=dict)
    seconds: float = 0.0
    """Time of all traces."""
    derived: dict[int, Profile] = field(default_factory=dict)
    """Costs at batches that were not traced."""
    bound_bytes: dict[int, int] = field(default_factory=dict)
    plain_bytes: dict[int, int] = field(default_factory=dict)
    reached_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of the budget that the leanest schedule found needs."""
    found: list[Schedule] = field(default_factory=list)
    """Schedules of small peaks, for any batch; the last fits the largest."""

    @property
    def trace_seconds(self) -> float:
        """Time of one trace."""
        return self.seconds / max(1, len(self.traced))

    def profile(self, batch: int) -> Profile:
        """Costs at a batch: of a trace, or by those of others."""
        if batch > MAX_BATCH:
            raise ModelError(
                f"a batch of {batch:,} would fit {format_bytes(self.budget_bytes)}: the budget is not what limits "
                "this model"
            )
        if batch in self.traced:
            return self.traced[batch]
        if batch not in self.derived:
            try:
                self.derived[batch] = at_batch(self.traced, batch)
            except Unlike:
                return self.trace(batch)
        return self.derived[batch]

    def trace(self, batch: int) -> Profile:
        """Costs of a trace; what was derived without it is forgotten."""
        self.tell(batch, "tracing")
        began = time.monotonic()
        profile = self.price(batch)
        if self.plain is not None:
            self.plain.trace(batch)
        if self.options.reserved:
            refuse_without_gpu(profile)
        self.traced[batch] = self.options.allowed(profile)
        self.seconds += time.monotonic() - began
        for known in (self.derived, self.bound_bytes, self.plain_bytes):
            for other in set(known) - set(self.traced):
                del known[other]
        return self.traced[batch]

    def confirm(self, batch: int) -> bool:
        """Trace a batch if it wasn't, and tell whether it is as was derived."""
        if batch in self.traced or batch > MAX_BATCH:
            return True
        expected = self.profile(batch)
        if batch in self.traced:  # by looking at it
            return False
        fitted = self._fits(batch)
        for one in [self] if self.plain is None else [self, self.plain]:
            for known in (one.bound_bytes, one.plain_bytes):
                known.pop(batch, None)
        return same_step(expected, self.trace(batch)) and self._fits(batch) == fitted

    def _takes_bytes(self, batch: int, steps: Sequence[Step]) -> int:
        """Bytes of the budget that steps need."""
        profile = self.profile(batch)
        return least_limit(profile, steps) if self.options.reserved else simulate(profile, steps).peak_bytes

    def plain_fits(self, batch: int) -> bool:
        if self.plain is not None:
            return self.plain.plain_fits(batch)
        if batch not in self.plain_bytes:
            self.plain_bytes[batch] = self._takes_bytes(batch, plain_steps(self.profile(batch).graph))
        return self.plain_bytes[batch] <= self.budget_bytes

    def possible(self, batch: int) -> bool:
        """False if a bound proves that no schedule fits."""
        if batch not in self.bound_bytes:
            bound_bytes = smallest_budget_bound(Problem.of(self.profile(batch)))
            self.bound_bytes[batch] = max(bound_bytes, self.bound_bytes.get(batch, 0))
        return self.bound_bytes[batch] <= self.budget_bytes

    def _serves(self, schedule: Schedule, batch: int) -> bool:
        """True if a schedule's choices fit at a batch."""
        graph = self.profile(batch).graph
        if schedule.structure != graph.structure:
            return False
        return self._takes_bytes(batch, schedule.choices.steps(graph)) <= self.budget_bytes

    def _fits(self, batch: int) -> bool:
        """True if plain training, or a schedule that was found, fits at a batch."""
        return self.plain_fits(batch) or any(self._serves(schedule, batch) for schedule in self.found)

    def largest_possible(self, first: int) -> int:
        """The largest batch that no bound rules out."""
        return _bisect(first, self.step, self.possible, partial(self._guess, self.bound_bytes))

    def largest_of_plain(self, most: int) -> int:
        """The largest batch that plain training fits, of those up to `most`."""
        guess = partial(self._guess, self.plain_bytes)
        if self.plain is not None:
            return self.plain.largest_of_plain(most)
        return _bisect(most, self.step, self.plain_fits, guess) if most else 0

    def smallest_impossible(self) -> int | None:
        """The smallest batch that was traced, and that a bound rules out."""
        layouts = [self] if self.plain is None else [self, self.plain]
        ruled_out = (batch for batch in self.traced if not any(one.possible(batch) for one in layouts))
        return min(ruled_out, default=None)

    def search(self, low: int, high: int, seconds: float) -> int:
        """The largest batch up to `high` that a schedule fits; `low` is known to fit, unless it is 0."""
        deadline = time.monotonic() + seconds
        batch, failed, failures, seed = high, high + self.step, 0, self.options.seed
        while low < high and failures < MAX_FAILURES and (left := deadline - time.monotonic()) > 0:
            leanest = self._leanest(batch, max(MIN_SECONDS, PROBE_SHARE * left), seed)
            served = 0 if leanest is None else self._largest_served(leanest, low, batch)
            self.tell(batch, "scheduled" if served == batch else "not found")
            if leanest is not None and served > low:
                self.found.append(leanest)
                low, failures = served, 0
            while high > low and not self.possible(high):
                high -= self.step
            if served < batch:
                failed = min(failed, batch)
            elif failed <= low:
                failed = high + self.step
            if failed - low > self.step:
                batch = low + (failed - low) // 2 // self.step * self.step
            else:
                # Not found is not impossible: another search may find it.
                batch, failures, seed = failed, failures + 1, seed + 1
            batch = min(batch, high)
        if low == 0 < high and (leanest := self._leanest(self.step, MIN_SECONDS, seed)) is not None:
            low = self._largest_served(leanest, 0, self.step)
            self.found += [leanest] * (low > 0)
        return low

    def _largest_served(self, schedule: Schedule, low: int, high: int) -> int:
        """The largest batch, beyond `low` and up to `high`, at which a schedule's choices fit; else `low`."""
        if self._serves(schedule, high):
            return high
        while high - low > self.step:
            middle = low + (high - low) // 2 // self.step * self.step
            low, high = (middle, high) if self._serves(schedule, middle) else (low, middle)
        return low

    def _leanest(self, batch: int, seconds: float, seed: int) -> Schedule | None:
        """A schedule of a small peak; on a budget of reserved memory, one that fits if the search finds it."""
        from monetlite.solving.smallest import smallest_budget

        profile = self.profile(batch)
        starts = [schedule.choices.steps(profile.graph) for schedule in self.found[-2:]]
        found = smallest_budget(profile, seconds=seconds, seed=seed, starts=starts, enough_bytes=self.budget_bytes)
        self.bound_bytes[batch] = max(self.bound_bytes.get(batch, 0), found.smallest_proven_bytes)
        steps, peak_bytes = found.smallest_reached_steps, found.smallest_reached_bytes
        if steps is None or peak_bytes is None:
            return None
        self.reached_bytes[batch] = self._takes_bytes(batch, steps)
        if peak_bytes <= self.budget_bytes < self.reached_bytes[batch]:
            # Another schedule's requests may leave smaller gaps than those of the smallest peak.
            with suppress(InfeasibleBudget):
                return solve_budget(profile, self.budget_bytes, replace(self.options, time_limit=seconds))
        solution = Solution.of_steps(profile, steps, method="search", seconds=seconds)
        return as_schedule(profile, peak_bytes, solution, self.options.tolerance)

    def nothing_fits(self) -> InfeasibleBudget:
        """The error where not even the smallest batch fits."""
        from monetlite.solving.smallest import smallest_budget

        batch = self.step
        proven = not self.possible(batch)
        plain_bytes = (self.plain or self).plain_bytes
        needed_bytes = self.bound_bytes[batch] if proven else self.reached_bytes.get(batch, plain_bytes[batch])
        how = "at least, by any schedule" if proven else "by the leanest schedule found"
        profile = self.profile(batch)
        steps = smallest_budget(profile, seconds=MIN_SECONDS, seed=self.options.seed).smallest_reached_steps
        steps = plain_steps(profile.graph) if steps is None else steps
        least = LeastPeak.of_steps(profile, steps, others=tuple(known_schedules(profile)))
        return InfeasibleBudget(
            f"a batch of {batch:,} needs {format_bytes(needed_bytes)} {how}, more than the budget of "
            f"{format_bytes(self.budget_bytes)}; "
            f"the smallest peak reached is {format_bytes(least.peak_bytes)}, {least.place()}.\n"
            f"{least.advice(self.budget_bytes)}",
            budget_bytes=self.budget_bytes,
            proven_bytes=needed_bytes if proven else 0,
            reached_bytes=None if proven else needed_bytes,
        )

    def point(self, batch: int, seconds: float) -> BatchPoint:
        """Plain training at a batch if that fits, else a schedule that is solved for so long.

        Raises:
            InfeasibleBudget: no schedule was found.
        """
        profile, of_plain = self.profile(batch), (self.plain or self).profile(batch)
        plain = simulate(of_plain, plain_steps(of_plain.graph))
        if self.plain_fits(batch):
            return BatchPoint(
                batch=batch,
                peak_bytes=plain.peak_bytes,
                latency_ms=plain.latency_ms,
                reserved_bytes=(self.plain or self).plain_bytes[batch] if self.options.reserved else None,
                schedule=None,
                overhead=0.0,
            )
        options = replace(self.options, time_limit=seconds)
        schedule = solve_budget(profile, self.budget_bytes, options, starts=self.found[-2:])
        self.found.append(schedule)  # it fits every smaller batch, too
        return BatchPoint(
            batch=batch,
            peak_bytes=schedule.peak_bytes,
            latency_ms=schedule.latency_ms,
            reserved_bytes=schedule.reserved_bytes,
            schedule=schedule,
            overhead=schedule.latency_ms / plain.latency_ms - 1,
        )

    def _guess(self, needed: dict[int, int], low: int, high: int | None) -> int | None:
        """The batch at which a line through the two batches nearest to the limit meets the budget.

        Where only one is known, the line begins with what a batch of none would need: weights and their gradients.
        """
        near = sorted(needed, key=lambda batch: abs(batch - (low if high is None else high)))[:2]
        known = [(batch, needed[batch]) for batch in near]
        if len(known) == 1:
            graph = self.profile(near[0]).graph
            gradients = (value.size_bytes for value in graph.values if value.kind is ValueKind.PARAM_GRAD)
            known.append((0, graph.resident.total - graph.resident.inputs + sum(gradients)))
        if len(known) < 2:
            return None
        (one, one_bytes), (other, other_bytes) = known
        slope = (other_bytes - one_bytes) / (other - one)
        return int(one + (self.budget_bytes - one_bytes) / slope) if slope > 0 else None


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
