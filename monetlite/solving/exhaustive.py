"""The exact optimum over every legal sequence of steps, for small graphs.

A best-first search (A*) over states (main operators done, values live, optional operators that ran). Values
are freed only when a step needs their room: a state with more live values can always free them later, so of
two states at the same place the one with a superset of live values at no more latency dominates, and a step
that does not fit branches over the minimal sets of values to free. The heuristic adds the cheapest run of
every operator that still has to run: those left of the main run, and those whose outputs are read later by
all implementations of an operator that has to run, and are not live. Only operators with all their reads live
can run, so each step removes at most its own operator from that set: the heuristic is consistent.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from monetlite.core.costs import Profile
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Option, Problem

_CHECK_EVERY = 512
"""States between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class _MaskedRun:
    """One way to run one operator, as bit masks over values."""

    operator: int
    choice: int
    reads: int
    writes: int
    overwrites: int
    latency_ms: float
    extra_bytes: int


class _Space:
    """The state space of one profile, with bit masks for sets of values."""

    def __init__(self, problem: Problem, *, latency_matters: bool) -> None:
        self.problem = problem
        self.latency_matters = latency_matters
        self.size = problem.size_bytes
        self.held = _mask(value for value, held in enumerate(problem.held) if held)
        options = problem.options
        self.optional_bit: dict[int, int] = {}
        for operator in problem.extra:
            if operator not in problem.position:
                # Whether it ran before is part of the state only where that makes a difference.
                matters = not problem.graph.operators[operator].rerunnable or any(
                    option.rerun_differs for option in options[operator]
                )
                self.optional_bit[operator] = 1 << operator if matters else 0
        self.main_runs = [
            [self._run(operator, option, again=False) for option in options[operator]] for operator in problem.main
        ]
        self.extra_first = {
            o: [self._run(o, option, again=False) for option in options[o]] for o in self.optional_bit
        }
        rerunnable = [o for o in problem.extra if problem.graph.operators[o].rerunnable]
        self.extra_again = {o: [self._run(o, option, again=True) for option in options[o]] for o in rerunnable}
        self.useful = self._useful()
        self.main_left_ms = [0.0] * (len(problem.main) + 1)
        for at in range(len(problem.main) - 1, -1, -1):
            self.main_left_ms[at] = self.main_left_ms[at + 1] + self._ms(problem.main_least_ms[at])
        self.must = [_mask(problem.must_read[operator]) for operator in problem.main]
        self.must_after = [0] * (len(problem.main) + 1)
        for at in range(len(problem.main) - 1, -1, -1):
            self.must_after[at] = self.must_after[at + 1] | self.must[at]
        self.must_forward = [0] * (problem.forward_main + 1)
        for at in range(problem.forward_main - 1, -1, -1):
            self.must_forward[at] = self.must_forward[at + 1] | self.must[at]
        self.must_read = [_mask(reads) for reads in problem.must_read]
        self.producer = [found[0] if len(found) == 1 else -1 for found in problem.producers]
        self.unmakeable = _mask(value for value, found in enumerate(problem.producers) if not found)
        self.remembered: dict[tuple[int, int, int], float] = {}

    def _ms(self, latency_ms: float) -> float:
        return latency_ms if self.latency_matters else 0.0

    def _run(self, operator: int, option: Option, *, again: bool) -> _MaskedRun:
        return _MaskedRun(
            operator=operator,
            choice=option.choice,
            reads=_mask(option.reads),
            writes=_mask(option.writes),
            overwrites=_mask(option.overwrites),
            latency_ms=self._ms(option.again_ms if again else option.first_ms),
            extra_bytes=option.again_extra_bytes if again else option.first_extra_bytes,
        )

    def _useful(self) -> list[int]:
        """For each place in the main run, the values that anything still to run could need."""
        problem = self.problem
        useful = [0] * (len(problem.main) + 1)
        for at in range(len(problem.main) - 1, -1, -1):
            needed = useful[at + 1] | _mask(problem.may_read[problem.main[at]])
            for operator in reversed(problem.extra):
                if any(_mask(option.writes) & needed for option in problem.options[operator]):
                    needed |= _mask(problem.may_read[operator])
            useful[at] = needed
        return useful

    def live_bytes(self, live: int) -> int:
        return sum(self.size[value] for value in _bits(live))

    def left_ms(self, done: int, live: int, ran: int) -> float:
        """A lower bound on the latency still to come; infinite where the state is a dead end."""
        key = (done, live & self.useful[done], ran)
        found = self.remembered.get(key)
        if found is None:
            found = self.main_left_ms[done] + self._forced_ms(done, live, ran)
            self.remembered[key] = found
        return found

    def _forced_ms(self, done: int, live: int, ran: int) -> float:
        problem = self.problem
        total_ms = 0.0
        missing = self.must_after[done] & ~live
        seen = 0
        while missing & ~seen:
            value = (missing & ~seen).bit_length() - 1
            seen |= 1 << value
            if self.unmakeable >> value & 1:
                return math.inf
            operator = self.producer[value]
            if operator < 0 or problem.position.get(operator, -1) >= done:
                continue  # several operators can make it, or the main run still will
            optional = operator in self.optional_bit
            if operator not in self.extra_first and operator not in self.extra_again:
                return math.inf
            if not optional and done < problem.forward_main and self.must_forward[done] >> value & 1:
                return math.inf
            runs = self.extra_again.get(operator, [])
            if optional and not ran & self.optional_bit[operator]:
                runs = self.extra_first[operator] + runs
            if not runs:
                return math.inf
            written = 0
            for run in runs:
                written |= run.writes
            seen |= written  # the operator counts once, whichever of its outputs is missing
            total_ms += min(run.latency_ms for run in runs)
            missing |= self.must_read[operator] & ~live
        return total_ms

    def moves(self, done: int, live: int, ran: int) -> Iterator[tuple[_MaskedRun, int]]:
        """Every run that can come next and be of use, with the number of main operators done after it."""
        for run in self.main_runs[done]:
            if not run.reads & ~live:
                yield run, done + 1
        useful = self.useful[done]
        in_forward = done < self.problem.forward_main
        for operator in self.problem.extra:
            optional = operator in self.optional_bit
            if in_forward and not optional:
                continue
            first = optional and not ran & self.optional_bit[operator]
            for run in self.extra_first[operator] if first else self.extra_again.get(operator, []):
                if run.writes & useful & ~live and not run.reads & ~live:
                    yield run, done

    def freed(self, live: int, run: _MaskedRun, limit_bytes: int) -> Iterator[int]:
        """The live values after freeing no more than `run` needs to fit, one answer for each minimal choice."""
        # A version that is written over was dead before: only held values stay through a second write.
        live &= ~run.writes | self.held
        new_bytes = self.live_bytes(run.writes & ~live)
        excess = self.live_bytes(live) + new_bytes + run.extra_bytes - limit_bytes
        if excess <= 0:
            yield live
            return
        candidates = [v for v in _bits(live & ~run.reads & ~self.held) if self.size[v] > 0]
        candidates.sort(key=lambda value: -self.size[value])
        left = [0] * (len(candidates) + 1)
        for at in range(len(candidates) - 1, -1, -1):
            left[at] = left[at + 1] + self.size[candidates[at]]

        def choose(at: int, excess: int, dropped: int, smallest: int) -> Iterator[int]:
            if excess <= 0:
                # Minimal: putting the smallest dropped value back must not fit.
                if excess + smallest > 0:
                    yield live & ~dropped
                return
            if left[at] < excess:
                return
            value = candidates[at]
            yield from choose(at + 1, excess - self.size[value], dropped | 1 << value, self.size[value])
            yield from choose(at + 1, excess, dropped, smallest)

        if left[0] >= excess:
            yield from choose(0, excess, 0, 0)


