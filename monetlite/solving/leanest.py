"""The schedule with the smallest peak, whatever its latency, by annealing towards ever smaller budgets."""

import time
from collections.abc import Callable, Sequence

from monetlite.costs import Profile
from monetlite.errors import IllegalSchedule
from monetlite.schedule import Step, simulate
from monetlite.solving import baselines
from monetlite.solving.annealing import Walker, Workspace, round_down
from monetlite.solving.compiling import ensure_compiled
from monetlite.solving.genomes import KEEP_ALWAYS, encode, read_least
from monetlite.solving.moves import build_moves
from monetlite.solving.problem import build_problem
from monetlite.solving.search import Found, known_schedules


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

    for retain in (KEEP_ALWAYS, 0):
        genome = read_least(problem)
        genome[problem.droppable] = retain
        peak_bytes, found = workspace.smallest_peak(genome)
        if found is not None and peak_bytes < best_bytes:
            best_bytes, best_steps, best = peak_bytes, found, genome

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
        iterations = round_down(min(200_000, 1500 * problem.operator_count, affordable))
        walker = Walker(best, (hot, hot / 1000, 1.0, 1.0, 0.0), iterations)
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
