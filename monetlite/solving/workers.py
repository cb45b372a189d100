"""What the threads of a search do: runs from the start that compete, runs from guides, runs from the best.

Each has its own best schedules; all hand what they find to the thread that called `search`.
"""

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from monetlite.core.steps import Step
from monetlite.solving.annealing import CHUNK_SECONDS, Walker, Workspace, round_down
from monetlite.solving.genomes import keep_everything
from monetlite.solving.layout import Integers
from monetlite.solving.moves import build_moves
from monetlite.solving.problem import Problem

THREADS = 2
"""More threads than this find little more in a minute, and training machines have other work."""

EXPLORING_SHARE = 0.7
"""Part of the time that goes to runs from the start; the rest goes to refining the best schedules."""

TIGHT_EXPLORING_SHARE = 0.3
"""The same where hardly anything fits."""

BRACKET = 8
HALVING = ((0.2, 3), (0.4, 1))
"""How many runs explore side by side; after which part of them how many go on, those with the least cost.

Where a run ends up is mostly decided by then: on ResNet-50 the cost at a fifth of a run has a correlation of
about 0.8 with the latency at its end, at two fifths of about 0.9. (Successive halving, Jamieson & Talwalkar, 2016.)
"""

SMALL_PROBLEM = 12
"""With at most this many droppable values, the search ends after a few runs without improvement."""

IDLE_RUNS = 6


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """One run of annealing: start temperature over the mean latency of an operator, and first penalty over
    latency by peak."""

    temperature: float
    penalty: float


EXPLORING = (
    _Plan(temperature=0.3, penalty=0.17),
    _Plan(temperature=0.6, penalty=0.17),
    _Plan(temperature=0.3, penalty=0.6),
    _Plan(temperature=1.5, penalty=0.17),
    _Plan(temperature=0.4, penalty=0.3),
)
"""Runs from the first schedule, in turn."""

REFINING = tuple(_Plan(temperature=temperature, penalty=1.0) for temperature in (0.1, 0.2, 0.06, 0.3, 0.15))
"""Runs from the best schedule, in turn."""

FOLLOWING = tuple(_Plan(temperature=temperature, penalty=1.0) for temperature in (0.05, 0.1, 0.2))
"""Runs from a guide."""

TIGHT_PENALTY = 10.0
"""What penalties are multiplied by within a tight budget: with less, runs leave what fits and don't come back."""

LAST_PENALTY = 3.0
COOLING = 30.0
"""Start temperature over end temperature; below, nothing moves any more."""

RUN_LENGTH = 700
"""Iterations of a run, over droppable values: results vary so much that many short runs beat long ones."""

FIRST_RUN = 0.25
"""The length of the very first run over that of the others: something good soon."""

REFINING_RUN = 0.5

MOST_STARTS = 4
"""Schedules that runs begin from, beside the one that drops nothing."""

ELITE = 6
"""Best genomes of different latencies that refining starts from."""

LONGEST_RUN = 0.12
"""Part of the time that a run takes at most."""