def exhaustive(
    problem: Problem,
    budget_bytes: int,
    *,
    state_limit: int = 200_000,
    seconds: float = math.inf,
    latency_matters: bool = True,
    should_stop: Callable[[], bool] | None = None,
) -> Solution:
    """Find the fastest legal steps within a budget, or prove that there are none.

    Args:
        problem: the graph and its costs, reduced.
        budget_bytes: no step may need more.
        state_limit: states to look at before giving up; seconds: time after which to give up.
        latency_matters: if False, stop at the first steps that fit, whatever their latency.
        should_stop: asked now and then; give up when it says so.

    Returns:
        An optimal solution (feasible if latency does not matter), an infeasible one, or where it gave up one of
        status timeout with a bound.
    """
    if not problem.runnable:
        return Solution(status=Status.INFEASIBLE, lower_bound_ms=math.inf)
    space = _Space(problem, latency_matters=latency_matters)
    deadline = time.monotonic() + seconds
    limit_bytes = budget_bytes - problem.resident_bytes
    last = len(problem.main)
    # Entries: (bound on the whole latency, −main operators done, tie-break, latency so far, done, live, ran).
    queue = [(space.left_ms(0, 0, 0), 0, 0, 0.0, 0, 0, 0)]
    best: dict[tuple[int, int, int], float] = {(0, 0, 0): 0.0}
    came_from: dict[tuple[int, int, int], tuple[tuple[int, int, int], Step]] = {}
    closed: dict[tuple[int, int], list[tuple[int, float]]] = {}
    looked, pushed = 0, 0
    while queue:
        bound_ms, _, _, so_far_ms, done, live, ran = queue[0]
        stop = looked >= state_limit or pushed >= 8 * state_limit
        if not stop and looked % _CHECK_EVERY == 0:
            stop = time.monotonic() > deadline or (should_stop is not None and should_stop())
        if stop:
            return Solution(status=Status.TIMEOUT, lower_bound_ms=bound_ms if latency_matters else 0.0)
        heapq.heappop(queue)
        state = (done, live, ran)
        if so_far_ms > best[state]:
            continue
        if done == last:
            steps = _trace_back(came_from, state)
            timeline = simulate(problem.profile, steps, budget_bytes)
            return Solution(
                status=Status.OPTIMAL if latency_matters else Status.FEASIBLE,
                steps=steps,
                latency_ms=timeline.latency_ms,
                peak_bytes=timeline.peak_bytes,
                lower_bound_ms=timeline.latency_ms if latency_matters else 0.0,
            )
        peers = closed.setdefault((done, ran), [])
        if any(live & ~other == 0 and so_far_ms >= other_ms for other, other_ms in peers):
            continue
        peers.append((live, so_far_ms))
        looked += 1
        for run, done_after in space.moves(done, live, ran):
            after_ms = so_far_ms + run.latency_ms
            ran_after = ran | space.optional_bit.get(run.operator, 0)
            for kept in space.freed(live, run, limit_bytes):
                live_after = (kept | run.writes) & ~run.overwrites
                live_after &= space.useful[done_after] | space.held
                reached = (done_after, live_after, ran_after)
                if after_ms >= best.get(reached, math.inf):
                    continue
                left_ms = space.left_ms(done_after, live_after, ran_after)
                if left_ms == math.inf:
                    continue
                best[reached] = after_ms
                came_from[reached] = (state, (run.operator, run.choice))
                pushed += 1
                entry = (after_ms + left_ms, -done_after, pushed, after_ms, *reached)
                heapq.heappush(queue, entry)
    return Solution(status=Status.INFEASIBLE, lower_bound_ms=math.inf)


