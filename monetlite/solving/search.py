"""Incumbents by simulated annealing.

The decisions are what to keep, what to drop again and which groups to read (`kernel`); everything else about
a schedule follows. Runs from the start compete with each other, the best are refined, and what a relaxation
suggests is refined too (`workers`). Whatever is returned was checked by `simulate`.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving import baselines
from monetlite.solving.annealing import Workspace
from monetlite.solving.compiling import ensure_compiled
from monetlite.solving.genomes import encode, keep_everything, read_least
from monetlite.solving.greedy import Greedy
from monetlite.solving.layout import LATENCY, OVERFLOW, Integers
from monetlite.solving.problem import build_problem
from monetlite.solving.workers import MOST_STARTS, THREADS, SharedState

CHECK_EVERYTHING = 3000
"""With more operators than this `simulate` takes seconds, and only the best known schedule is offered."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Legal steps within the budget, as `simulate` sees them; with the genome of `steps`, where that is known."""

    steps: tuple[Step, ...]
    latency_ms: float
    peak_bytes: int
    genome: Integers | None = field(default=None, compare=False)


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
    tight: Integers | None = None,
    neighbour_busy: Callable[[], bool] | None = None,
    on_improvement: Callable[[Found], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Found | None:
    """Look for the fastest schedule within a budget; proves nothing.

    Args:
        profile: the graph and its costs.
        budget_bytes: no step may need more.
        seconds: when to stop; compiling at the first use on a machine counts.
        seed: runs with the same seed that get equally far find the same.
        starts: schedules to begin from, legal ones within the budget or not.
        guides: steps to refine, with implementations or an order that may be illegal; more may be appended
            while the search runs.
        tight: a genome that `minimise_peak` found for a budget within which hardly anything fits: the search
            then pays more for every byte too much, and begins from it.
        neighbour_busy: whether another thread is computing; on two cores the search then takes one.
        on_improvement: called from this thread with each better schedule.
        should_stop: asked several times a second.

    Returns:
        The best schedule, or None if nothing was found that fits.
    """
    problem = build_problem(profile)
    state = SharedState(problem, budget_bytes, time.monotonic() + seconds, seed)
    incumbent = _Incumbent(profile, budget_bytes, on_improvement)
    if not ensure_compiled(state.deadline, should_stop):
        for steps in known_schedules(profile, starts):
            incumbent.offer(steps)
        return incumbent.found
    state.neighbour_busy = neighbour_busy
    state.tight = tight is not None
    _seed(state, incumbent, starts, () if tight is None else (tight,))
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


def known_schedules(profile: Profile, starts: Sequence[tuple[Step, ...]]) -> Iterator[Sequence[Step]]:
    yield from starts
    yield baselines.store_all(profile)
    yield baselines.segment_checkpointing(profile)
    yield baselines.sqrt_checkpointing(profile)


def _seed(
    state: SharedState,
    incumbent: _Incumbent,
    starts: Sequence[tuple[Step, ...]],
    start_genomes: Sequence[Integers],
) -> None:
    """Offer what is known already, with the implementations that suit the budget, and begin from the best."""
    problem = state.problem
    workspace = Workspace(problem, state.moves, 0)
    known = list(known_schedules(problem.profile, starts))
    genomes = [*start_genomes, *(encode(problem, steps) for steps in known)]
    for base in (keep_everything(problem), read_least(problem)):
        genomes += [base, *Greedy(problem, state.budget_bytes, base=base).genomes()]
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
