"""One entry to every solving method: anytime, within a time limit, and honest about what is proven."""

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable

from monetlite.core.costs import Profile
from monetlite.core.errors import SolverError
from monetlite.core.interrupts import BOUND_THREAD, ends_everything
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.steps import Step, plain_steps
from monetlite.solving import baselines
from monetlite.solving.bounds import integer_bound, latency_bound, trivial_bound_ms
from monetlite.solving.compiling import is_cached, still_compiling
from monetlite.solving.exhaustive import exhaustive
from monetlite.solving.genomes import keep_everything, read_least
from monetlite.solving.greedy import Greedy
from monetlite.solving.options import Outline
from monetlite.solving.problem import build_problem
from monetlite.solving.program import check_solver, solve_program
from monetlite.solving.race import Progress, Race, Solution
from monetlite.solving.smallest import SMALL_OPERATORS, smallest_budget
from monetlite.solving.templates import full_template

_LOG = logging.getLogger(__name__)
_PROBE_SHARE = 0.1
"""Of the time: the first search, while it is open whether anything fits."""
_SMALLEST_SECONDS, _SMALLEST_SHARE = 4.0, 0.08
"""How long a solve that found something goes on to look for the smallest budget: seconds, and share of the time."""

_CLOSING_SECONDS, _CLOSING_SHARE = 1.5, 0.025
"""What is left of the time for stopping everybody and for the last checks."""

_GRACE_SECONDS = 0.5
"""What a solver is given to stop when it is asked to."""
_FIRST_SHARE = 0.1
"""Of the time left, for each of the greedy choices that come before anything else."""
_INTERPRETED_OPERATORS = 1500
"""The largest graph for which a few interpreted evaluations take less than a second."""
_PROGRAM_SLOTS = 1200
"""The largest full program that is worth building beside a search."""
_PROGRAM_OPERATORS = 100
_PASSES = 2
"""How often each stage of the program offers its candidates; two leave out next to nothing."""


