"""Greedy choices: drop one value after the other until the rest fits. A baseline, and a start for the search."""

import math
from collections.abc import Iterator

import numpy

from monetlite.core.steps import Step
from monetlite.solving.annealing.compiled import (
    LATENCY,
    OVERFLOW,
    VALUE_WRITER,
    Integers,
    evaluate,
    evaluate_interpreted,
    new_scratch,
)
from monetlite.solving.annealing.flat_problem import FlatProblem, decode, keep_everything
from monetlite.solving.clock import now

TRIALS = 1000
"""With more values than this, several are dropped at a time."""

STAY_AFTER_RERUN, RERUN_EVERY_TIME = ~1, 0
"""Retain masks of a dropped value: re-run at its first read in the backward pass and then kept, or at all."""


class Greedy:
    """Greedy choices of the values to drop.

    Args:
        flat: the problem.
        budget_bytes: no step may need more.
        base: choices to begin from; by default those of plain training.
        interpreted: compile nothing; slower by some thousand times, and there at once.
        deadline: of `clock.now`; nothing else is tried after it.
    """

    def __init__(
        self,
        flat: FlatProblem,
        budget_bytes: int,
        *,
        base: Integers | None = None,
        interpreted: bool = False,
        deadline: float = math.inf,
    ) -> None:
        self.flat = flat
        self.base = keep_everything(flat) if base is None else base
        self.evaluate = evaluate_interpreted if interpreted else evaluate
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.never_fits = flat.problem.least_latency_ms + 1.0
        self.scratch = new_scratch(flat.value_count, flat.operator_count, 20 * flat.operator_count)

        def freed_bytes_per_ms(value: int) -> float:
            writer = int(flat.tables.values[value, VALUE_WRITER])
            again_ms = min(cost.of_run(again=True)[0] for cost in flat.problem.profile.costs[writer])
            return flat.graph.values[value].size_bytes / (again_ms + 1e-9)

        self.order = numpy.array(
            sorted(flat.droppable.tolist(), key=freed_bytes_per_ms, reverse=True), dtype=numpy.int64
        )

    def choices(self) -> Iterator[Integers]:
        """Choices that fit the budget, at most one for each way of choosing."""
        for rest in (STAY_AFTER_RERUN, RERUN_EVERY_TIME, None):
            found = self._helpful() if rest is None else self._first_of_all(rest)
            if found is not None:
                yield found

    def first(self) -> tuple[Step, ...] | None:
        """Steps of the first way that fits, without trying the others; None if none does."""
        found = next(self.choices(), None)
        return None if found is None else self._steps(found)

    def best(self) -> tuple[Step, ...] | None:
        """Steps of the fastest way that fits; None if none does."""
        fastest: tuple[Step, ...] | None = None
        fastest_ms = math.inf
        for found in self.choices():
            steps = self._steps(found)
            if self.scratch.totals[LATENCY] < fastest_ms:
                fastest, fastest_ms = steps, float(self.scratch.totals[LATENCY])
        return fastest

    def _steps(self, found: Integers) -> tuple[Step, ...] | None:
        return decode(self.flat, found, self.scratch, self.budget_bytes, 1.0, self.never_fits, self.evaluate)

    def _overflow_bytes(self, found: Integers) -> float:
        """Bytes beyond the budget, summed over steps; infinite when time is up."""
        if now() >= self.deadline:
            return math.inf
        cost = self.evaluate(
            self.flat.tables, found, self.scratch, self.budget_bytes, 1.0, self.never_fits, numpy.inf
        )
        return float(self.scratch.totals[OVERFLOW]) if cost < numpy.inf else math.inf

    def _first_of_all(self, rest: int) -> Integers | None:
        """Drop the first values in order; as few as it takes, by bisection."""

        def dropping(count: int) -> Integers:
            found = self.base.copy()
            found[self.order[:count]] &= rest
            return found

        few, enough = -1, len(self.order)
        if self._overflow_bytes(dropping(enough)) > 0:
            # Where everything dropped does not fit, less may: re-running in the worst place costs memory too.
            fitting = (n for n in range(0, enough, 1 + enough // 20) if self._overflow_bytes(dropping(n)) == 0)
            enough = next(fitting, -1)
            if enough < 0:
                return None
        while enough - few > 1:
            middle = (few + enough) // 2
            if self._overflow_bytes(dropping(middle)) == 0:
                enough = middle
            else:
                few = middle
        return dropping(enough)

    def _helpful(self) -> Integers | None:
        """Drop a value only where that lowers the overflow; then have values re-run at each read likewise."""
        found = self.base.copy()
        excess = self._overflow_bytes(found)
        batch = 1 + len(self.order) // TRIALS
        for rest in (STAY_AFTER_RERUN, RERUN_EVERY_TIME):
            for start in range(0, len(self.order), batch):
                if excess == 0:
                    return found
                values = self.order[start : start + batch]
                before = found[values]
                found[values] &= rest
                after = self._overflow_bytes(found)
                if after < excess:
                    excess = after
                else:
                    found[values] = before
        return found if excess == 0 else None
