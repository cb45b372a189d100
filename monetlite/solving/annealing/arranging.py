"""Runs of annealing towards fast schedules whose tensors lie without gaps, within a limit on reserved memory.

The gaps that are left between blocks depend on the order of every request, and change with any of them: two
schedules that are equally fast, and need as much memory, may reserve 1.3 times their peak and 1.01 times. So runs
lower a schedule's latency and the memory that the allocator on paper reserves beyond the limit.
"""

import math
from collections.abc import Sequence

from monetlite.allocator.allocator import PAGE_BYTES, SMALL_PAGE
from monetlite.allocator.reserved import reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.interrupts import end_early
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.annealing.compiled import REFRESH, AnnealingCost, Integers
from monetlite.solving.annealing.compiling import ensure_compiled
from monetlite.solving.annealing.flat_problem import encode, flatten
from monetlite.solving.annealing.runs import NEVER_FITS, AnnealingRun, Workspace
from monetlite.solving.clock import now
from monetlite.solving.problem import Problem

GIVE_UP = 0.75
"""Part of the time after which it ends if it has found nothing."""
_RUNS = (
    (0.0008, 0.5, 4.0),
    (0.0003, 0.5, 6.0),
    (0.0003, 1.0, 20.0),
    (0.0008, 0.5, 6.0),
    (0.0003, 1.0, 20.0),
    (0.0001, 2.0, 40.0),
)
"""Runs, each from where the last one was best: the start temperature, in parts of the step time, and the price of
reserving more by the whole limit, likewise, at the beginning and in the end."""
_COLDEST = 0.00001
"""The temperature in the end."""
_PEAK_SHARES = (1.0, 0.98, 0.95, 0.9)
"""Peaks that implementations are chosen for, as parts of the limit."""
_RUNS_PER_HEAT = 2
_CHECKS = 20
"""Times that the best schedule of a run is checked by the whole allocator."""


def arrange(
    profile: Profile,
    starts: Sequence[tuple[Step, ...]],
    limit_bytes: int,
    *,
    seconds: float,
    seed: int = 0,
) -> tuple[Step, ...] | None:
    """Look for a fast schedule that runs within a limit on reserved memory and gives nothing back.

    Args:
        profile: the graph and its costs, on a GPU.
        starts: legal schedules to begin from, whatever they reserve.
        limit_bytes: the most that the allocator may reserve with expandable segments, resident memory included.
        seconds: how long to look.
        seed: of the changes.

    Ctrl-C ends it early, outside of `interrupts_kept`.

    Returns:
        The steps of the fastest schedule found, or None.
    """
    began = now()
    if not ensure_compiled(began + seconds):
        return None
    arrangement = _Arrangement(profile, limit_bytes, seed)
    try:
        arrangement.anneal(starts, began, seconds)
    except KeyboardInterrupt:
        end_early()
    return arrangement.best


class _Arrangement:
    """The best schedule so far that keeps to the limit, and the runs that look for it."""

    def __init__(self, profile: Profile, limit_bytes: int, seed: int) -> None:
        self.profile = profile
        self.limit_bytes = limit_bytes
        self.flat = flatten(Problem.of(profile))
        self.workspace = Workspace(self.flat, seed)
        self.room_bytes = limit_bytes - PAGE_BYTES - profile.graph.resident.total
        self.best: tuple[Step, ...] | None = None
        self.best_ms = math.inf

    def anneal(self, starts: Sequence[tuple[Step, ...]], began: float, seconds: float) -> None:
        """Run after run, each from the best end before it, until the time is up."""
        if not starts or not self.flat.droppable.size:
            return
        step_ms = min(simulate(self.profile, steps).latency_ms for steps in starts)
        trials: list[AnnealingRun] = []
        for steps in starts:
            for share in _PEAK_SHARES:
                trial = self._run(encode(self.flat, steps), share, _RUNS[0], step_ms, REFRESH)
                self._advance(trial, began + seconds / 4)
                trials.append(trial)
        present = min(trials, key=_rank)
        share = present.cost.budget_bytes / self.limit_bytes
        for number in range(_RUNS_PER_HEAT * len(_RUNS)):
            if self.best is None and now() >= began + GIVE_UP * seconds:
                return
            until = began + seconds * (number + 1) / (_RUNS_PER_HEAT * len(_RUNS))
            left = until - now()
            if left <= 0:
                continue
            # Every other run chooses implementations for another peak.
            tried = share if number % 2 == 0 else _PEAK_SHARES[number // 2 % len(_PEAK_SHARES)]
            start = present.best if present.best_ms < math.inf else present.choices
            run = self._run(start, tried, _RUNS[number // _RUNS_PER_HEAT], step_ms, int(self.workspace.rate * left))
            self._advance(run, until)
            if _rank(run) <= _rank(present):
                present, share = run, tried

    def _run(
        self, start: Integers, share: float, heat: tuple[float, float, float], step_ms: float, iterations: int
    ) -> AnnealingRun:
        hottest, cheapest, dearest = heat
        cost = AnnealingCost(
            budget_bytes=int(self.limit_bytes * share),
            reserved=True,
            room_bytes=self.room_bytes,
            strict_penalty=NEVER_FITS * self.flat.mean_ms,
        )
        temperatures = hottest * step_ms, _COLDEST * step_ms
        penalties = cheapest * step_ms / self.limit_bytes, dearest * step_ms / self.limit_bytes
        return AnnealingRun(start, cost, temperatures, penalties, max(REFRESH, iterations))

    def _advance(self, run: AnnealingRun, until: float) -> None:
        """Anneal, and look now and then if the best so far keeps to the limit."""
        checked_ms = math.inf
        for check in range(1, _CHECKS + 1):
            self.workspace.advance(run, check / _CHECKS, lambda: now() >= until)
            if run.best_ms >= min(checked_ms, self.best_ms):
                continue
            steps = self.workspace.steps(run.best, run.cost.budget_bytes)
            if steps is not None and self._keeps(steps):
                self.best, self.best_ms = steps, run.best_ms
            else:
                # Small requests need room too.
                self.room_bytes -= SMALL_PAGE
                run.cost = run.cost._replace(room_bytes=self.room_bytes)
                run.forget_best()
            checked_ms = run.best_ms

    def _keeps(self, steps: tuple[Step, ...]) -> bool:
        """True for a legal schedule that runs within the limit, with all of its requests and for some more
        steps."""
        try:
            found = reserve(self.profile, steps, expandable=True, limit_bytes=self.limit_bytes)
            peak_bytes = simulate(self.profile, steps).peak_bytes
        except IllegalSchedule:
            return False
        return found.fits and not found.releases and peak_bytes <= self.limit_bytes


def _rank(run: AnnealingRun) -> tuple[float, float]:
    return run.best_ms, run.recent_cost
