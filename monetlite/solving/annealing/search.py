"""The search for fast schedules: runs of annealing that compete, in two threads.

The choices are what to keep, what to drop again and which groups to read (`compiled`); everything else about a
schedule follows. Runs from the start compete with each other, the best are refined, and the guides that a
relaxation suggests are refined too. Each thread has its own best schedules and offers them to the incumbent.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from monetlite.core.steps import Step
from monetlite.solving import baselines
from monetlite.solving.annealing.compiled import LATENCY, AnnealingCost, Integers
from monetlite.solving.annealing.compiling import ensure_compiled
from monetlite.solving.annealing.flat_problem import encode, flatten, keep_everything, read_least
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.annealing.runs import (
    CHUNK_SECONDS,
    AnnealingRun,
    Workspace,
)
from monetlite.solving.clock import now
from monetlite.solving.incumbent import Incumbent
from monetlite.solving.side_by_side import CORES, THREADS, side_by_side

METHOD = "search"
CHECK_EVERYTHING = 3000
"""With more operators than this `simulate` takes seconds, and only the best known schedule is offered."""
EXPLORING_SHARE, KNOWN_EXPLORING_SHARE = 0.7, 0.3
"""Part of the time for runs from the start; the rest is for refining the best schedules. KNOWN: where a good one is
known, or hardly anything fits."""
BRACKET = 8
HALVING = ((0.2, 3), (0.4, 1))
"""Number of runs that explore side by side; after which part of them how many go on, those with the least cost.

The end of a run is mostly decided by then: on ResNet-50 the cost at a fifth of a run has a correlation of about 0.8
with the latency at its end, at two fifths of about 0.9. (Successive halving, Jamieson & Talwalkar, 2016.)
"""
SMALL_PROBLEM, IDLE_RUNS = 12, 6
"""With at most this many droppable values, the search ends after this many runs without improvement."""
TIGHT_PENALTY = 10.0
"""Factor on penalties within a tight budget: with less, runs leave what fits and don't come back."""
LAST_PENALTY = 3.0
COOLING = 30.0
"""Start temperature over end temperature; below, nothing moves any more."""
RUN_LENGTH = 700
"""Iterations of a run, over droppable values: results vary so much that many short runs beat long ones."""
FIRST_RUN, REFINING_RUN = 0.25, 0.5
"""Length of the very first run, for something good soon, and of a run that refines, over that of the others."""
LONGEST_RUN = 0.12
"""The most of the time that a run takes."""
MAX_STARTS = 4
"""Schedules that runs begin from, beside the one that drops nothing."""
MAX_BEST = 6
"""Best choices of different latencies that refining starts from."""


class _Heat(NamedTuple):
    temperature: float
    """At the start, over the mean latency of an operator."""
    penalty: float
    """At the start, over plain training's latency by peak."""


EXPLORING = (_Heat(0.3, 0.17), _Heat(0.6, 0.17), _Heat(0.3, 0.6), _Heat(1.5, 0.17), _Heat(0.4, 0.3))
"""Runs from the first schedules, in turn."""
REFINING = tuple(_Heat(temperature, 1.0) for temperature in (0.1, 0.2, 0.06, 0.3, 0.15))
"""Runs from the best schedules, in turn."""
FOLLOWING = tuple(_Heat(temperature, 1.0) for temperature in (0.05, 0.1, 0.2))
"""Runs from a guide, in turn."""


