"""Incumbents by simulated annealing.

The decisions are what to keep, what to drop again and which groups to read (`kernel`); everything else about
a schedule follows. Several runs with different seeds and temperatures, on two threads; then runs that start
from the best schedule at a lower temperature. Whatever is returned was checked by `simulate`.
"""

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy

from monetlite.costs import Profile
from monetlite.errors import IllegalSchedule
from monetlite.schedule import Step, simulate
from monetlite.solving import baselines
from monetlite.solving.genomes import decode, encode, keep_everything
from monetlite.solving.greedy import Greedy
from monetlite.solving.kernel import anneal
from monetlite.solving.layout import (
    BEST_LATENCY,
    LATENCY,
    OVERFLOW,
    PEAK,
    RECENT_COST,
    REFRESH,
    UNDO_LENGTH,
    Integers,
    Moves,
    new_scratch,
)
from monetlite.solving.moves import build_moves
from monetlite.solving.problem import Problem, build_problem

THREADS = 2
"""More threads than this find little more in a minute, and training machines have other work."""

MOST_RERUNS = 20
"""Steps that a schedule may have, over operators."""

CHUNK_SECONDS = 0.05
"""About how long compiled code runs before it looks at the clock."""

EXPLORING_SHARE = 0.7
"""Part of the time that goes to runs from the start; the rest goes to refining the best schedules."""

BRACKET = 8
HALVING = ((0.2, 3), (0.4, 1))
"""How many runs explore side by side; after which part of them how many go on, those with the least cost.

Where a run ends up is all but decided by then: on ResNet-50 the cost at a fifth of a run has a correlation of
0.85 with the latency at its end, at two fifths of 0.98. (Successive halving, Jamieson & Talwalkar, 2016.)
"""

SMALL_PROBLEM = 12
"""With at most this many droppable values, the search ends after a few runs without improvement."""

IDLE_RUNS = 6

CHECK_EVERYTHING = 3000
"""With more operators than this `simulate` takes seconds, and only the best known schedule is offered."""

NEVER_FITS = 1e9
"""Penalty per byte, over the mean latency of an operator, that no latency makes up for."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Legal steps within the budget, as `simulate` sees them."""

    steps: tuple[Step, ...]
    latency_ms: float
    peak_bytes: int


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


class _Walker:
    """One run of annealing, which may be continued."""

    def __init__(self, genome: Integers, figures: tuple[float, float, float, float, float], total: int) -> None:
        self.genome = genome.copy()
        self.best = genome.copy()
        self.figures = numpy.array(figures, dtype=numpy.float64)
        self.record = numpy.array([numpy.inf, 1.0, numpy.inf])
        self.total = total
        self.at = 0

    @property
    def best_ms(self) -> float:
        """The latency of the best genome so far that fits; infinite if none does."""
        return float(self.record[BEST_LATENCY])

    @property
    def recent_cost(self) -> float:
        return float(self.record[RECENT_COST])


