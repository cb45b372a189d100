"""How far a solve has come: the best schedule and the best bound so far, whoever found them."""

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
from monetlite.solving.bounds import smallest_budget_bound, trivial_bound_ms
from monetlite.solving.guide import guided_steps
from monetlite.solving.layout import Integers
from monetlite.solving.options import Outline
from monetlite.solving.relaxation import Meaning
from monetlite.solving.zero_one import Floats

PROVEN_GAP = 4e-6
"""A bound closer than this, relatively, proves an optimum: branch and bound gives up 2e-6 for tolerances."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How a solve stands: latencies in ms (infinite while nothing is found), bytes, and seconds."""

    latency_ms: float
    lower_bound_ms: float
    peak_bytes: int | None
    seconds: float
    phase: str

    @property
    def gap(self) -> float:
        """(latency − bound) / latency; 1 while nothing is found."""
        if not math.isfinite(self.latency_ms):
            return 1.0
        return max(0.0, 1 - self.lower_bound_ms / self.latency_ms) if self.latency_ms > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What a solve found and what it proved.

    Attributes:
        status: optimal, feasible, infeasible (proven) or timeout (nothing found, nothing proven).
        steps, latency_ms, peak_bytes: the best schedule within the budget; None if there is none.
        lower_bound_ms: no schedule within the budget is faster.
        smallest_proven_bytes: no budget below it is feasible.
        smallest_reached_bytes, smallest_reached_steps: the smallest peak of any schedule that was seen.
        solver: the methods that contributed. seconds: how long it took.
        reserved_bytes: the limit on reserved memory that the steps keep to; without steps, that of the leanest
            schedule seen. None for a budget of the peak.
    """

    status: Status
    steps: tuple[Step, ...] | None
    latency_ms: float | None
    peak_bytes: int | None
    lower_bound_ms: float
    smallest_proven_bytes: int
    smallest_reached_bytes: int | None
    smallest_reached_steps: tuple[Step, ...] | None
    solver: str
    seconds: float
    reserved_bytes: int | None = None

    @classmethod
    def of_steps(cls, profile: Profile, steps: tuple[Step, ...], *, solver: str, seconds: float = 0.0) -> Self:
        """What is known where there is a schedule, and nothing is proven.

        Raises:
            IllegalSchedule: the steps are not one.
        """
        timeline = simulate(profile, steps)
        return cls(
            status=Status.FEASIBLE,
            steps=steps,
            latency_ms=timeline.latency_ms,
            peak_bytes=timeline.peak_bytes,
            lower_bound_ms=0.0,
            smallest_proven_bytes=0,
            smallest_reached_bytes=timeline.peak_bytes,
            smallest_reached_steps=steps,
            solver=solver,
            seconds=seconds,
        )


class Race:
    """The best steps and the best bound so far, from whichever method and thread."""

    def __init__(
        self, profile: Profile, budget_bytes: int, deadline: float, report: Callable[[Progress], None] | None
    ) -> None:
        self.profile = profile
        self.budget_bytes = budget_bytes
        self.began = time.monotonic()
        self.deadline = deadline
        self.report = report
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.steps: tuple[Step, ...] | None = None
        self.latency_ms = math.inf
        self.peak_bytes: int | None = None
        self.bound_ms = trivial_bound_ms(profile)
        self.proven_bytes = smallest_budget_bound(profile)
        self.leanest: tuple[Step, ...] | None = None
        self.leanest_bytes: int | None = None
        self.methods: list[str] = []
        self.guides: list[tuple[Step, ...]] = []
        self.tight: Integers | None = None
        """Of the first schedule, where it took aiming at memory alone to find one."""
        self.bounding = False
        self.failure: BaseException | None = None
        self.phase = "start"

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def proven(self) -> bool:
        """Whether the best steps are known to be optimal."""
        return self.steps is not None and self.latency_ms <= self.bound_ms * (1 + PROVEN_GAP)

    def should_stop(self) -> bool:
        return self.stopped.is_set() or self.left <= 0 or self.proven

    def offer(self, steps: Iterable[Step], method: str) -> None:
        """Take steps that a method proposes, if they are legal and better."""
        steps = tuple(steps)
        try:
            timeline = simulate(self.profile, steps)
        except IllegalSchedule:
            return
        with self.lock:
            if self.leanest_bytes is None or timeline.peak_bytes < self.leanest_bytes:
                self.leanest, self.leanest_bytes = steps, timeline.peak_bytes
            if timeline.peak_bytes > self.budget_bytes:
                return
            # Ties are broken by what was found, never by who came first.
            known = (self.latency_ms, self.peak_bytes or 0, self.steps or ())
            if (timeline.latency_ms, timeline.peak_bytes, steps) >= known:
                return
            self.steps, self.latency_ms, self.peak_bytes = steps, timeline.latency_ms, timeline.peak_bytes
            if method not in self.methods:
                self.methods.append(method)
        self.tell()

    def raise_bound(self, bound_ms: float, method: str) -> None:
        """Take a bound that is valid for every schedule."""
        with self.lock:
            if not bound_ms > self.bound_ms:
                return
            if math.isinf(bound_ms):
                # Only a solver that met a cutoff, or found no schedule within its tolerances, says so.
                return
            self.bound_ms = bound_ms
            if method not in self.methods:
                self.methods.append(method)
        self.tell()

    def guide(self, outline: Outline, meaning: Meaning, solution: Floats) -> None:
        """Let the search begin from what a solution of the relaxation amounts to."""
        steps = guided_steps(outline, meaning, solution)
        if steps is not None:
            self.guides.append(steps)

    def tell(self) -> None:
        if self.report is not None:
            self.report(
                Progress(
                    latency_ms=self.latency_ms,
                    lower_bound_ms=min(self.bound_ms, self.latency_ms),
                    peak_bytes=self.peak_bytes,
                    seconds=time.monotonic() - self.began,
                    phase=self.phase,
                )
            )


__all__ = ["PROVEN_GAP", "Progress", "Race", "Solution"]