class SharedState:
    """State that the workers of one search share."""

    def __init__(self, problem: Problem, budget_bytes: int, deadline: float, seed: int) -> None:
        self.problem = problem
        self.moves = build_moves(problem)
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.seed = seed
        self.stop = threading.Event()
        self.found: queue.Queue[tuple[Step, ...] | BaseException | None] = queue.Queue()
        self.best_genome = keep_everything(problem)
        self.best_latency_ms = math.inf
        self.genomes = [self.best_genome]
        """Where runs begin, in turn."""
        self.guides: list[Integers] = []
        self.tight = False
        """Whether hardly anything fits the budget."""
        self.neighbour_busy: Callable[[], bool] | None = None

    def finished(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.deadline

    def crowded(self) -> bool:
        """Whether every thread would take time from the others."""
        busy = self.neighbour_busy is not None and self.neighbour_busy()
        return busy and (os.cpu_count() or 1) <= THREADS

    def work(self, number: int) -> None:
        """What a worker does, from its thread."""
        try:
            self._anneal_repeatedly(number)
        except BaseException as error:
            self.found.put(error)
        finally:
            self.found.put(None)

    def _anneal_repeatedly(self, number: int) -> None:
        worker = Worker(self, number)
        exploring = TIGHT_EXPLORING_SHARE if self.tight else EXPLORING_SHARE
        while not self.finished():
            if worker.idle >= IDLE_RUNS and self.problem.droppable.size <= SMALL_PROBLEM:
                return
            if number > 0 and self.crowded():
                time.sleep(CHUNK_SECONDS)
            elif worker.guided < len(self.guides) and worker.turn > 0:
                worker.follow()
            elif worker.turn == 0 or worker.best_ms == math.inf or worker.spent < exploring:
                worker.explore()
            else:
                worker.refine()


class Worker:
    """What one thread of a search knows and does."""

    def __init__(self, search: SharedState, number: int) -> None:
        self.search = search
        self.number = number
        self.workspace = Workspace(search.problem, search.moves, search.seed * THREADS + number)
        self.best_ms = search.best_latency_ms
        self.elite: list[tuple[float, Integers]] = []
        if self.best_ms < math.inf:
            self.elite.append((self.best_ms, search.best_genome.copy()))
        self.total_seconds = max(1e-9, search.deadline - time.monotonic())
        self.turn = 0
        self.idle = 0
        self.guided = 0
        """How many guides it has followed."""
        self.penalty_scale = (search.problem.least_latency_ms or 1.0) / max(1, search.problem.plain_peak_bytes)
        if search.tight:
            self.penalty_scale *= TIGHT_PENALTY

    @property
    def spent(self) -> float:
        """The share of the time that is over."""
        return 1 - (self.search.deadline - time.monotonic()) / self.total_seconds

    def explore(self) -> None:
        """A bracket of runs from the start, of which the most promising go on; the first time one short run."""
        first = self.turn == 0
        plan = EXPLORING[(self.turn + self.number) % len(EXPLORING)]
        starts = self.search.genomes
        walkers = [
            self._walker(starts[(self.turn + run) % len(starts)], plan, FIRST_RUN if first else 1.0)
            for run in range(1 if first else BRACKET)
        ]
        self.turn += 1
        for share, left in HALVING:
            for walker in walkers:
                self._advance(walker, share)
            walkers = sorted(walkers, key=lambda walker: walker.recent_cost)[:left]
        for walker in walkers:
            self._advance(walker, 1.0)
            self._note(walker)
        if self.best_ms == math.inf:
            self._find_anything(walkers[0])

    def follow(self) -> None:
        """Refine the latest guide, with hardly any heat: the better it is, the less there is to change."""
        self.guided = len(self.search.guides)
        for plan in FOLLOWING:
            walker = self._walker(self.search.guides[self.guided - 1], plan, REFINING_RUN)
            self._advance(walker, 1.0)
            self._note(walker)

    def refine(self) -> None:
        """A run from one of the best schedules, with a little less heat, which may copy parts of the others."""
        self.turn += 1
        plan = REFINING[(self.turn + self.number) % len(REFINING)]
        start = self.elite[self.turn % len(self.elite)][1]
        walker = self._walker(start, plan, REFINING_RUN)
        self._advance(walker, 1.0, elite=numpy.array([genome for _, genome in self.elite]))
        self._note(walker)

    def _walker(self, genome: Integers, plan: _Plan, length: float) -> Walker:
        """A run as long as it should be and the time that is left allows."""
        affordable = self.workspace.rate * self.total_seconds * min(LONGEST_RUN, 1 - self.spent)
        iterations = round_down(min(length * RUN_LENGTH * self.search.problem.droppable.size, affordable))
        hot = plan.temperature * self.workspace.mean_ms
        penalties = plan.penalty * self.penalty_scale, LAST_PENALTY * self.penalty_scale
        return Walker(genome, (hot, hot / COOLING, *penalties, 1.0), iterations)

    def _advance(self, walker: Walker, share: float, elite: Integers | None = None) -> None:
        before_ms = walker.best_ms
        self.workspace.advance(walker, self.search.budget_bytes, share, self.search.finished, elite=elite)
        if walker.best_ms < min(before_ms, self.best_ms):
            self._tell(walker)

    def _find_anything(self, walker: Walker) -> None:
        """Nothing fits yet: from where a run ended, look for anything that does."""
        hot_bytes = 0.01 * self.search.problem.plain_peak_bytes
        lean = Walker(walker.genome, (hot_bytes, hot_bytes / 1000, 1.0, 1.0, 0.0), walker.total)
        self.workspace.advance(lean, self.search.budget_bytes, 1.0, self.search.finished, stop_when_fits=True)
        if lean.best_ms < math.inf:
            self._tell(lean)

    def _tell(self, walker: Walker) -> None:
        """Hand the best of a run on."""
        self.best_ms = walker.best_ms
        self.idle = -1
        self._remember(walker)
        steps = self.workspace.steps(walker.best, self.search.budget_bytes)
        if steps is not None:
            self.search.found.put(steps)

    def _note(self, walker: Walker) -> None:
        """Account for a run that ended."""
        self.idle += 1
        if walker.best_ms < math.inf:
            self._remember(walker)

    def _remember(self, walker: Walker) -> None:
        """Keep the best of a run, if there are few better ones."""
        if all(latency_ms != walker.best_ms for latency_ms, _ in self.elite):
            self.elite.append((walker.best_ms, walker.best.copy()))
            self.elite.sort(key=lambda member: member[0])
            del self.elite[ELITE:]
