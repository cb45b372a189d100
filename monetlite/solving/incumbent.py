"""The state of a solve: the best schedule and the best bound so far, by any method and any thread."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.problem import Problem

_LOG = logging.getLogger(__name__)

PROVEN_GAP = 4e-6
"""A bound closer than this, relatively, proves an optimum: branch and bound gives up 2e-6 for tolerances."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The result of every method: what was found and what was proven, at the end or so far.

    Attributes:
        status: optimal, feasible, infeasible (proven) or timeout (nothing found, nothing proven).
        steps, latency_ms, peak_bytes: the best schedule within the budget; None if there is none.
        lower_bound_ms: no schedule within the budget is faster.
        smallest_proven_bytes: no budget below it is feasible.
        smallest_reached_bytes, smallest_reached_steps: the smallest peak of any schedule that was seen.
        reserved_bytes: for a budget of reserved memory, the least that torch's CUDA allocator can be limited to for
            the steps; without steps, for any schedule that was seen.
        seconds: time taken.
        methods: those that improved the schedule or the bound, in the order of their first improvement.
        phase: the method at work when this was reported.
    """

    status: Status
    steps: tuple[Step, ...] | None = None
    latency_ms: float | None = None
    peak_bytes: int | None = None
    lower_bound_ms: float = 0.0
    smallest_proven_bytes: int = 0
    smallest_reached_bytes: int | None = None
    smallest_reached_steps: tuple[Step, ...] | None = None
    reserved_bytes: int | None = None
    seconds: float = 0.0
    methods: tuple[str, ...] = ()
    phase: str = ""

    @classmethod
    def of_steps(cls, profile: Profile, steps: tuple[Step, ...], *, method: str, seconds: float = 0.0) -> Self:
        """A schedule of which nothing is proven.

        Raises:
            IllegalSchedule: the steps are not a schedule.
        """
        timeline = simulate(profile, steps)
        return cls(
            status=Status.FEASIBLE,
            steps=steps,
            latency_ms=timeline.latency_ms,
            peak_bytes=timeline.peak_bytes,
            smallest_reached_bytes=timeline.peak_bytes,
            smallest_reached_steps=steps,
            seconds=seconds,
            methods=(method,),
        )

    @property
    def solver(self) -> str:
        """The methods, as schedule files name them."""
        return " + ".join(self.methods)

    @property
    def gap(self) -> float:
        """(latency − bound) / latency; 1 while nothing is found."""
        if self.latency_ms is None:
            return 1.0
        return max(0.0, 1 - self.lower_bound_ms / self.latency_ms) if self.latency_ms > 0 else 0.0


class Incumbent:
    """The best steps and the best bounds so far. Every offer is checked by `simulate`.

    Args:
        problem: to solve.
        budget_bytes: no step may need more memory.
        report: told whenever the schedule or the bound improves.

    Attributes:
        smallest_steps, smallest_bytes: the steps with the smallest peak, within the budget or not.
        proven_bytes: no budget below it is feasible.
    """

    def __init__(
        self, problem: Problem, budget_bytes: int, report: Callable[[Solution], None] | None = None
    ) -> None:
        self.problem = problem
        self.budget_bytes = budget_bytes
        self.phase = ""
        self.steps: tuple[Step, ...] | None = None
        self.latency_ms = math.inf
        self.peak_bytes: int | None = None
        self.bound_ms = problem.least_latency_ms
        self.proven_bytes = problem.resident_bytes
        self.smallest_steps: tuple[Step, ...] | None = None
        self.smallest_bytes: int | None = None
        self._methods: list[str] = []
        self._report = report
        self._began = time.monotonic()
        self._lock = threading.RLock()

    def proven(self, gap: float = 0.0) -> bool:
        """True if no schedule is faster than the best by more than this part of its time; 0: if it is optimal."""
        return self.steps is not None and (1 - gap) * self.latency_ms <= self.bound_ms * (1 + PROVEN_GAP)

    def offer(self, steps: Iterable[Step], method: str) -> bool:
        """Take steps if they are legal and better; False if they are illegal or over the budget."""
        steps = tuple(steps)
        try:
            timeline = simulate(self.problem.profile, steps)
        except IllegalSchedule:
            return False
        with self._lock:
            if self.smallest_bytes is None or timeline.peak_bytes < self.smallest_bytes:
                self.smallest_steps, self.smallest_bytes = steps, timeline.peak_bytes
            if timeline.peak_bytes > self.budget_bytes:
                return False
            # Ties are broken by what was found, never by who came first.
            known = (self.latency_ms, self.peak_bytes or 0, self.steps or ())
            if (timeline.latency_ms, timeline.peak_bytes, steps) >= known:
                return True
            self.steps, self.latency_ms, self.peak_bytes = steps, timeline.latency_ms, timeline.peak_bytes
            self._tell(method)
        return True

    def raise_bound(self, bound_ms: float, method: str) -> None:
        """Take a bound on the latency of every schedule within the budget.

        Infinite ones are ignored: they come from a solver that met a cutoff, or found nothing within its
        tolerances.
        """
        with self._lock:
            if not self.bound_ms < bound_ms < math.inf:
                return
            self.bound_ms = bound_ms
            self._tell(method)

    def raise_smallest(self, proven_bytes: int) -> None:
        """Take a number of bytes below which nothing fits."""
        self.proven_bytes = max(self.proven_bytes, proven_bytes)

    def solution(self, *, infeasible: bool = False) -> Solution:
        """Everything so far; `infeasible` if that is proven."""
        bound_ms = self.bound_ms
        # Sums in another order differ in their last bits; more than that is a wrong bound, and proves nothing.
        if bound_ms > self.latency_ms * (1 + 1e-6) + 1e-12:
            _LOG.error(
                "the bound of %g ms exceeds a schedule's latency of %g ms: an error in monetlite; please report "
                "it. No bound is claimed beyond each operator's fastest run",
                bound_ms,
                self.latency_ms,
            )
            self.bound_ms = bound_ms = self.problem.least_latency_ms
        if self.steps is None:
            status = Status.INFEASIBLE if infeasible else Status.TIMEOUT
        else:
            status = Status.OPTIMAL if self.proven() else Status.FEASIBLE
        return Solution(
            status=status,
            steps=self.steps,
            latency_ms=None if self.steps is None else self.latency_ms,
            peak_bytes=self.peak_bytes,
            lower_bound_ms=min(bound_ms, self.latency_ms),
            smallest_proven_bytes=self.proven_bytes,
            smallest_reached_bytes=self.smallest_bytes,
            smallest_reached_steps=self.smallest_steps,
            seconds=time.monotonic() - self._began,
            methods=tuple(self._methods),
            phase=self.phase,
        )

    def _tell(self, method: str) -> None:
        """Note the method, and report; under the lock, so that reports come in order."""
        if method not in self._methods:
            self._methods.append(method)
        if self._report is not None:
            self._report(self.solution())