def _trace_back(
    came_from: dict[tuple[int, int, int], tuple[tuple[int, int, int], Step]], state: tuple[int, int, int]
) -> tuple[Step, ...]:
    steps: list[Step] = []
    while state in came_from:
        state, step = came_from[state]
        steps.append(step)
    return tuple(reversed(steps))


def exhaustive_smallest_peak(
    problem: Problem,
    *,
    at_least_bytes: int = 0,
    start: tuple[Step, ...] | None = None,
    state_limit: int = 50_000,
    seconds: float = math.inf,
    should_stop: Callable[[], bool] | None = None,
) -> Solution:
    """Bisect on the budget until the smallest feasible one is known to the byte, or a limit is reached.

    Args:
        problem: the graph and its costs, reduced.
        at_least_bytes: a budget below which nothing is known to fit.
        start: legal steps to improve on.
        state_limit: states to look at for each budget tried; seconds: in all.
        should_stop: asked now and then; give up when it says so.

    Returns:
        `smallest_proven_bytes`, and the reached ones where there are any. Its status is optimal if both are equal,
        infeasible if no steps are legal at all.
    """
    deadline = time.monotonic() + seconds

    def attempt(budget_bytes: int) -> Solution:
        return exhaustive(
            problem,
            budget_bytes,
            state_limit=state_limit,
            seconds=deadline - time.monotonic(),
            latency_matters=False,
            should_stop=should_stop,
        )

    steps = start
    if steps is None:
        found = attempt(_plenty(problem.profile))
        if found.steps is None:
            return Solution(status=found.status, smallest_proven_bytes=at_least_bytes)
        steps = found.steps
    reached = simulate(problem.profile, steps).peak_bytes
    proven = min(at_least_bytes, reached)
    tried = proven  # the proven bound is often tight, so it is tried before halving
    while proven < reached:
        found = attempt(tried)
        if found.steps is not None:
            steps = found.steps
            reached = simulate(problem.profile, steps).peak_bytes
        elif found.status is Status.INFEASIBLE:
            proven = tried + 1
        else:
            break
        tried = (proven + reached - 1) // 2
    return Solution(
        status=Status.OPTIMAL if proven == reached else Status.FEASIBLE,
        smallest_proven_bytes=proven,
        smallest_reached_bytes=reached,
        smallest_reached_steps=steps,
    )


def _plenty(profile: Profile) -> int:
    """A budget that no step of any legal schedule can exceed."""
    workspace = max(
        (cost.of_run(again)[1] for costs in profile.costs for cost in costs for again in (False, True)),
        default=0,
    )
    values = sum(value.size_bytes for value in profile.graph.values)
    return profile.graph.resident.total + 2 * values + max(workspace, 0)


def _mask(values: Iterable[int]) -> int:
    mask = 0
    for value in values:
        mask |= 1 << value
    return mask


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
