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

EXPLORING_SHARE = 0.6
"""Part of the time that goes to runs from the start; the rest goes to refining the best schedule."""

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

LAST_PENALTY = 3.0
RUN_LENGTH = 700
"""Iterations of a run, over droppable values: results vary so much that many short runs beat long ones."""

MOST_STARTS = 4
"""Schedules that runs begin from, beside the one that drops nothing."""

LONGEST_RUN = 0.15
"""Part of the time that a run takes at most."""


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
        self.rate = 0.0
        self.best = keep_everything(problem)

    def steps(self, genome: Integers, budget_bytes: int) -> tuple[Step, ...] | None:
        """The steps of a genome, as fast as they can be while within the budget where that is possible."""
        penalty = self.mean_ms * NEVER_FITS
        return decode(self.problem, genome, self.scratch, budget_bytes, 1.0, penalty)

    def smallest_peak(self, genome: Integers) -> tuple[int, tuple[Step, ...] | None]:
        """The peak of a genome with the options that need least, in bytes, and its steps."""
        steps = decode(self.problem, genome, self.scratch, 0, 1e-12 / self.mean_ms, 1.0)
        return int(self.scratch.totals[PEAK]), steps

    def run(
        self,
        genome: Integers,
        budget_bytes: int,
        plan: tuple[float, float, float, float, float],
        iterations: int,
        record: numpy.ndarray[tuple[int], numpy.dtype[numpy.float64]],
        finished: Callable[[], bool],
        stop_when_fits: bool = False,
    ) -> bool:
        """Anneal; whether a run that is to stop when something fits did. The best is left in `best`."""
        figures = numpy.array(plan, dtype=numpy.float64)
        chunk = REFRESH
        at = 0
        while at < iterations and not finished():
            began = time.perf_counter()
            end = min(iterations, at + chunk)
            if anneal(
                self.problem.tables,
                self.moves,
                genome,
                self.best,
                self.scratch,
                self.undo,
                self.random,
                record,
                figures,
                budget_bytes,
                at,
                end,
                iterations,
                stop_when_fits,
            ):
                return True
            elapsed = max(1e-6, time.perf_counter() - began)
            self.rate = (end - at) / elapsed
            at = end
            if elapsed < CHUNK_SECONDS / 2:
                chunk *= 2
        return False


def warm_up(problem: Problem, moves: Moves) -> None:
    """Compile, or load what was compiled before, so that no thread's time goes to it."""
    workspace = _Workspace(problem, moves, 0)
    record = numpy.array([numpy.inf, 1.0])
    workspace.run(keep_everything(problem), 1, (1.0, 0.1, 1.0, 2.0, 1.0), 1, record, lambda: False)


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

    def finished(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self.deadline

    def work(self, number: int) -> None:
        """What a worker does, from its thread."""
        try:
            self._anneal_repeatedly(number)
        except BaseException as error:
            self.found.put(error)
        finally:
            self.found.put(None)

    def _anneal_repeatedly(self, number: int) -> None:
        problem = self.problem
        workspace = _Workspace(problem, self.moves, self.seed * THREADS + number)
        workspace.best = self.best_genome.copy()
        best_ms = self.best_latency_ms
        penalty_scale = (problem.least_latency_ms or 1.0) / max(1, problem.plain_peak_bytes)
        workspace.rate = 6e6 / max(1, problem.operator_count)
        idle = 0
        total = max(0.0, self.deadline - time.monotonic())
        turn = number
        while not self.finished():
            if idle >= IDLE_RUNS and problem.droppable.size <= SMALL_PROBLEM:
                return
            spent = 1 - (self.deadline - time.monotonic()) / total
            refine = best_ms < math.inf and spent > EXPLORING_SHARE
            plan = REFINING[turn % len(REFINING)] if refine else EXPLORING[turn % len(EXPLORING)]
            iterations = float(RUN_LENGTH * problem.droppable.size)
            if turn == number:
                iterations /= 4
            iterations = _round_down(min(iterations, workspace.rate * total * min(LONGEST_RUN, 1 - spent)))
            genome = (workspace.best if refine else self.genomes[turn % len(self.genomes)]).copy()
            turn += 1
            record = numpy.array([best_ms, 1.0])
            hot = plan.temperature * workspace.mean_ms
            figures = (hot, hot / 100, plan.penalty * penalty_scale, LAST_PENALTY * penalty_scale, 1.0)
            workspace.run(genome, self.budget_bytes, figures, iterations, record, self.finished)
            if best_ms == math.inf and record[BEST_LATENCY] == numpy.inf:
                # Nothing fits yet: look for anything that does.
                bytes_hot = 0.01 * problem.plain_peak_bytes
                only_memory = (bytes_hot, bytes_hot / 1000, 1.0, 1.0, 0.0)
                workspace.run(genome, self.budget_bytes, only_memory, iterations, record, self.finished, True)
            idle += 1
            if record[BEST_LATENCY] < best_ms:
                best_ms = float(record[BEST_LATENCY])
                idle = 0
                steps = workspace.steps(workspace.best, self.budget_bytes)
                if steps is not None:
                    self.found.put(steps)


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
    on_improvement: Callable[[Found], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Found | None:
    """Look for the fastest schedule within a budget; proves nothing.

    Args:
        profile: the graph and its costs.
        budget_bytes: no step may need more.
        seconds: when to stop, at the latest; compiling at the first use on a machine comes on top.
        seed: runs with the same seed that get equally far find the same.
        starts: schedules to begin from, legal ones within the budget or not.
        on_improvement: called from this thread with each better schedule.
        should_stop: asked several times a second.

    Returns:
        The best schedule, or None if nothing was found that fits.
    """
    problem = build_problem(profile)
    state = _Search(problem, budget_bytes, 0.0, seed)
    warm_up(problem, state.moves)
    state.deadline = time.monotonic() + seconds
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
    workspace.best = encode(problem, best_steps)
    for steps in _known_schedules(profile, starts):
        for candidate in (steps, workspace.smallest_peak(encode(problem, steps))[1]):
            if candidate is not None and (peak_bytes := _peak(profile, candidate)) < best_bytes:
                best_bytes, best_steps = peak_bytes, tuple(candidate)
                workspace.best = encode(problem, candidate)

    def finished() -> bool:
        return time.monotonic() >= deadline or (should_stop is not None and should_stop())

    floor_bytes = problem.tables.resident_bytes
    sizes = [profile.graph.values[value].size_bytes for value in problem.droppable]
    hot = max(1.0, 0.3 * sum(sizes) / max(1, len(sizes)))
    step_bytes = max(1, (best_bytes - floor_bytes) // 8)
    failures = 0
    while not finished() and failures < 6 and best_bytes > floor_bytes:
        target_bytes = max(floor_bytes, best_bytes - step_bytes)
        workspace.rate = workspace.rate or 6e6 / max(1, problem.operator_count)
        affordable = workspace.rate * (deadline - time.monotonic()) / 4
        iterations = _round_down(min(200_000, 1500 * problem.operator_count, affordable))
        record = numpy.array([numpy.inf, 1.0])
        figures = (hot, hot / 1000, 1.0, 1.0, 0.0)
        fits = workspace.run(workspace.best.copy(), target_bytes, figures, iterations, record, finished, True)
        if fits:
            _, found_steps = workspace.smallest_peak(workspace.best)
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
