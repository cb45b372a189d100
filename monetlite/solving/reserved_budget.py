"""Schedules for a budget of reserved memory, which `nvidia-smi` shows, in place of allocated memory.

One is found for a peak of the budget, and one for less. From these `arrange` looks for schedules whose tensors lie
without gaps. Where it finds none, memory has to go back to the GPU within the step, and the budget of the peak is
lowered until that is enough.

The gaps that are left between blocks depend on the order of every request, and change with any of them: two
schedules that are equally fast, and need as much memory, may reserve 1.3 times their peak and 1.01 times. So runs
of annealing lower a schedule's latency and the memory that the allocator on paper reserves beyond the limit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from monetlite.allocator.allocator import PAGE_BYTES, SMALL_PAGE
from monetlite.allocator.reserved import Reserved, least_limit, refuse_without_gpu, reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.interrupts import end_early, ended_early
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.annealing.compiled import REFRESH, AnnealingCost, Integers
from monetlite.solving.annealing.compiling import ensure_compiled
from monetlite.solving.annealing.flat_problem import encode, flatten
from monetlite.solving.annealing.runs import NEVER_FITS, AnnealingRun, Workspace
from monetlite.solving.clock import now
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem
from monetlite.solving.solver import solve_peak

RELEASE_MS = 10.0
"""Assumed cost of giving memory back once, where schedules are compared: it waits for the GPU, and gigabytes are
unmapped and mapped page by page. It is not measured, and no step time has it."""
FOR_THE_PEAK, FOR_LESS, ARRANGING = 0.25, 0.15, 0.6
"""Parts of the time."""
GIVE_UP = 0.75
"""Part of the time of arranging after which it ends if it has found nothing. The rest is for lowered budgets."""
MAX_ROUNDS = 8
"""Rounds with lowered budgets, while nothing fits."""
ROUND_SHARE, MIN_SECONDS = 0.3, 0.5
"""Part of the time left that a round takes, and its least time."""
_LESS = 0.87
"""The second peak that is solved for, over the budget."""
_STEP = 0.004
"""Part of the budget by which it is lowered from round to round, beyond the last schedule's excess."""

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


def solve_reserved(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Solution], None] | None = None,
) -> Solution:
    """Solve for a budget of reserved memory, as `monetlite.solving.solve_profile` says.

    The result is the fastest schedule found that runs within it, `starts` included. Its bound is that of all
    schedules whose peak is within the budget, which are more. Where peaks are within the budget, but no schedule
    that runs within it was found, the result has no steps, and `reserved_bytes` is the least that any schedule
    needs that was seen.

    Raises:
        DeviceError: the costs are a CPU's.
        SolverError: the solver is unknown or not installed.
    """
    refuse_without_gpu(profile)
    began = now()
    deadline = began + options.time_limit
    known = list(starts)
    interrupted = ended_early()

    def solve(target_bytes: int, seconds: float, found: Sequence[Solution] = ()) -> Solution:
        return solve_peak(
            profile,
            target_bytes,
            replace(options, time_limit=seconds),
            starts=[*known, *(item.steps for item in found if item.steps is not None)],
            progress=progress,
        )

    candidates: list[Solution] = []
    for steps in known:
        with suppress(IllegalSchedule):  # not for these sizes
            candidates.append(Solution.of_steps(profile, steps, method="start"))
    found = solve(budget_bytes, FOR_THE_PEAK * options.time_limit)
    if found.steps is None:
        return found
    candidates.append(found)
    within = _reserved(profile, found.steps, budget_bytes)
    tight = not within.fits or within.releases > 0
    if ended_early() == interrupted:
        if tight:
            less = solve(int(budget_bytes * _LESS), FOR_LESS * options.time_limit)
            candidates.append(replace(less, lower_bound_ms=0.0))
        else:
            candidates.append(solve(budget_bytes, (1 - FOR_THE_PEAK) * options.time_limit, [found]))
    if tight and ended_early() == interrupted:
        given = [item.steps for item in candidates if item.steps is not None]
        seconds = options.time_limit * ARRANGING
        arranged = arrange(profile, given, budget_bytes, seconds=seconds, seed=options.seed)
        if arranged is not None:
            made = Solution.of_steps(profile, arranged, method="arranging")
            candidates.append(replace(made, methods=(*found.methods, "arranging")))
    bound_ms = max(item.lower_bound_ms for item in candidates)
    proven_bytes = max(item.smallest_proven_bytes for item in candidates)
    best = _best_within(profile, budget_bytes, candidates)
    least_bytes = min(least_limit(profile, item.steps) for item in candidates if item.steps is not None)
    target_bytes = budget_bytes
    for _ in range(MAX_ROUNDS):
        if best is not None or now() >= deadline or ended_early() > interrupted:
            break
        assert found.steps is not None
        assert found.peak_bytes is not None
        over_bytes = max(0, least_limit(profile, found.steps) - budget_bytes) + int(budget_bytes * _STEP)
        target_bytes = min(found.peak_bytes, target_bytes) - over_bytes
        found = solve(target_bytes, max(MIN_SECONDS, ROUND_SHARE * (deadline - now())))
        if found.steps is None:
            break
        least_bytes = min(least_bytes, least_limit(profile, found.steps))
        best = _best_within(profile, budget_bytes, [found])
    seconds = now() - began
    if best is None or best.latency_ms is None:
        return Solution(
            status=Status.TIMEOUT,
            lower_bound_ms=bound_ms,
            smallest_proven_bytes=proven_bytes,
            reserved_bytes=least_bytes,
            seconds=seconds,
        )
    smallest = min(candidates, key=lambda item: item.smallest_reached_bytes or budget_bytes)
    return replace(
        best,
        lower_bound_ms=bound_ms,
        status=Status.OPTIMAL if best.latency_ms <= bound_ms else Status.FEASIBLE,
        smallest_proven_bytes=proven_bytes,
        smallest_reached_bytes=smallest.smallest_reached_bytes,
        smallest_reached_steps=smallest.smallest_reached_steps,
        seconds=seconds,
    )


def _reserved(profile: Profile, steps: Sequence[Step], budget_bytes: int) -> Reserved:
    return reserve(profile, steps, expandable=True, limit_bytes=budget_bytes)


def _best_within(profile: Profile, budget_bytes: int, solutions: Iterable[Solution]) -> Solution | None:
    """The best of some solutions that runs within a budget of reserved memory, counting what releases may cost."""
    best: Solution | None = None
    best_ms = float("inf")
    for item in solutions:
        if item.steps is None or item.latency_ms is None or (item.peak_bytes or 0) > budget_bytes:
            continue
        within = _reserved(profile, item.steps, budget_bytes)
        latency_ms = item.latency_ms + RELEASE_MS * within.releases
        if within.fits and latency_ms < best_ms:
            needed_bytes = least_limit(profile, item.steps) if within.releases else within.peak_bytes + PAGE_BYTES
            best, best_ms = replace(item, reserved_bytes=min(needed_bytes, budget_bytes)), latency_ms
    return best


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
            found = _reserved(self.profile, steps, self.limit_bytes)
            peak_bytes = simulate(self.profile, steps).peak_bytes
        except IllegalSchedule:
            return False
        return found.fits and not found.releases and peak_bytes <= self.limit_bytes


def _rank(run: AnnealingRun) -> tuple[float, float]:
    return run.best_ms, run.recent_cost