def search(
    incumbent: Incumbent,
    *,
    seconds: float,
    seed: int = 0,
    starts: Sequence[tuple[Step, ...]] = (),
    guides: Sequence[tuple[Step, ...]] = (),
    tight: Integers | None = None,
    refining: bool = False,
    neighbour_busy: Callable[[], bool] = lambda: False,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Look for the fastest schedule within the incumbent's budget; proves nothing.

    Args:
        incumbent: what is found is offered to it, from several threads.
        seconds: when to stop; compiling at the first use on a machine counts.
        seed: runs with the same seed that get equally far find the same.
        starts: schedules to begin from, legal ones within the budget or not.
        guides: steps to refine, with implementations or an order that may be illegal; more may be appended
            while the search runs.
        tight: choices that `lower_peak` found for a budget within which hardly anything fits: the search then pays
            more for every byte too much, and begins from them.
        refining: the first of `starts` is good.
        neighbour_busy: True while another thread is computing; on two cores the search then takes one.
        should_stop: asked several times a second.
    """
    deadline = now() + seconds
    known = [*starts, *baselines.known_schedules(incumbent.problem.profile)]
    if not ensure_compiled(deadline, should_stop):
        for steps in known:
            incumbent.offer(steps, METHOD)
        return
    beginning = _begin(incumbent, known, tight, deadline)
    if incumbent.latency_ms <= incumbent.problem.least_latency_ms * (1 + 1e-12):
        return

    def work(number: int, ended: Callable[[], bool]) -> None:
        share = KNOWN_EXPLORING_SHARE if refining or tight is not None else EXPLORING_SHARE
        penalty = 1.0 if tight is None else TIGHT_PENALTY
        _Worker(incumbent, beginning, guides, number, seed, deadline, ended, neighbour_busy, share, penalty).work()

    side_by_side(range(CORES), work, lambda: now() >= deadline or should_stop())


class _Beginning(NamedTuple):
    """Choices that runs begin from, in turn; the latency of the first ones, infinite if they don't fit."""

    starts: list[Integers]
    latency_ms: float


def _begin(
    incumbent: Incumbent, known: Sequence[tuple[Step, ...]], tight: Integers | None, deadline: float
) -> _Beginning:
    """Offer what is known already, with the implementations that suit the budget, and begin from the best."""
    flat, budget_bytes = flatten(incumbent.problem), incumbent.budget_bytes
    workspace = Workspace(flat, 0)
    candidates = [] if tight is None else [tight]
    candidates += [encode(flat, steps) for steps in known]
    for base in (keep_everything(flat), read_least(flat)):
        candidates += [base, *Greedy(flat, budget_bytes, base=base, deadline=deadline).choices()]
    fitting: list[tuple[float, tuple[Step, ...], Integers]] = []
    for choices in candidates:
        steps = workspace.steps(choices, budget_bytes)
        if steps is not None and workspace.fits:
            fitting.append((float(workspace.scratch.totals[LATENCY]), steps, choices))
    fitting.sort(key=lambda candidate: candidate[0])
    legal = next((at for at, (_, steps, _) in enumerate(fitting) if incumbent.offer(steps, METHOD)), len(fitting))
    if not fitting or flat.operator_count <= CHECK_EVERYTHING:
        for steps in known:
            incumbent.offer(steps, METHOD)
    starts = [choices for _, _, choices in fitting[legal : legal + MAX_STARTS]] or [candidates[0]]
    return _Beginning([*starts, keep_everything(flat)], fitting[legal][0] if fitting[legal:] else math.inf)


@dataclass
class _Worker:
    """One thread of a search."""

    incumbent: Incumbent
    beginning: _Beginning
    guides: Sequence[tuple[Step, ...]]
    number: int
    seed: int
    deadline: float
    finished: Callable[[], bool]
    neighbour_busy: Callable[[], bool]
    exploring_share: float
    penalty: float

    def __post_init__(self) -> None:
        self.flat = flatten(self.incumbent.problem)
        self.workspace = Workspace(self.flat, self.seed * THREADS + self.number)
        self.cost = AnnealingCost(budget_bytes=self.incumbent.budget_bytes)
        self.starts, self.best_ms = self.beginning
        self.best: list[tuple[float, Integers]] = []
        """Latencies, with the choices they are of; ascending."""
        if self.best_ms < math.inf:
            self.best.append((self.best_ms, self.starts[0].copy()))
        self.total_seconds = max(1e-9, self.deadline - now())
        self.turn = self.idle = 0
        self.guided = 0
        """Number of guides that were there when it last followed one."""
        latency_ms = self.incumbent.problem.least_latency_ms or 1.0
        self.penalty_scale = self.penalty * latency_ms / max(1, self.flat.plain_peak_bytes)

    def work(self) -> None:
        """Anneal until the time is up, or nothing gets better any more."""
        while not self.finished():
            if self.idle >= IDLE_RUNS and self.flat.droppable.size <= SMALL_PROBLEM:
                return
            if self.number > 0 and self.neighbour_busy() and (os.cpu_count() or 1) <= THREADS:
                time.sleep(CHUNK_SECONDS)
            elif self.guided < len(self.guides) and self.turn > 0:
                self.follow()
            elif self.turn == 0 or self.best_ms == math.inf or self.spent < self.exploring_share:
                self.explore()
            else:
                self.refine()

    @property
    def spent(self) -> float:
        """The share of the time that is over."""
        return 1 - (self.deadline - now()) / self.total_seconds

    def explore(self) -> None:
        """A bracket of runs from the start, of which the most promising go on; the first time one short run."""
        first = self.turn == 0
        heat = EXPLORING[(self.turn + self.number) % len(EXPLORING)]
        runs = [
            self._run(self.starts[(self.turn + at) % len(self.starts)], heat, FIRST_RUN if first else 1.0)
            for at in range(1 if first else BRACKET)
        ]
        self.turn += 1
        for share, left in HALVING:
            for run in runs:
                self._advance(run, share)
            runs = sorted(runs, key=lambda run: run.recent_cost)[:left]
        for run in runs:
            self._advance(run, 1.0)
            self._end(run)
        if self.best_ms == math.inf:
            self._find_anything(runs[0])

    def follow(self) -> None:
        """Refine the latest guide, with hardly any heat: the better it is, the less there is to change."""
        self.guided = len(self.guides)
        guide = encode(self.flat, self.guides[self.guided - 1])
        for heat in FOLLOWING:
            run = self._run(guide, heat, REFINING_RUN)
            self._advance(run, 1.0)
            self._end(run)

    def refine(self) -> None:
        """A run from one of the best schedules, with a little heat, which may copy parts of the others."""
        self.turn += 1
        heat = REFINING[(self.turn + self.number) % len(REFINING)]
        start = self.best[self.turn % len(self.best)][1]
        run = self._run(start, heat, REFINING_RUN)
        self._advance(run, 1.0, others=numpy.array([choices for _, choices in self.best]))
        self._end(run)

    def _run(self, start: Integers, heat: _Heat, length: float) -> AnnealingRun:
        """A run as long as it should be and the time that is left allows."""
        seconds = self.total_seconds * min(LONGEST_RUN, 1 - self.spent)
        iterations = self.workspace.iterations(length * RUN_LENGTH * self.flat.droppable.size, seconds)
        hot = heat.temperature * self.flat.mean_ms
        penalties = heat.penalty * self.penalty_scale, LAST_PENALTY * self.penalty_scale
        return AnnealingRun(start, self.cost, (hot, hot / COOLING), penalties, iterations)

    def _advance(self, run: AnnealingRun, share: float, others: Integers | None = None) -> None:
        before_ms = run.best_ms
        self.workspace.advance(run, share, self.finished, others=others)
        if run.best_ms < min(before_ms, self.best_ms):
            self._tell(run)

    def _find_anything(self, run: AnnealingRun) -> None:
        """Nothing fits yet: from where a run ended, look for anything that does."""
        hot_bytes = 0.01 * self.flat.plain_peak_bytes
        cost = AnnealingCost(budget_bytes=self.incumbent.budget_bytes, weight=0.0)
        lean = AnnealingRun(run.choices, cost, (hot_bytes, hot_bytes / 1000), (1.0, 1.0), run.total)
        self.workspace.advance(lean, 1.0, self.finished, stop_when_fits=True)
        if lean.best_ms < math.inf:
            self._tell(lean)

    def _tell(self, run: AnnealingRun) -> None:
        """Hand the best of a run on."""
        self.best_ms = run.best_ms
        self.idle = -1
        self._remember(run)
        steps = self.workspace.steps(run.best, self.incumbent.budget_bytes)
        if steps is not None:
            self.incumbent.offer(steps, METHOD)

    def _end(self, run: AnnealingRun) -> None:
        """Account for a run that ended."""
        self.idle += 1
        if run.best_ms < math.inf:
            self._remember(run)

    def _remember(self, run: AnnealingRun) -> None:
        """Keep the best of a run, if there are few better ones."""
        if all(latency_ms != run.best_ms for latency_ms, _ in self.best):
            self.best.append((run.best_ms, run.best.copy()))
            self.best.sort(key=lambda member: member[0])
            del self.best[MAX_BEST:]
