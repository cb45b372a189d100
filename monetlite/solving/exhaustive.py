"""The exact optimum over every legal sequence of steps, for small graphs.

A best-first search (A*) over states (main operators done, values live, optional operators that ran). Values
are freed only when a step needs their room: a state with more live values can always free them later, so of
two states at the same place the one with a superset of live values at no more latency dominates, and a step
that does not fit branches over the minimal sets of values to free. The heuristic adds the cheapest run of
every operator that still has to run: those left of the main run, and those whose outputs are read later by
all implementations of an operator that has to run, and are not live. Only operators with all their reads live
can run, so each step removes at most its own operator from that set: the heuristic is consistent.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.clock import now
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem

_CHECK_EVERY = 512
"""States between two looks at the clock."""
_PLENTY_BYTES = 2**62
"""A budget that no step exceeds."""


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
        self.size = problem.size_bytes
        self.held = _mask(value for value, held in enumerate(problem.held) if held)
        operators, last = problem.graph.operators, len(problem.main)
        self.first: dict[int, list[_MaskedRun]] = {}
        self.again: dict[int, list[_MaskedRun]] = {}
        self.ran_bit: dict[int, int] = {}
        """For each optional operator, its bit in a state, which is 0 where an earlier run makes no difference."""
        for operator, options in enumerate(problem.options):
            self.first[operator], again = (
                [
                    _MaskedRun(
                        operator=operator,
                        choice=option.choice,
                        reads=_mask(option.reads),
                        writes=_mask(option.writes),
                        overwrites=_mask(option.overwrites),
                        latency_ms=option.of_run(later)[0] if latency_matters else 0.0,
                        extra_bytes=option.of_run(later)[1],
                    )
                    for option in options
                ]
                for later in (False, True)
            )
            rerunnable = operators[operator].rerunnable
            self.again[operator] = again if rerunnable and problem.is_forward(operator) else []
            if operator not in problem.position:
                differs = not rerunnable or any(option.rerun_differs for option in options)
                self.ran_bit[operator] = 1 << operator if differs else 0
        self.main_left_ms = [
            math.fsum(problem.main_least_ms[at:]) if latency_matters else 0.0 for at in range(last + 1)
        ]
        self.useful = [_mask(problem.useful_before(at)) for at in range(last + 1)]
        self.must_read = [_mask(reads) for reads in problem.must_read]
        must = [self.must_read[operator] for operator in problem.main]
        self.must_after = [_union(must[at:]) for at in range(last + 1)]
        self.must_forward = [_union(must[at : problem.forward_main]) for at in range(last + 1)]
        self.left_ms = functools.cache(self._left_ms)

    def live_bytes(self, live: int) -> int:
        return sum(self.size[value] for value in _bits(live))

    def runs(self, operator: int, ran: int) -> list[_MaskedRun]:
        """The runs of an operator that can come next outside the main run."""
        first = operator in self.ran_bit and not ran & self.ran_bit[operator]
        return self.first[operator] if first else self.again[operator]

    def _left_ms(self, done: int, live: int, ran: int) -> float:
        """A lower bound on the latency still to come; infinite where the state is a dead end."""
        problem = self.problem
        total_ms = self.main_left_ms[done]
        missing = self.must_after[done] & ~live
        seen = 0
        while missing & ~seen:
            value = (missing & ~seen).bit_length() - 1
            seen |= 1 << value
            operator = problem.graph.writer[value]
            if problem.position.get(operator, -1) >= done:
                continue  # the main run still will make it
            optional = operator in self.ran_bit
            if not optional and self.must_forward[done] >> value & 1:
                return math.inf
            first_is_next = optional and not ran & self.ran_bit[operator]
            runs = [*self.first[operator], *self.again[operator]] if first_is_next else self.again[operator]
            if not runs:
                return math.inf
            seen |= _union(run.writes for run in runs)  # the operator counts once, whichever output is missing
            total_ms += min(run.latency_ms for run in runs)
            missing |= self.must_read[operator] & ~live
        return total_ms

    def moves(self, done: int, live: int, ran: int) -> Iterator[tuple[_MaskedRun, int]]:
        """Every run that can come next and be of use, with the number of main operators done after it."""
        for run in self.first[self.problem.main[done]]:
            if not run.reads & ~live:
                yield run, done + 1
        in_forward = done < self.problem.forward_main
        for operator in self.problem.extra:
            if in_forward and operator not in self.ran_bit:
                continue
            for run in self.runs(operator, ran):
                if run.writes & self.useful[done] & ~live and not run.reads & ~live:
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
        sizes = [self.size[value] for value in candidates]
        left = [sum(sizes[at:]) for at in range(len(sizes) + 1)]

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

        yield from choose(0, excess, 0, 0)


def exhaustive(
    problem: Problem,
    budget_bytes: int,
    *,
    state_limit: int = 200_000,
    seconds: float = math.inf,
    latency_matters: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
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
    space = _Space(problem, latency_matters=latency_matters)
    deadline = now() + seconds
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
            stop = now() > deadline or should_stop()
        if stop:
            return Solution(status=Status.TIMEOUT, lower_bound_ms=bound_ms if latency_matters else 0.0)
        heapq.heappop(queue)
        state = (done, live, ran)
        if so_far_ms > best[state]:
            continue
        if done == last:
            steps: list[Step] = []
            while state in came_from:
                state, step = came_from[state]
                steps.append(step)
            timeline = simulate(problem.profile, steps[::-1], budget_bytes)
            return Solution(
                status=Status.OPTIMAL if latency_matters else Status.FEASIBLE,
                steps=timeline.steps,
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
            ran_after = ran | space.ran_bit.get(run.operator, 0)
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


def exhaustive_smallest_peak(
    problem: Problem,
    *,
    at_least_bytes: int = 0,
    start: tuple[Step, ...] | None = None,
    state_limit: int = 50_000,
    seconds: float = math.inf,
    should_stop: Callable[[], bool] = lambda: False,
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
    deadline = now() + seconds

    def attempt(budget_bytes: int) -> Solution:
        return exhaustive(
            problem,
            budget_bytes,
            state_limit=state_limit,
            seconds=deadline - now(),
            latency_matters=False,
            should_stop=should_stop,
        )

    if start is None:
        found = attempt(_PLENTY_BYTES)
        if found.steps is None:
            return Solution(status=found.status, smallest_proven_bytes=at_least_bytes)
        start = found.steps
    steps, reached = start, simulate(problem.profile, start).peak_bytes
    proven = tried = min(at_least_bytes, reached)  # the proven bound is often tight, so it is tried before halving
    while proven < reached:
        found = attempt(tried)
        if found.steps is not None and found.peak_bytes is not None:
            steps, reached = found.steps, found.peak_bytes
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


def _mask(values: Iterable[int]) -> int:
    mask = 0
    for value in values:
        mask |= 1 << value
    return mask


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(int.__or__, masks, 0)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
