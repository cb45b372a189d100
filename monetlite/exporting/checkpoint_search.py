"""The fastest checkpoint plan within a budget.

A block's plan is not to be wrapped, or to be wrapped with some results saved. Bytes and time of saved results are
sums, so sets are taken from the front of sums. The peak of each inside its block is `simulate`'s. Over blocks, a
dynamic program keeps the front of (bytes kept so far, time), and drops what exceeds the budget in a block's
forward part, in its backward part, or between blocks. Equal blocks share their plans.
"""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from monetlite.core.errors import InfeasibleBudget
from monetlite.core.units import format_bytes
from monetlite.exporting.checkpointed_step import (
    CheckpointedStep,
    CheckpointPlan,
    PricedStep,
    checkpointed,
    savable,
)
from monetlite.exporting.eager_step import OUTSIDE_BLOCKS
from monetlite.solving.sum_fronts import Choice, front_of_sums

MAX_SETS = 64
"""Sets of saved results that are looked at for each kind of block."""
_MAX_LABELS = 4000
"""Fronts of more points than this are thinned."""
_ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """One way to run a block, relative to wrapping it with nothing saved.

    Attributes:
        saved: calls whose results are saved, by their number in the block; None if it is not wrapped.
        kept_bytes: more in memory between its parts. forward_bytes, backward_bytes: higher peaks inside them.
        time_ms: longer (negative: shorter).
    """

    saved: frozenset[int] | None
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    time_ms: float


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """A checkpoint plan, with its predicted peak and step time."""

    plan: CheckpointPlan
    peak_bytes: int
    latency_ms: float


@dataclass(frozen=True)
class _Prefix:
    """Plans of the first blocks."""

    kept_bytes: int
    time_ms: float
    plan: BlockPlan | None = None
    before: "_Prefix | None" = None


