"""The order of methods in a solve: anytime, within a time limit, and honest about what is proven."""

import atexit
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

from monetlite.core.announcing import warn
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule, SolverError
from monetlite.core.interrupts import BOUND_THREAD, end_early
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.solving.annealing.compiled import Integers
from monetlite.solving.annealing.compiling import is_ready, still_compiling
from monetlite.solving.annealing.flat_problem import encode, flatten, keep_everything, read_least
from monetlite.solving.annealing.greedy import Greedy
from monetlite.solving.annealing.lowest_peak import lower_peak
from monetlite.solving.annealing.search import CHECK_EVERYTHING, search
from monetlite.solving.baselines import checkpointing_settings, with_fewer_reruns
from monetlite.solving.blocks.deep_step import STAGES, DeepStep, in_blocks
from monetlite.solving.blocks.nested_plans import nested_plans
from monetlite.solving.bounding.guide import guided_steps
from monetlite.solving.bounding.latency_bound import LatencyBound, integer_bound, latency_bounds
from monetlite.solving.bounding.peak_bound import smallest_budget_bound
from monetlite.solving.bounding.relaxation import Relaxation
from monetlite.solving.bounding.zero_one import Floats
from monetlite.solving.clock import now
from monetlite.solving.exhaustive import exhaustive
from monetlite.solving.incumbent import Incumbent, Solution
from monetlite.solving.problem import Problem
from monetlite.solving.program import check_solver, full_template, solve_program
from monetlite.solving.smallest import SMALL_OPERATORS, bracket_smallest

_PROBE_SHARE = 0.1
"""Part of the time for the first search, while it is open whether anything fits."""
_SMALLEST_SECONDS, _SMALLEST_SHARE = 5.0, 0.1
"""The most time for the smallest budget once something is found: seconds, and part of the time."""
_SMALLEST_PART, _LEAST_SMALLEST_SECONDS = 0.5, 2.0
"""The same where less time was needed: as a part of that, but at least so many seconds."""
_CLOSING_SECONDS, _CLOSING_SHARE = 1.5, 0.025
"""Time left at the end for stopping every thread and for the last checks."""
_GRACE_SECONDS, _EXIT_SECONDS = 0.5, 30.0
"""Time that a solver gets to stop when it is asked to, and that the end of the process waits for it then."""
_FEWER_SECONDS, _FEWER_SHARE = 0.5, 0.2
"""Time for re-runs that can be left out: seconds, if there are as many, or part of the time left."""
_SETTINGS_SHARE, _REST_SHARE = 0.05, 0.4
"""Parts of the time left for settings of checkpointing: at first, and for the rest of them after the plans of
blocks, where the best schedule is far from the bound."""
_OPERATORS_A_SECOND = 400
"""Size of a graph that a second is enough to search."""
_FIRST_SECONDS, _FIRST_SHARE = 1.0, 0.1
"""The least time for each of the greedy choices that come before anything else, and the part of the time left.

A solve of half a second takes this long rather than finding nothing.
"""
_MAX_INTERPRETED_OPERATORS = 1500
"""The largest graph for which a few interpreted evaluations take less than a second."""
_MAX_PROGRAM_OPERATORS, _MAX_PROGRAM_SLOTS = 100, 1200
"""The largest graph, and the largest full program, that is worth building beside a search."""
_PASSES = 2
"""Number of times that each stage of the program offers its candidates; two leave out next to nothing."""
_LINEAR_SHARE = 0.6
"""Part of the time for linear relaxations of all sizes, before branch and bound."""
_COARSE_SHARE, _PATIENCE_SECONDS = 0.1, 1.0
"""For branch and bound on a coarse relaxation: the most of the time left, and time without a better bound."""
_FAR, _VERY_FAR = 1.1, 1.6
"""Latency of the best schedule over the bound from which more settings are tried and the search is guided before
coarse relaxations bound, and from which hardly anything fits: re-runs are left out before a search, which keeps to
the budget."""
_GUIDING_SHARE = 0.6
"""Part of the time left that this may take."""
_CLOSE = 0.995
"""Part of the best linear bound from which on the finest relaxation is the one to branch on."""
_MIN_DEEP_OPERATORS = 600
"""The smallest graph for whose stretches of several blocks plans are looked for."""
_MASTER_SHARE, _MASTER_GAP = 0.08, 2e-4
"""Part of the time left for each master program, and the gap to which it is solved."""
_PRICING_SHARE = 0.5
"""Time for plans that the multipliers ask for, as a part of that for the first ones."""
_HIGHS, _BLOCKS = "HiGHS", "blocks"


