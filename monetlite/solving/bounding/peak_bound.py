"""Memory that every schedule needs: the values that are certainly live, and a bound on the peak.

All bounds stand on `certain_lifetimes`.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from monetlite.solving.problem import Option, Problem

_AVAILABILITY_LIMIT = 1_000_000
"""Backward operators times forward ones, beyond which `smallest_budget_bound` leaves out its second part."""


@dataclass(frozen=True, kw_only=True)
class CertainLifetimes:
    """Lifetimes that values have in every schedule.

    `fixed_bytes[m]` is live before main operator m in every schedule, and is no modelled value;
    `pinned_until[v]` is the last main operator before which value v certainly is live, −1 if there is none.
    """

    problem: Problem
    fixed_bytes: list[int]
    pinned_until: list[int]

    def pinned(self, value: int, at: int) -> bool:
        """True if `fixed_bytes[at]` counts the value."""
        return self.pinned_until[value] >= at > self.problem.position[self.problem.graph.writer[value]]

    def own_bytes(self, at: int, option: Option, modelled: frozenset[int] = frozenset()) -> int:
        """Bytes that main operator `at` needs with an option beyond `fixed_bytes` and modelled values."""
        size = self.problem.size_bytes
        reads = sum(size[value] for value in option.reads - modelled if not self.pinned(value, at))
        return reads + sum(size[value] for value in option.writes) + option.first_extra_bytes


def certain_lifetimes(problem: Problem) -> CertainLifetimes:
    """The values that are live before each main operator whatever the schedule, modelled values left out.

    A value that only a main operator makes, and that cannot be made again, stays from its maker to the last
    main operator that reads it in every implementation; a held value stays to the end.
    """
    count = len(problem.main)
    pinned_until = [-1] * len(problem.size_bytes)
    forward_until = [-1] * len(problem.size_bytes)
    for at, operator in enumerate(problem.main):
        for value in problem.must_read[operator]:
            pinned_until[value] = at
            if at < problem.forward_main:
                forward_until[value] = at
    change = [0] * (count + 1)
    for value in range(len(problem.size_bytes)):
        maker = problem.graph.writer.get(value, -1)
        if maker not in problem.position or value not in problem.always_writes[maker]:
            pinned_until[value] = -1
            continue
        made_at = problem.position[maker]
        if problem.held[value]:
            pinned_until[value] = count - 1
        elif made_at < problem.forward_main and problem.graph.operators[maker].rerunnable:
            # It can be made again in the backward part: certain only up to its last forward reader.
            pinned_until[value] = forward_until[value]
        if pinned_until[value] > made_at:
            change[made_at + 1] += problem.size_bytes[value]
            change[pinned_until[value] + 1] -= problem.size_bytes[value]
        else:
            pinned_until[value] = -1
    fixed_bytes, running = [], 0
    for at in range(count):
        running += change[at]
        fixed_bytes.append(running)
    return CertainLifetimes(problem=problem, fixed_bytes=fixed_bytes, pinned_until=pinned_until)


@lru_cache(maxsize=2)
def smallest_budget_bound(problem: Problem) -> int:
    """Bytes below which no schedule fits, however slow.

    Each main operator needs the values that are live across it whatever the schedule (`certain_lifetimes`),
    and its own reads, outputs and workspace. What it reads was either kept since the forward part, past every
    operator in between, or made again somewhere, beside what was certainly live there, from what was
    available there by the same argument: the least peak of all those ways, value by value, is a bound too.
    """
    if not problem.runnable:
        return problem.resident_bytes
    lifetimes = certain_lifetimes(problem)
    needs = [
        [
            (option, lifetimes.fixed_bytes[at] + lifetimes.own_bytes(at, option))
            for option in problem.options[operator]
        ]
        for at, operator in enumerate(problem.main)
    ]
    bound = max((min(need for _, need in ways) for ways in needs), default=0)
    backward = len(problem.main) - problem.forward_main
    if backward * len(problem.extra) <= _AVAILABILITY_LIMIT:
        bound = max(bound, _availability_bound(lifetimes, needs))
    return problem.resident_bytes + max(bound, 0)


def _availability_bound(lifetimes: CertainLifetimes, needs: list[list[tuple[Option, int]]]) -> int:
    """The second part of `smallest_budget_bound`: the peak without which reads can't be live."""
    problem = lifetimes.problem
    size = np.array(problem.size_bytes, dtype=np.int64)
    forward, count = problem.forward_main, len(problem.main)
    # peak[v]: no schedule has v live just before the present place with a smaller peak so far. Values of the
    # backward part, and those that some implementations leave out, are not followed: 0 is a bound for them.
    followed = np.zeros(len(size), dtype=bool)
    made_at = np.full(len(size), count, dtype=np.int64)
    for value, maker in problem.graph.writer.items():
        made_at[value] = problem.position.get(maker, count)
        followed[value] = problem.is_forward(maker) and value in problem.always_writes[maker]
    peak = np.zeros(len(size), dtype=np.int64)
    runs = [
        (
            operator,
            sorted(value for value in problem.must_read[operator] if followed[value]),
            sorted(value for value in problem.always_writes[operator] if followed[value]),
            [
                (
                    option.reads,
                    sum(problem.size_bytes[v] for v in option.writes if not problem.held[v])
                    + min(option.first_extra_bytes, option.again_extra_bytes),
                )
                for option in problem.options[operator]
            ],
        )
        for operator in problem.extra
        if problem.options[operator]
    ]
    # `pinned` of every value: after it is made, up to here.
    pinned_until = np.array(lifetimes.pinned_until, dtype=np.int64)
    own: list[int] = [0] * len(runs)
    """For each run, the bytes that it needs at least beside `fixed_bytes`: other ones where `pinned` changes."""
    changing: list[set[int]] = [set() for _ in range(count + 1)]
    for run, (_, _, _, ways) in enumerate(runs):
        changing[forward].add(run)
        for value in {value for option_reads, _ in ways for value in option_reads}:
            if pinned_until[value] >= 0:
                changing[min(int(made_at[value]) + 1, count)].add(run)
                changing[min(int(pinned_until[value]) + 1, count)].add(run)
    bound = 0
    for at in range(count):
        if at >= forward:
            for run in changing[at]:
                own[run] = min(
                    extra + sum(problem.size_bytes[v] for v in option_reads if not lifetimes.pinned(v, at))
                    for option_reads, extra in runs[run][3]
                )
            least_peak = peak.tolist()
            for (_, reads, writes, _), own_here in zip(runs, own, strict=True):
                here = max([lifetimes.fixed_bytes[at] + own_here, *(least_peak[value] for value in reads)])
                for value in writes:
                    if here < least_peak[value]:
                        least_peak[value] = here
            peak = np.array(least_peak, dtype=np.int64)
        bound = max(
            bound,
            min(
                max([need, *(int(peak[value]) for value in option.reads if followed[value])])
                for option, need in needs[at]
            ),
        )
        # Keeping a value past this operator takes the operator's memory, with the value beside its reads.
        least = min(need for _, need in needs[at])
        beside = least + size
        for value in {value for option, _ in needs[at] for value in option.reads}:
            beside[value] = min(
                need + (0 if value in option.reads else int(size[value])) for option, need in needs[at]
            )
        beside[followed & (made_at < at) & (pinned_until >= at)] = least
        alive = followed & (made_at < at)
        peak[alive] = np.maximum(peak[alive], beside[alive])
    return bound
