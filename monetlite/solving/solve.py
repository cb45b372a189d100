"""One entry to every solving method: anytime, within a time limit, and honest about what is proven."""

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from monetlite.costs import Profile
from monetlite.errors import IllegalSchedule
from monetlite.schedule import Status, Step, plain_steps, simulate
from monetlite.solving import baselines
from monetlite.solving.bounds import smallest_budget_bound, trivial_bound_ms
from monetlite.solving.exhaustive import exhaustive
from monetlite.solving.options import Outline
from monetlite.solving.smallest import SMALL_OPERATORS, smallest_budget

PROVEN_GAP = 1e-9
"""Latencies closer than this, relatively, are the same: rounding of sums."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How a solve stands: latencies in ms (infinite while nothing is found), bytes, seconds since it began."""

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
        status: optimal, feasible, infeasible (proven) or timeout (nothing found, and infeasibility not proven).
        steps, latency_ms, peak_bytes: the best schedule within the budget; None if there is none.
        lower_bound_ms: no schedule within the budget is faster.
        smallest_proven_bytes: no budget below it is feasible.
        smallest_reached_bytes, smallest_reached_steps: the smallest peak of any schedule that was seen.
        solver: the methods that contributed. seconds: how long it took.
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


class _Race:
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
        """Take steps that a method proposes, if they are legal and better; what they promise is not believed."""
        steps = tuple(steps)
        try:
            timeline = simulate(self.profile, steps)
        except IllegalSchedule:
            return
        with self.lock:
            if self.leanest_bytes is None or timeline.peak_bytes < self.leanest_bytes:
                self.leanest, self.leanest_bytes = steps, timeline.peak_bytes
            if timeline.peak_bytes > self.budget_bytes or timeline.latency_ms >= self.latency_ms:
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
            self.bound_ms = bound_ms
            if method not in self.methods:
                self.methods.append(method)
        self.tell()

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


def solve_profile(
    profile: Profile,
    budget_bytes: int,
    *,
    time_limit: float = 60.0,
    seed: int = 0,
    solver: str = "SCIP",
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the fastest schedule within a memory budget, and bound how much faster any could be.

    Args:
        profile: the graph and its costs.
        budget_bytes: no step may need more memory.
        time_limit: seconds after which the best so far is returned; Ctrl-C does the same at once.
        seed: of the searches.
        solver: which solver takes the boolean program: SCIP, HIGHS or GUROBI.
        starts: steps to begin from, such as a schedule for another budget; illegal ones are ignored.
        progress: told whenever the incumbent or the bound improves.

    Raises:
        SolverError: `solver` is unknown or not installed.
    """
    race = _Race(profile, budget_bytes, time.monotonic() + time_limit, progress)
    infeasible = False
    try:
        infeasible = _run(race, seed=seed, solver=solver, starts=tuple(starts))
    except KeyboardInterrupt:
        pass
    finally:
        race.stopped.set()
    return _solution(race, infeasible)


def _run(race: _Race, *, seed: int, solver: str, starts: tuple[tuple[Step, ...], ...]) -> bool:
    """Try the methods in turn, cheapest first; returns whether infeasibility was proven."""
    profile, budget_bytes = race.profile, race.budget_bytes
    if not Outline.of(profile).runnable:
        return True
    if budget_bytes < race.proven_bytes:
        _find_smallest(race, seed)
        return True
    race.phase = "baselines"
    race.offer(plain_steps(profile.graph), "plain")
    for steps in starts:
        race.offer(steps, "start")
    race.offer(baselines.store_all(profile), "store all")
    if race.should_stop():
        return False
    race.phase = "exhaustive"
    if len(profile.graph.operators) <= SMALL_OPERATORS:
        exact = exhaustive(profile, budget_bytes, seconds=0.3 * race.left, should_stop=race.should_stop)
        if exact.steps is not None:
            race.offer(exact.steps, "exhaustive")
        if exact.complete and exact.steps is None:
            _find_smallest(race, seed)
            race.proven_bytes = max(race.proven_bytes, budget_bytes + 1)
            return True
        race.raise_bound(exact.lower_bound_ms, "exhaustive")
    if race.should_stop():
        return False
    race.phase = "search"
    from monetlite.solving.search import search

    found = search(
        profile,
        budget_bytes,
        seconds=max(0.1, race.left),
        seed=seed,
        starts=() if race.steps is None else (race.steps,),
        on_improvement=lambda better: race.offer(better.steps, "search"),
        should_stop=race.should_stop,
    )
    if found is not None:
        race.offer(found.steps, "search")
    return False


def _find_smallest(race: _Race, seed: int) -> None:
    """Bracket the smallest feasible budget, in what time is left but no more than a few seconds."""
    race.phase = "smallest budget"
    starts = () if race.leanest is None else (race.leanest,)
    smallest = smallest_budget(
        race.profile,
        seconds=min(5.0, max(0.1, race.left)),
        seed=seed,
        starts=starts,
        should_stop=race.stopped.is_set,
    )
    race.proven_bytes = max(race.proven_bytes, smallest.proven_bytes)
    if smallest.steps is not None:
        race.offer(smallest.steps, "smallest")


def _solution(race: _Race, infeasible: bool) -> Solution:
    bound_ms = race.bound_ms
    if race.steps is not None:
        # Sums in another order differ in their last bits; more than that would be a wrong bound.
        assert bound_ms <= race.latency_ms * (1 + 1e-6) + 1e-12, "a bound exceeds a schedule's latency"
        bound_ms = min(bound_ms, race.latency_ms)
    if race.steps is not None:
        status = Status.OPTIMAL if race.proven else Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if infeasible else Status.TIMEOUT
    return Solution(
        status=status,
        steps=race.steps,
        latency_ms=None if race.steps is None else race.latency_ms,
        peak_bytes=race.peak_bytes,
        lower_bound_ms=bound_ms,
        smallest_proven_bytes=race.proven_bytes,
        smallest_reached_bytes=race.leanest_bytes,
        smallest_reached_steps=race.leanest,
        solver=" + ".join(race.methods),
        seconds=time.monotonic() - race.began,
    )