def solve_peak(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Solution], None] | None = None,
) -> Solution:
    """Solve for a budget of the peak, as `monetlite.solving.solve_profile` says."""
    check_solver(options.solver)
    closing = min(_CLOSING_SECONDS, _CLOSING_SHARE * options.time_limit)
    solve = _PeakSolve(profile, budget_bytes, options, now() + options.time_limit - closing, progress)
    infeasible, known = False, tuple(starts)
    try:
        infeasible = solve.run(known)
    except KeyboardInterrupt:
        if solve.incumbent.steps is None:
            raise  # there is no best so far
        end_early()
    finally:
        solve.stopped.set()
    solution = solve.incumbent.solution(infeasible=infeasible)
    solution = _with_host(solution, profile, budget_bytes, (plain_steps(profile.graph), *known))
    if solution.status in (Status.FEASIBLE, Status.TIMEOUT) and still_compiling():
        warn(
            "the search was not compiled in time, which takes some seconds once on a machine and goes on; later "
            "solves find better schedules"
        )
    return solution


def _with_host(
    solution: Solution, profile: Profile, budget_bytes: int, known: Iterable[tuple[Step, ...]]
) -> Solution:
    """A solution with the host's times, which the methods leave out: a known schedule may be faster with them.

    The methods' own latency is of the device, which bounds it.
    """
    if solution.steps is None:
        return solution
    best = simulate(profile, solution.steps)
    if best.latency_ms <= best.device_ms:
        return solution
    for steps in known:
        with suppress(IllegalSchedule):
            best = min(best, simulate(profile, steps, budget_bytes), key=attrgetter("latency_ms"))
    status = Status.FEASIBLE if solution.status is Status.OPTIMAL else solution.status
    return replace(
        solution, steps=best.steps, latency_ms=best.latency_ms, peak_bytes=best.peak_bytes, status=status
    )