class _Workspace:
    """The arrays of one thread."""

    def __init__(self, problem: Problem, moves: Moves, seed: int) -> None:
        self.problem = problem
        self.moves = moves
        self.scratch = new_scratch(
            problem.value_count, problem.operator_count, MOST_RERUNS * problem.operator_count + 64
        )
        self.undo = numpy.zeros((UNDO_LENGTH, 2), dtype=numpy.int64)
        self.random = numpy.random.SeedSequence(seed).generate_state(1, numpy.uint64) | numpy.uint64(1)
        self.mean_ms = problem.least_latency_ms / max(1, len(problem.graph.operators)) or 1.0
        self.rate = 6e6 / max(1, problem.operator_count)
        """Iterations a second."""
        self.chunk = REFRESH
        self.nobody = numpy.zeros((0, keep_everything(problem).size), dtype=numpy.int64)

    def steps(self, genome: Integers, budget_bytes: int) -> tuple[Step, ...] | None:
        """The steps of a genome, as fast as they can be while within the budget where that is possible."""
        penalty = self.mean_ms * NEVER_FITS
        return decode(self.problem, genome, self.scratch, budget_bytes, 1.0, penalty)

    def smallest_peak(self, genome: Integers) -> tuple[int, tuple[Step, ...] | None]:
        """The peak of a genome with the options that need least, in bytes, and its steps."""
        steps = decode(self.problem, genome, self.scratch, 0, 1e-12 / self.mean_ms, 1.0)
        return int(self.scratch.totals[PEAK]), steps

    def advance(
        self,
        walker: _Walker,
        budget_bytes: int,
        share: float,
        finished: Callable[[], bool],
        *,
        elite: Integers | None = None,
        stop_when_fits: bool = False,
    ) -> bool:
        """Anneal until a share of the run is done; whether a run that is to stop when something fits did."""
        others = self.nobody if elite is None else elite
        until = min(walker.total, int(walker.total * share))
        while walker.at < until and not finished():
            began = time.perf_counter()
            end = min(until, walker.at + self.chunk)
            if anneal(
                self.problem.tables,
                self.moves,
                walker.genome,
                walker.best,
                self.scratch,
                self.undo,
                self.random,
                others,
                walker.record,
                walker.figures,
                budget_bytes,
                walker.at,
                end,
                walker.total,
                stop_when_fits,
            ):
                return True
            elapsed = max(1e-6, time.perf_counter() - began)
            self.rate = (end - walker.at) / elapsed
            walker.at = end
            if elapsed < CHUNK_SECONDS / 2:
                self.chunk *= 2
        return False


def warm_up(problem: Problem, moves: Moves) -> None:
    """Compile, or load what was compiled before, so that no thread's time goes to it."""
    walker = _Walker(keep_everything(problem), (1.0, 0.1, 1.0, 2.0, 1.0), 1)
    _Workspace(problem, moves, 0).advance(walker, 1, 1.0, lambda: False)


class _Search:
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
        worker = _Worker(self, number)
        while not self.finished():
            if worker.idle >= IDLE_RUNS and self.problem.droppable.size <= SMALL_PROBLEM:
                return
            if number > 0 and self.crowded():
                time.sleep(CHUNK_SECONDS)
            elif worker.guided < len(self.guides) and worker.turn > 0:
                worker.follow()
            elif worker.turn == 0 or worker.best_ms == math.inf or worker.spent < EXPLORING_SHARE:
                worker.explore()
            else:
                worker.refine()


class _Worker:
    """What one thread of a search knows and does."""

    def __init__(self, search: _Search, number: int) -> None:
        self.search = search
        self.number = number
        self.workspace = _Workspace(search.problem, search.moves, search.seed * THREADS + number)
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

    def _walker(self, genome: Integers, plan: _Plan, length: float) -> _Walker:
        """A run as long as it should be and the time that is left allows."""
        affordable = self.workspace.rate * self.total_seconds * min(LONGEST_RUN, 1 - self.spent)
        iterations = _round_down(min(length * RUN_LENGTH * self.search.problem.droppable.size, affordable))
        hot = plan.temperature * self.workspace.mean_ms
        penalties = plan.penalty * self.penalty_scale, LAST_PENALTY * self.penalty_scale
        return _Walker(genome, (hot, hot / COOLING, *penalties, 1.0), iterations)

    def _advance(self, walker: _Walker, share: float, elite: Integers | None = None) -> None:
        before_ms = walker.best_ms
        self.workspace.advance(walker, self.search.budget_bytes, share, self.search.finished, elite=elite)
        if walker.best_ms < min(before_ms, self.best_ms):
            self._tell(walker)

    def _find_anything(self, walker: _Walker) -> None:
        """Nothing fits yet: from where a run ended, look for anything that does."""
        hot_bytes = 0.01 * self.search.problem.plain_peak_bytes
        lean = _Walker(walker.genome, (hot_bytes, hot_bytes / 1000, 1.0, 1.0, 0.0), walker.total)
        self.workspace.advance(lean, self.search.budget_bytes, 1.0, self.search.finished, stop_when_fits=True)
        if lean.best_ms < math.inf:
            self._tell(lean)
            self._note(lean)

    def _tell(self, walker: _Walker) -> None:
        """Hand the best of a run on."""
        self.best_ms = walker.best_ms
        self.idle = -1
        steps = self.workspace.steps(walker.best, self.search.budget_bytes)
        if steps is not None:
            self.search.found.put(steps)

    def _note(self, walker: _Walker) -> None:
        """Remember the best of a run that ended."""
        self.idle += 1
        known = [latency_ms for latency_ms, _ in self.elite]
        if walker.best_ms < math.inf and walker.best_ms not in known:
            self.elite.append((walker.best_ms, walker.best.copy()))
            self.elite.sort(key=lambda member: member[0])
            del self.elite[ELITE:]


