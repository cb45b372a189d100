"""The schedule with the smallest peak, whatever its latency, by annealing towards ever smaller budgets."""

import time
from collections.abc import Callable, Sequence

from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving import baselines
from monetlite.solving.annealing import Walker, Workspace, round_down
from monetlite.solving.compiling import ensure_compiled
from monetlite.solving.genomes import KEEP_ALWAYS, encode, keep_everything, read_least
from monetlite.solving.greedy import RERUN_EVERY_TIME
from monetlite.solving.layout import Integers
from monetlite.solving.moves import build_moves
from monetlite.solving.problem import build_problem
from monetlite.solving.search import Found, known_schedules

HOT_SHARE = 0.3
"""Start temperature over the mean size of what may be dropped."""
COOLING = 1000.0
"""Start temperature over end temperature."""
STEP_WEIGHT = 10.0
"""What the latency of a step at its least costs, over the start temperature: longer ones take longer to look at."""
LONGEST_RUN = 1 / 16
"""Part of the time left that a run takes at most."""
RUN_LENGTH = 64
"""Most iterations of a run, over operators: several short runs reach what one long run doesn't."""
STARTS = 2
"""Runs begin from the best and from so many of the first genomes: plain training, and what stores nothing."""
MOST_FAILURES = 12
"""How many runs in a row may fail to lower the peak by as little as is looked for."""


def minimise_peak(
    profile: Profile,
    *,
    seconds: float,
    seed: int = 0,
    starts: Sequence[tuple[Step, ...]] = (),
    should_stop: Callable[[], bool] | None = None,
    enough_bytes: int = 0,
) -> Found:
    """Look for the schedule with the smallest peak, whatever its latency; proves nothing.

    Args:
        profile: the graph and its costs.
        seconds, seed, starts, should_stop: as for `search`.
        enough_bytes: a peak that need not be lowered further.
    """
    problem = build_problem(profile)
    moves = build_moves(problem)
    deadline = time.monotonic() + seconds
    best_steps: tuple[Step, ...] = tuple(baselines.store_all(profile))
    best_bytes = simulate(profile, best_steps).peak_bytes
    known = list(known_schedules(profile, starts))
    if not ensure_compiled(deadline, should_stop):
        best_steps = min([best_steps, *map(tuple, known)], key=lambda steps: _peak(profile, steps))
        timeline = simulate(profile, best_steps)
        return Found(steps=best_steps, latency_ms=timeline.latency_ms, peak_bytes=timeline.peak_bytes)
    workspace = Workspace(problem, moves, seed)
    best = encode(problem, best_steps)
    for steps in known:
        for candidate in (steps, workspace.smallest_peak(encode(problem, steps))[1]):
            if candidate is not None and (peak_bytes := _peak(profile, candidate)) < best_bytes:
                best_bytes, best_steps = peak_bytes, tuple(candidate)
                best = encode(problem, candidate)

    bases: list[Integers] = []
    for base in (keep_everything(problem), read_least(problem)):
        for retain in (KEEP_ALWAYS, RERUN_EVERY_TIME):
            genome = base.copy()
            genome[problem.droppable] = retain
            bases.append(genome)
            peak_bytes, found = workspace.smallest_peak(genome)
            if found is not None and peak_bytes < best_bytes:
                best_bytes, best_steps, best = peak_bytes, found, genome

    def finished() -> bool:
        return time.monotonic() >= deadline or (should_stop is not None and should_stop())

    floor_bytes = max(problem.tables.resident_bytes, enough_bytes)
    sizes = [profile.graph.values[value].size_bytes for value in problem.droppable]
    hot = max(1.0, HOT_SHARE * sum(sizes) / max(1, len(sizes)))
    weight = STEP_WEIGHT * hot / (problem.least_latency_ms or 1.0)
    step_bytes = first_step_bytes = max(1, (best_bytes - floor_bytes) // 8)
    turn = failures = 0
    while not finished() and failures < MOST_FAILURES and best_bytes > floor_bytes:
        target_bytes = max(floor_bytes, best_bytes - step_bytes)
        affordable = workspace.rate * (deadline - time.monotonic()) * LONGEST_RUN
        iterations = round_down(min(RUN_LENGTH * problem.operator_count, affordable))
        # From the best, and from elsewhere in turn: each place has peaks that small changes don't lower.
        start = best if turn % 2 == 0 else bases[turn // 2 % STARTS]
        turn += 1
        walker = Walker(start, (hot, hot / COOLING, 1.0, 1.0, weight), iterations)
        if workspace.advance(walker, target_bytes, 1.0, finished, stop_when_fits=True):
            _, found_steps = workspace.smallest_peak(walker.best)
            peak_bytes = best_bytes if found_steps is None else _peak(profile, found_steps)
            if found_steps is not None and peak_bytes < best_bytes:
                best_bytes, best_steps, best = peak_bytes, found_steps, walker.best
                failures = 0
                continue
        if step_bytes <= max(1, best_bytes // 10_000):
            failures += 1
            if failures == MOST_FAILURES and enough_bytes:
                step_bytes, failures = 2 * first_step_bytes, 0
        step_bytes = max(1, step_bytes // 2)
    timeline = simulate(profile, best_steps)
    return Found(
        steps=best_steps, latency_ms=timeline.latency_ms, peak_bytes=timeline.peak_bytes, genome=best.copy()
    )


def _peak(profile: Profile, steps: Sequence[Step]) -> int:
    """The peak of steps that may be illegal: then more than anything."""
    try:
        return simulate(profile, steps).peak_bytes
    except IllegalSchedule:
        return 2**62