class _PeakSolve:
    """One solve: its incumbent, its clock, and what its threads tell each other."""

    def __init__(
        self,
        profile: Profile,
        budget_bytes: int,
        options: SolvingOptions,
        deadline: float,
        progress: Callable[[Solution], None] | None,
    ) -> None:
        self.problem = Problem.of(profile)
        self.incumbent = Incumbent(self.problem, budget_bytes, progress)
        self.budget_bytes = budget_bytes
        self.options = options
        self.gap = 0.0 if len(profile.graph.operators) <= SMALL_OPERATORS else options.gap
        self.began, self.deadline = now(), deadline
        self.stopped = threading.Event()
        self.deep: DeepStep | None = None
        self.planned = False
        """True once plans of blocks make a schedule within the budget."""
        self.guides: list[tuple[Step, ...]] = []
        self.tight: Integers | None = None
        """Choices of the first schedule, where hardly anything fits."""
        self.bounding = False
        self.failure: BaseException | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - now()

    def should_stop(self) -> bool:
        return self.stopped.is_set() or self.left <= 0 or self.incumbent.proven(self.gap)

    def run(self, starts: tuple[tuple[Step, ...], ...]) -> bool:
        """Try the methods in turn, cheapest first; True if infeasibility was proven."""
        problem, incumbent = self.problem, self.incumbent
        incumbent.raise_smallest(smallest_budget_bound(problem))
        if not problem.runnable:
            return True
        incumbent.phase = "trying settings of checkpointing"
        incumbent.offer(plain_steps(problem.graph), "plain")
        if self.budget_bytes < incumbent.proven_bytes:
            self._bracket_smallest()
            return True
        for steps in starts:
            incumbent.offer(steps, "start")
        if self.should_stop():
            return False
        settings = checkpointing_settings(problem.profile)
        self._try_settings(settings, _SETTINGS_SHARE)
        large = len(problem.graph.operators) > SMALL_OPERATORS
        self.deep = in_blocks(problem.profile, self.options.seed) if large and is_ready() else None
        if self.deep is not None and not self.should_stop():
            self._plan_blocks(self.deep, *STAGES[0], at_most=len(problem.graph.operators) / _OPERATORS_A_SECOND)
        if incumbent.latency_ms > _FAR * incumbent.bound_ms and not self.should_stop():
            self._try_settings(settings, _REST_SHARE)
        if incumbent.steps is None and len(problem.graph.operators) <= _MAX_INTERPRETED_OPERATORS:
            self._drop_greedily()
        if not large:
            incumbent.phase = "trying every schedule"
            exact = exhaustive(problem, self.budget_bytes, seconds=0.3 * self.left, should_stop=self.should_stop)
            if exact.steps is not None:
                incumbent.offer(exact.steps, "exhaustive")
            elif exact.status is Status.INFEASIBLE:
                incumbent.raise_smallest(self.budget_bytes + 1)
                self._bracket_smallest()
                return True
            incumbent.raise_bound(exact.lower_bound_ms, "exhaustive")
            if self.should_stop():
                return False
        bounding = threading.Thread(target=self._bound, name=BOUND_THREAD, daemon=True)
        self.bounding = True
        bounding.start()
        try:
            if self.deep is not None:
                deep_enough = len(problem.graph.operators) >= _MIN_DEEP_OPERATORS
                far = self.planned and incumbent.latency_ms > _FAR * incumbent.bound_ms
                for length, share in STAGES[1:] if deep_enough else STAGES[1:2] if far else ():
                    if not self.should_stop():
                        self._plan_blocks(self.deep, length, share)
            self._improve()
            while bounding.is_alive() and not self.should_stop():
                bounding.join(min(0.1, max(0.0, self.left)))
        finally:
            self.stopped.set()
            bounding.join(_GRACE_SECONDS)
            if bounding.is_alive():
                # A process that ends while HiGHS runs is aborted.
                atexit.register(bounding.join, _EXIT_SECONDS)
        if self.failure is not None:
            raise self.failure
        return False

    def _try_settings(self, settings: Iterator[tuple[Step, ...]], share: float) -> None:
        """Offer what people set in one line, for a share of the time left: no schedule is slower at the same peak.

        Where there is no time for a search, each comes with as few re-runs as fit, too.
        """
        end, profile = now() + share * self.left, self.problem.profile
        searched = self.left * _OPERATORS_A_SECOND >= len(profile.graph.operators)
        for steps in settings:
            if self.incumbent.offer(steps, "checkpointing") and not searched and not self.should_stop():
                fewer = with_fewer_reruns(profile, steps, self.budget_bytes, finished=lambda: now() >= end)
                self.incumbent.offer(fewer, "checkpointing")
            if now() >= end or self.should_stop():
                return

    def _drop_greedily(self) -> None:
        """Find something that fits, before anything is compiled."""
        flat = flatten(self.problem)
        for base in (keep_everything(flat), read_least(flat)):
            deadline = now() + max(_FIRST_SECONDS, _FIRST_SHARE * self.left)
            greedy = Greedy(flat, self.budget_bytes, base=base, interpreted=not is_ready(), deadline=deadline)
            first = greedy.first()
            if first is not None:
                self.incumbent.offer(first, "greedy")
                return

    def _plan_blocks(self, deep: DeepStep, length: int, share: float, at_most: float = math.inf) -> None:
        """Find plans of stretches of so many blocks, and choose one for each block.

        Finding them takes a share of the time left, and `at_most` so many seconds.
        """
        incumbent = self.incumbent
        incumbent.phase = "planning block by block"
        seconds = min(share * self.left, at_most)
        deep.sweep(length, seconds, self.should_stop)
        deep.price(self.budget_bytes, _PRICING_SHARE * seconds, self.should_stop)
        found = deep.within(self.budget_bytes, _MASTER_SHARE * self.left, _MASTER_GAP, self.should_stop)
        if found is not None:
            self.planned |= incumbent.offer(found.steps, _BLOCKS)
        nested = nested_plans(deep)
        found = None if nested is None else nested.within(self.budget_bytes, self.should_stop)
        if found is not None:
            self.planned |= incumbent.offer(found.steps, _BLOCKS)

    def _improve(self) -> None:
        """Search for better schedules, then let the boolean program improve on what was found."""
        incumbent = self.incumbent
        small = len(self.problem.graph.operators) <= _MAX_PROGRAM_OPERATORS
        slots = len(full_template(self.problem, _PASSES)) if small else math.inf
        with_program = self.left > 5 and slots <= _MAX_PROGRAM_SLOTS
        spared = min(_SMALLEST_SECONDS, _SMALLEST_SHARE * self.left)
        if incumbent.steps is None:
            # See whether anything fits, before most of the time goes into making it fast.
            self._search(share=_PROBE_SHARE)
        if incumbent.steps is None and not self.should_stop():
            # Nothing fits so far: aim at memory alone, then go on from what that finds.
            self._find_anything(seconds=0.5 * self.left)
        self._leave_out_reruns()
        if incumbent.steps is not None and self.tight is None and self._is_very_far():
            self.tight = encode(flatten(self.problem), incumbent.steps)
        if not self.should_stop():
            self._search(share=0.5 if with_program else max(0.0, 1 - spared / max(self.left, 1e-9)))
        if with_program and self.left > 2 and not self.should_stop():
            incumbent.phase = "solving the boolean program"
            self._solve_program(seconds=self.left - 1 - spared)
        if incumbent.steps is not None and self.left > 0 and not self.stopped.is_set():
            # Not needed for this budget, but people choose the next one by it.
            taken = max(_LEAST_SMALLEST_SECONDS, _SMALLEST_PART * (now() - self.began))
            self._bracket_smallest(seconds=min(spared, taken))

    def _is_very_far(self) -> bool:
        """True if the best schedule is very far from the bound, or there is none."""
        return self.incumbent.latency_ms > _VERY_FAR * self.incumbent.bound_ms

    def _leave_out_reruns(self) -> None:
        """Leave out re-runs of the best schedule where it is very far from the bound.

        What aims at memory alone runs operators again in vain, and a search leaves them out one by one.
        """
        incumbent, end = self.incumbent, now() + max(_FEWER_SHARE * self.left, min(_FEWER_SECONDS, self.left))
        large = len(self.problem.graph.operators) > CHECK_EVERYTHING
        if incumbent.steps is None or large or not self._is_very_far():
            return
        fewer = with_fewer_reruns(
            self.problem.profile,
            incumbent.steps,
            self.budget_bytes,
            parts=len(incumbent.steps),
            finished=lambda: now() >= end or self.should_stop(),
        )
        incumbent.offer(fewer, "greedy")

    def _solve_program(self, *, seconds: float) -> None:
        """Improve on the incumbent by the boolean program; what is known stays where its solver fails."""
        incumbent, solver = self.incumbent, self.options.solver
        try:
            exact = solve_program(
                self.problem,
                self.budget_bytes,
                seconds=seconds,
                passes=_PASSES,
                cutoff_ms=incumbent.latency_ms,
                solver=solver,
            )
        except SolverError as error:
            warn(f"the schedule is the search's alone: {error}")
            return
        if exact.steps is not None:
            incumbent.offer(exact.steps, solver)
        incumbent.raise_bound(exact.lower_bound_ms, solver)

    def _search(self, *, share: float) -> None:
        """Search for a share of the time left, from the best steps known."""
        self.incumbent.phase = "improving the schedule"
        search(
            self.incumbent,
            seconds=max(0.1, self.left * share),
            seed=self.options.seed,
            starts=() if self.incumbent.steps is None else (self.incumbent.steps,),
            guides=self.guides,
            tight=self.tight,
            refining=self.planned,
            neighbour_busy=lambda: self.bounding,
            should_stop=self.should_stop,
        )

    def _find_anything(self, seconds: float) -> None:
        """Look for anything within the budget, whatever its latency."""
        if len(self.problem.graph.operators) <= SMALL_OPERATORS:
            self._bracket_smallest(seconds)
            return
        incumbent = self.incumbent
        incumbent.phase = "looking for the smallest budget"
        choices = lower_peak(
            incumbent,
            seconds=seconds,
            seed=self.options.seed,
            should_stop=self.stopped.is_set,
            enough_bytes=self.budget_bytes,
        )
        if incumbent.steps is not None:
            self.tight = choices

    def _bracket_smallest(self, seconds: float = 5.0) -> None:
        """Bracket the smallest feasible budget, in so many seconds, or those left."""
        self.incumbent.phase = "looking for the smallest budget"
        bracket_smallest(
            self.incumbent,
            seconds=min(seconds, max(0.1, self.left)),
            seed=self.options.seed,
            should_stop=self.stopped.is_set,
            deep=self.deep,
        )

    def _bound(self) -> None:
        """Raise the bound beside the search, in a thread."""
        try:
            self._raise_bound()
        except BaseException as error:
            self.failure = error
            self.stopped.set()
        finally:
            self.bounding = False

    def _raise_bound(self) -> None:
        """Bound by relaxations from coarse to fine: all linear, then by branch and bound.

        Coarse ones come first there, where they bound better, a while each. The rest of the time is the finest
        one's, which has the most to say, if its linear bound is close to the best. Solutions of the finest alone
        guide the search, as coarse ones store what doesn't fit; where it is far from the bound, that comes first.
        """
        linear: list[LatencyBound] = []
        for bound in latency_bounds(self.problem, self.budget_bytes, seconds=_LINEAR_SHARE * self.left):
            self.incumbent.raise_bound(bound.lower_bound_ms, _HIGHS)
            if self.should_stop():
                return
            linear.append(bound)
        finest = linear[-1]
        linear.sort(key=lambda bound: -bound.lower_bound_ms)
        if finest.solution is not None:
            self._guide(finest.relaxation, finest.solution)
        better = linear[: linear.index(finest)]
        if better and self.incumbent.latency_ms > _FAR * linear[0].lower_bound_ms:
            self._branch(finest, share=_GUIDING_SHARE, guides=True)
        reached = [self._branch(bound, share=_COARSE_SHARE, patience_seconds=_PATIENCE_SECONDS) for bound in better]
        unsolved = [(bound_ms, at) for at, (bound_ms, solved) in enumerate(reached) if not solved]
        if unsolved and finest.lower_bound_ms < _CLOSE * linear[0].lower_bound_ms:
            self._branch(better[max(unsolved)[1]])
        else:
            self._branch(finest, guides=True)

    def _guide(self, relaxation: Relaxation, solution: Floats) -> None:
        """Let the search begin from the steps that a solution of a relaxation suggests."""
        steps = guided_steps(relaxation, solution)
        if steps is not None:
            self.guides.append(steps)

    def _branch(
        self,
        linear: LatencyBound,
        share: float = 1.0,
        patience_seconds: float = math.inf,
        *,
        guides: bool = False,
    ) -> tuple[float, bool]:
        """Raise the bound by branch and bound on a relaxation, in a share of the time left, as `integer_bound`.

        With `guides`, its solutions guide the search.
        """
        incumbent, relaxation = self.incumbent, linear.relaxation
        if self.should_stop():
            return linear.lower_bound_ms, True
        bound_ms, solved = integer_bound(
            relaxation.program,
            seconds=max(0.0, share * (self.left - _GRACE_SECONDS)),
            cutoff_ms=incumbent.latency_ms,
            on_bound=lambda better_ms: incumbent.raise_bound(better_ms, _HIGHS),
            on_solution=(lambda solution: self._guide(relaxation, solution)) if guides else None,
            should_stop=self.should_stop,
            patience_seconds=patience_seconds,
        )
        incumbent.raise_bound(bound_ms, _HIGHS)
        return bound_ms, solved