@dataclass
class CheckpointSearch:
    """The plans of a recorded step with its costs.

    Attributes:
        plain: nothing is wrapped. every: all that can be is wrapped, and nothing saved.
    """

    priced: PricedStep

    def __post_init__(self) -> None:
        self.step, self.recompute = self.priced.step, self.priced.recompute
        self.order = sorted(self.recompute, key=lambda number: self.step.blocks[number].start)
        self.all_wrapped = dict.fromkeys(self.order, frozenset[int]())
        self.base = self._peaks(checkpointed(self.priced, self.all_wrapped))
        self.plain, self.every = self.found({}), self.found(self.all_wrapped)
        self.plans = dict(self._plans())

    def found(self, plan: CheckpointPlan) -> FoundPlan:
        """A plan with what is predicted of it."""
        timeline = checkpointed(self.priced, plan).timeline
        return FoundPlan(plan=plan, peak_bytes=timeline.peak_bytes, latency_ms=timeline.latency_ms)

    def solve(self, budget_bytes: int) -> FoundPlan:
        """The fastest plan within a budget.

        Raises:
            InfeasibleBudget: no plan fits; says the smallest peak of one.
        """
        if (best := self._within(budget_bytes)) is not None:
            return best
        smallest = self.smallest()
        raise InfeasibleBudget(
            f"no checkpoint plan fits {format_bytes(budget_bytes)} ({budget_bytes} bytes): what can be wrapped are "
            f"{len(self.order)} modules, and the smallest peak is {format_bytes(smallest.peak_bytes)} "
            f"({smallest.peak_bytes} bytes). Raise the budget, or run the schedule by monetlite",
            budget_bytes=budget_bytes,
            proven_bytes=0,
            reached_bytes=smallest.peak_bytes,
        )

    def smallest(self) -> FoundPlan:
        """The plan with the smallest peak."""
        best = min((self.plain, self.every), key=lambda item: item.peak_bytes)
        low, high = self.step.resident.total, best.peak_bytes
        while high - low > best.peak_bytes // 1000:
            middle = (low + high) // 2
            found = self._within(middle)
            if found is None:
                low = middle
            else:
                best, high = found, found.peak_bytes
        return best

    def _within(self, budget_bytes: int) -> FoundPlan | None:
        """The fastest plan within a budget; None if there is none. What a sum does not see lowers its limit."""
        fitting = [item for item in (self.plain, self.every) if item.peak_bytes <= budget_bytes]
        limit_bytes = budget_bytes
        for _ in range(_ROUNDS):
            plan = self._combined(limit_bytes)
            if plan is None:
                break
            found = self.found(plan)
            if found.peak_bytes <= budget_bytes:
                fitting.append(found)
                break
            limit_bytes -= found.peak_bytes - budget_bytes
        return min(fitting, key=lambda item: item.latency_ms, default=None)

    def _combined(self, limit_bytes: int) -> CheckpointPlan | None:
        """The dynamic program over blocks."""
        labels = [_Prefix(0, 0.0)]
        if self.base[OUTSIDE_BLOCKS][0] > limit_bytes:
            return None
        for number in self.order:
            forward, backward, after = self.base[number]
            reached = (
                _Prefix(label.kept_bytes + plan.kept_bytes, label.time_ms + plan.time_ms, plan, label)
                for label in labels
                for plan in self.plans[number]
                if label.kept_bytes + forward + plan.forward_bytes <= limit_bytes
                and label.kept_bytes + backward + plan.backward_bytes <= limit_bytes
                and label.kept_bytes + plan.kept_bytes + after <= limit_bytes
            )
            labels = _front(reached)
            if not labels:
                return None
        label: _Prefix | None = min(labels, key=lambda item: item.time_ms)
        chosen: dict[int, frozenset[int]] = {}
        for number in reversed(self.order):
            assert label is not None
            assert label.plan is not None
            if label.plan.saved is not None:
                start = self.step.blocks[number].start
                chosen[number] = frozenset(start + at for at in label.plan.saved)
            label = label.before
        return dict(sorted(chosen.items()))

    def _plans(self) -> Iterator[tuple[int, list[BlockPlan]]]:
        """The plans of each block; those of equal blocks are made once."""
        known: dict[Hashable, list[BlockPlan]] = {}
        for number in self.order:
            kind = self._kind(number)
            if kind not in known:
                known[kind] = self._plans_of(number)
            yield number, known[kind]

    def _kind(self, number: int) -> Hashable:
        block = self.step.blocks[number]
        calls = self.step.calls[block.start : block.end]
        first = min((value for call in calls for value in call.writes), default=0)
        return tuple(
            (
                call.call.signature,
                tuple((value - first, self.step.sizes[value]) for value in call.writes),
                cost,
            )
            for call, cost in zip(calls, self.priced.costs[block.start : block.end], strict=True)
        )

    def _plans_of(self, number: int) -> list[BlockPlan]:
        start, last = self.step.blocks[number].start, self.order[-1]
        plans = []
        for saved in dict.fromkeys((None, frozenset[int](), *self._sets(number))):
            others = {other: self.all_wrapped[other] for other in self.order if other != number}
            plan = others if saved is None else {**others, number: saved}
            made = checkpointed(self.priced, plan)
            peaks = self._peaks(made)
            forward, backward, _ = peaks[number]
            plans.append(
                BlockPlan(
                    saved=None if saved is None else frozenset(at - start for at in saved),
                    kept_bytes=peaks[last][2] - self.base[last][2],
                    forward_bytes=forward - self.base[number][0],
                    backward_bytes=backward - self.base[number][1],
                    time_ms=made.timeline.latency_ms - self.every.latency_ms,
                )
            )
        return plans

    def _sets(self, number: int) -> list[frozenset[int]]:
        """Sets of calls to save on the front of bytes and time, without the time of selective contexts."""
        block = self.step.blocks[number]
        free = set(block.inputs) | {
            item.value for item in self.step.kept if item.block != number and item.value is not None
        }
        groups = []
        for at in savable(self.step, number, self.recompute[number]):
            size = sum(self.step.sizes[value] for value in self.step.calls[at].writes if value not in free)
            groups.append([Choice(size, self.priced.costs[at].latency_ms, frozenset({at}))])
        return [choice.kept for choice in front_of_sums(groups, MAX_SETS)]

    def _peaks(self, made: CheckpointedStep) -> dict[int, tuple[int, int, int]]:
        """Peaks of each block, forward and backward, and of what is between it and the next.

        Of what is outside of blocks: that before the first. The backward part is cut where blocks run again; what
        comes before the first of these belongs to what follows the last block.
        """
        triggers = {self.recompute[number].trigger: number for number in self.order}
        peaks = {number: [0, 0, 0] for number in (OUTSIDE_BLOCKS, *self.order)}
        last = again = OUTSIDE_BLOCKS
        for at, memory_bytes in zip(made.places, made.timeline.memory_bytes, strict=True):
            if at < self.step.border:
                block = self.step.calls[at].block
                if block in self.recompute:
                    last, part = block, 0
                else:
                    part = 0 if last == OUTSIDE_BLOCKS else 2
                of = peaks[last]
            else:
                again = triggers.get(at, again)
                of, part = (peaks[last], 2) if again == OUTSIDE_BLOCKS else (peaks[again], 1)
            of[part] = max(of[part], memory_bytes)
        return {number: (forward, backward, after) for number, (forward, backward, after) in peaks.items()}


def _front(labels: Iterator[_Prefix]) -> list[_Prefix]:
    """The labels of which none has another that keeps less and is faster."""
    front: list[_Prefix] = []
    for label in sorted(labels, key=lambda item: (item.kept_bytes, item.time_ms)):
        if not front or label.time_ms < front[-1].time_ms - 1e-9:
            front.append(label)
    every = math.ceil(len(front) / _MAX_LABELS) if front else 1
    return front[::every] + ([front[-1]] if front and (len(front) - 1) % every else [])