def solve_peak(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the fastest schedule within a budget of the peak, and bound how much faster any could be.

    Args:
        profile: the graph and its costs, with only the implementations that the options allow.
        budget_bytes: no step may need more memory.
        options: time limit, seed and solver. After the time limit the best so far is returned; Ctrl-C does the
            same at once, outside of `interrupts_kept`.
        starts: steps to begin from, such as a schedule for another budget; illegal ones are ignored.
        progress: told whenever the incumbent or the bound improves.

    Raises:
        SolverError: the solver is unknown or not installed.
    """
    solver = check_solver(options.solver)
    closing = min(_CLOSING_SECONDS, _CLOSING_SHARE * options.time_limit)
    race = Race(profile, budget_bytes, time.monotonic() + options.time_limit - closing, progress)
    infeasible = False
    try:
        infeasible = _run(race, seed=options.seed, solver=solver, starts=tuple(starts))
    except KeyboardInterrupt:
        if ends_everything():
            raise
    finally:
        race.stopped.set()
    solution = _solution(race, infeasible)
    if solution.status in (Status.FEASIBLE, Status.TIMEOUT) and still_compiling():
        warnings.warn(
            "the search was not compiled in time, which takes some seconds once on a machine and goes on; solve "
            "again for a better schedule",
            stacklevel=2,
        )
    return solution


def _run(race: Race, *, seed: int, solver: str, starts: tuple[tuple[Step, ...], ...]) -> bool:
    """Try the methods in turn, cheapest first; returns whether infeasibility was proven."""
    profile, budget_bytes = race.profile, race.budget_bytes
    if not Outline.of(profile).runnable:
        return True
    race.phase = "baselines"
    race.offer(plain_steps(profile.graph), "plain")
    if budget_bytes < race.proven_bytes:
        _find_smallest(race, seed)
        return True
    for steps in starts:
        race.offer(steps, "start")
    race.offer(baselines.store_all(profile), "store all")
    if race.should_stop():
        return False
    if race.steps is None and len(profile.graph.operators) <= _INTERPRETED_OPERATORS:
        # Something that fits, before anything is compiled.
        problem = build_problem(profile)
        for base in (keep_everything(problem), read_least(problem)):
            deadline = time.monotonic() + _FIRST_SHARE * race.left
            greedy = Greedy(problem, budget_bytes, base=base, interpreted=not is_cached(), deadline=deadline)
            first = greedy.first()
            if first is not None:
                race.offer(first, "greedy")
                break
    if len(profile.graph.operators) <= SMALL_OPERATORS:
        race.phase = "exhaustive"
        exact = exhaustive(profile, budget_bytes, seconds=0.3 * race.left, should_stop=race.should_stop)
        if exact.steps is not None:
            race.offer(exact.steps, "exhaustive")
        elif exact.complete:
            race.proven_bytes = max(race.proven_bytes, budget_bytes + 1)
            _find_smallest(race, seed)
            return True
        race.raise_bound(exact.lower_bound_ms, "exhaustive")
        if race.should_stop():
            return False
    bounding = threading.Thread(target=_bound, args=(race,), name=BOUND_THREAD, daemon=True)
    race.bounding = True
    bounding.start()
    try:
        _improve(race, seed=seed, solver=solver)
        while bounding.is_alive() and not race.should_stop():
            bounding.join(min(0.1, max(0.0, race.left)))
    finally:
        race.stopped.set()
        bounding.join(_GRACE_SECONDS)
    if race.failure is not None:
        raise race.failure
    return False


def _improve(race: Race, *, seed: int, solver: str) -> None:
    """Search for better schedules, then let the boolean program improve on what was found."""
    small = len(race.profile.graph.operators) <= _PROGRAM_OPERATORS
    slots = _PASSES * len(full_template(Outline.of(race.profile))) if small else math.inf
    with_program = race.left > 5 and slots <= _PROGRAM_SLOTS
    spared = min(_SMALLEST_SECONDS, _SMALLEST_SHARE * race.left)
    if race.steps is None:
        # See whether anything fits, before most of the time goes into making it fast.
        _search(race, seed, share=_PROBE_SHARE)
    if race.steps is None and not race.should_stop():
        # Nothing fits so far: aim at memory alone, then go on from what that finds.
        _find_anything(race, seed, seconds=0.5 * race.left)
    if not race.should_stop():
        _search(race, seed, share=0.5 if with_program else max(0.0, 1 - spared / max(race.left, 1e-9)))
    if with_program and race.left > 2 and not race.should_stop():
        race.phase = "program"
        result = solve_program(
            race.profile,
            race.budget_bytes,
            seconds=race.left - 1 - spared,
            passes=_PASSES,
            cutoff_ms=race.latency_ms,
            solver=solver,
        )
        if result.steps is not None:
            race.offer(result.steps, solver)
    if race.steps is not None and race.left > 0 and not race.stopped.is_set():
        # Not needed for this budget, but what a person decides the next one by.
        _find_smallest(race, seed, seconds=spared)


def _search(race: Race, seed: int, *, share: float) -> None:
    """Search for a share of the time left, from the best steps known."""
    from monetlite.solving.search import search

    race.phase = "search"
    found = search(
        race.profile,
        race.budget_bytes,
        seconds=max(0.1, race.left * share),
        seed=seed,
        starts=() if race.steps is None else (race.steps,),
        guides=race.guides,
        tight=race.tight,
        neighbour_busy=lambda: race.bounding,
        on_improvement=lambda better: race.offer(better.steps, "search"),
        should_stop=race.should_stop,
    )
    if found is not None:
        race.offer(found.steps, "search")


def _bound(race: Race) -> None:
    """Raise the bound beside the search: by the linear relaxation, then by branch and bound on it."""
    try:
        _raise_bound(race)
    except SolverError as error:
        # Without its solver there is only the simple bound: the schedule itself does not depend on it.
        _LOG.warning("no better bound: %s", error)
    except BaseException as error:
        race.failure = error
        race.stopped.set()
    finally:
        race.bounding = False


def _raise_bound(race: Race) -> None:
    outline = Outline.of(race.profile)
    linear = latency_bound(race.profile, race.budget_bytes, seconds=0.6 * race.left)
    race.raise_bound(linear.lower_bound_ms, "HiGHS")
    program, meaning = linear.program, linear.meaning
    if program is None or meaning is None or race.should_stop():
        return
    if linear.solution is not None:
        race.guide(outline, meaning, linear.solution)
    bound_ms = integer_bound(
        program,
        seconds=max(0.0, race.left - _GRACE_SECONDS),
        cutoff_ms=race.latency_ms,
        on_bound=lambda better_ms: race.raise_bound(better_ms, "HiGHS"),
        on_solution=lambda solution: race.guide(outline, meaning, solution),
        should_stop=race.should_stop,
    )
    race.raise_bound(bound_ms, "HiGHS")


def _find_anything(race: Race, seed: int, seconds: float) -> None:
    """Look for anything within the budget, whatever its latency."""
    if len(race.profile.graph.operators) <= SMALL_OPERATORS:
        _find_smallest(race, seed, seconds)
        return
    from monetlite.solving.leanest import minimise_peak

    race.phase = "smallest budget"
    found = minimise_peak(
        race.profile,
        seconds=seconds,
        seed=seed,
        starts=() if race.leanest is None else (race.leanest,),
        should_stop=race.stopped.is_set,
        enough_bytes=race.budget_bytes,
    )
    race.offer(found.steps, "smallest")
    if found.peak_bytes <= race.budget_bytes:
        race.tight = found.genome


def _find_smallest(race: Race, seed: int, seconds: float = 5.0) -> None:
    """Bracket the smallest feasible budget, in so many seconds, or what is left."""
    race.phase = "smallest budget"
    starts = () if race.leanest is None else (race.leanest,)
    smallest = smallest_budget(
        race.profile,
        seconds=min(seconds, max(0.1, race.left)),
        seed=seed,
        starts=starts,
        should_stop=race.stopped.is_set,
    )
    race.proven_bytes = max(race.proven_bytes, smallest.proven_bytes)
    if smallest.steps is not None:
        race.offer(smallest.steps, "smallest")


def _solution(race: Race, infeasible: bool) -> Solution:
    bound_ms = race.bound_ms
    if race.steps is not None:
        # Sums in another order differ in their last bits; more than that is a wrong bound, and proves nothing.
        if bound_ms > race.latency_ms * (1 + 1e-6) + 1e-12:
            _LOG.error(
                "the bound of %g ms exceeds a schedule's latency of %g ms: an error in monetlite; please report "
                "it. No bound is claimed beyond each operator's fastest run",
                bound_ms,
                race.latency_ms,
            )
            bound_ms = race.bound_ms = trivial_bound_ms(race.profile)
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