def _round_down(iterations: float) -> int:
    """The next of 2ⁿ and 3·2ⁿ⁻¹ below: runs are then as long again where the machine is about as fast."""
    power: int = 2 ** max(6, int(math.log2(max(64.0, iterations))))
    return power * 3 // 2 if iterations >= 1.5 * power else power


class _Incumbent:
    """The best legal steps so far."""

    def __init__(self, profile: Profile, budget_bytes: int, on_improvement: Callable[[Found], None] | None) -> None:
        self.profile = profile
        self.budget_bytes = budget_bytes
        self.on_improvement = on_improvement
        self.found: Found | None = None

    def offer(self, steps: Sequence[Step] | None) -> bool:
        """Take steps if they are legal, fit and are better; whether they are legal and fit."""
        if steps is None:
            return False
        try:
            timeline = simulate(self.profile, steps, self.budget_bytes)
        except IllegalSchedule:
            return False
        found = Found(steps=tuple(steps), latency_ms=timeline.latency_ms, peak_bytes=timeline.peak_bytes)
        best = self.found
        if best is None or (found.latency_ms, found.peak_bytes) < (best.latency_ms, best.peak_bytes):
            self.found = found
            if self.on_improvement is not None:
                self.on_improvement(found)
        return True


def search(
    profile: Profile,
    budget_bytes: int,
    *,
    seconds: float,
    seed: int = 0,
    starts: Sequence[tuple[Step, ...]] = (),
    guides: Sequence[tuple[Step, ...]] = (),
    neighbour_busy: Callable[[], bool] | None = None,
    on_improvement: Callable[[Found], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Found | None:
    """Look for the fastest schedule within a budget; proves nothing.

    Args:
        profile: the graph and its costs.
        budget_bytes: no step may need more.
        seconds: when to stop; compiling at the first use on a machine counts, and is always finished.
        seed: runs with the same seed that get equally far find the same.
        starts: schedules to begin from, legal ones within the budget or not.
        guides: steps to refine, with implementations or an order that may be illegal; more may be appended
            while the search runs.
        neighbour_busy: whether another thread is computing; on two cores the search then takes one.
        on_improvement: called from this thread with each better schedule.
        should_stop: asked several times a second.

    Returns:
        The best schedule, or None if nothing was found that fits.
    """
    problem = build_problem(profile)
    state = _Search(problem, budget_bytes, time.monotonic() + seconds, seed)
    warm_up(problem, state.moves)
    state.neighbour_busy = neighbour_busy
    incumbent = _Incumbent(profile, budget_bytes, on_improvement)
    _seed(state, incumbent, starts)
    if incumbent.found is not None and incumbent.found.latency_ms <= problem.least_latency_ms * (1 + 1e-12):
        return incumbent.found
    workers = min(THREADS, os.cpu_count() or 1)
    threads = [threading.Thread(target=state.work, args=(number,), daemon=True) for number in range(workers)]
    for thread in threads:
        thread.start()
    running = workers
    try:
        while running:
            if should_stop is not None and should_stop():
                state.stop.set()
            state.guides += [encode(problem, steps) for steps in guides[len(state.guides) :]]
            try:
                message = state.found.get(timeout=0.1)
            except queue.Empty:
                continue
            if message is None:
                running -= 1
            elif isinstance(message, BaseException):
                raise message
            else:
                incumbent.offer(message)
    finally:
        state.stop.set()
        for thread in threads:
            thread.join()
    return incumbent.found


def _known_schedules(profile: Profile, starts: Sequence[tuple[Step, ...]]) -> Iterator[Sequence[Step]]:
    yield from starts
    yield baselines.store_all(profile)
    yield baselines.segment_checkpointing(profile)
    yield baselines.sqrt_checkpointing(profile)


def _seed(state: _Search, incumbent: _Incumbent, starts: Sequence[tuple[Step, ...]]) -> None:
    """Offer what is known already, with the implementations that suit the budget, and begin from the best."""
    problem = state.problem
    workspace = _Workspace(problem, state.moves, 0)
    known = list(_known_schedules(problem.profile, starts))
    genomes = [encode(problem, steps) for steps in known]
    genomes += [keep_everything(problem), *Greedy(problem, state.budget_bytes).genomes()]
    fitting: list[tuple[float, tuple[Step, ...], Integers]] = []
    for genome in genomes:
        steps = workspace.steps(genome, state.budget_bytes)
        if steps is not None and workspace.scratch.totals[OVERFLOW] == 0:
            fitting.append((float(workspace.scratch.totals[LATENCY]), steps, genome))
    fitting.sort(key=lambda candidate: candidate[0])
    for latency_ms, steps, genome in fitting:
        if incumbent.offer(steps):
            state.best_latency_ms, state.best_genome = latency_ms, genome
            break
    if not fitting or problem.operator_count <= CHECK_EVERYTHING:
        for known_steps in known:
            incumbent.offer(known_steps)
    state.genomes = [genome for _, _, genome in fitting[:MOST_STARTS]] or [genomes[0]]
    state.genomes.append(keep_everything(problem))


def minimise_peak(
    profile: Profile,
    *,
    seconds: float,
    seed: int = 0,
    starts: Sequence[tuple[Step, ...]] = (),
    should_stop: Callable[[], bool] | None = None,
) -> Found:
    """Look for the schedule with the smallest peak, whatever its latency; proves nothing.

    Args:
        profile: the graph and its costs.
        seconds, seed, starts, should_stop: as for `search`.
    """
    problem = build_problem(profile)
    moves = build_moves(problem)
    warm_up(problem, moves)
    deadline = time.monotonic() + seconds
    workspace = _Workspace(problem, moves, seed)
    best_steps: tuple[Step, ...] = tuple(baselines.store_all(profile))
    best_bytes = simulate(profile, best_steps).peak_bytes
    best = encode(problem, best_steps)
    for steps in _known_schedules(profile, starts):
        for candidate in (steps, workspace.smallest_peak(encode(problem, steps))[1]):
            if candidate is not None and (peak_bytes := _peak(profile, candidate)) < best_bytes:
                best_bytes, best_steps = peak_bytes, tuple(candidate)
                best = encode(problem, candidate)

    def finished() -> bool:
        return time.monotonic() >= deadline or (should_stop is not None and should_stop())

    floor_bytes = problem.tables.resident_bytes
    sizes = [profile.graph.values[value].size_bytes for value in problem.droppable]
    hot = max(1.0, 0.3 * sum(sizes) / max(1, len(sizes)))
    step_bytes = max(1, (best_bytes - floor_bytes) // 8)
    failures = 0
    while not finished() and failures < 6 and best_bytes > floor_bytes:
        target_bytes = max(floor_bytes, best_bytes - step_bytes)
        affordable = workspace.rate * (deadline - time.monotonic()) / 4
        iterations = _round_down(min(200_000, 1500 * problem.operator_count, affordable))
        walker = _Walker(best, (hot, hot / 1000, 1.0, 1.0, 0.0), iterations)
        if workspace.advance(walker, target_bytes, 1.0, finished, stop_when_fits=True):
            best = walker.best
            _, found_steps = workspace.smallest_peak(best)
            peak_bytes = best_bytes if found_steps is None else _peak(profile, found_steps)
            if found_steps is not None and peak_bytes < best_bytes:
                best_bytes, best_steps = peak_bytes, found_steps
                failures = 0
                continue
        if step_bytes <= max(1, best_bytes // 10_000):
            failures += 1
        step_bytes = max(1, step_bytes // 2)
    timeline = simulate(profile, best_steps)
    return Found(steps=best_steps, latency_ms=timeline.latency_ms, peak_bytes=timeline.peak_bytes)


def _peak(profile: Profile, steps: Sequence[Step]) -> int:
    """The peak of steps that may be illegal: then more than anything."""
    try:
        return simulate(profile, steps).peak_bytes
    except IllegalSchedule:
        return 2**62
