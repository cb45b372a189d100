"""Dropping values one after the other until the rest fits: a baseline, and where the search begins."""

import math
import time
from collections.abc import Iterator

import numpy

from monetlite.core.steps import Step
from monetlite.solving.genomes import decode, keep_everything
from monetlite.solving.kernel import evaluate, evaluate_interpreted
from monetlite.solving.layout import (
    LATENCY,
    OVERFLOW,
    VALUE_WRITER,
    Integers,
    new_scratch,
)
from monetlite.solving.problem import Problem

TRIALS = 1000
"""With more values than this, several are dropped at a time."""

STAY_AFTER_RERUN, RERUN_EVERY_TIME = ~1, 0
"""Retain masks of a dropped value: re-run at its first read in the backward pass and then kept, or at all."""


class Greedy:
    """Greedy choices of what to drop, for one problem and budget.

    It begins from `base`, by default what plain training does. With `interpreted` nothing is compiled: slower by
    some thousand times, and there at once. From `deadline` on (of `time.monotonic`) nothing else is tried.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        *,
        base: Integers | None = None,
        interpreted: bool = False,
        deadline: float = math.inf,
    ) -> None:
        self.problem = problem
        self.base = keep_everything(problem) if base is None else base
        self.evaluate = evaluate_interpreted if interpreted else evaluate
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.scratch = new_scratch(problem.value_count, problem.operator_count, 20 * problem.operator_count)
        self.order = numpy.array(
            sorted(problem.droppable.tolist(), key=self._worth, reverse=True), dtype=numpy.int64
        )

    def _worth(self, value: int) -> float:
        """Bytes freed per millisecond of re-running what writes the value."""
        writer = int(self.problem.tables.values[value, VALUE_WRITER])
        again_ms = min(cost.of_run(again=True)[0] for cost in self.problem.profile.costs[writer])
        return self.problem.graph.values[value].size_bytes / (again_ms + 1e-9)

    def genomes(self) -> Iterator[Integers]:
        """What fits the budget, each way of choosing once."""
        for way in (self._stay_after_rerun, self._rerun_every_time, self._helpful):
            genome = way()
            if genome is not None:
                yield genome

    def first(self) -> tuple[Step, ...] | None:
        """The steps of the first way that fits, without trying the others; None if none does."""
        genome = next(self.genomes(), None)
        return None if genome is None else self._steps(genome)

    def best(self) -> tuple[Step, ...] | None:
        """The fastest of them as steps; None if none fits."""
        fastest: tuple[float, Integers] | None = None
        for genome in self.genomes():
            self._overflow_bytes(genome)
            latency_ms = float(self.scratch.totals[LATENCY])
            if fastest is None or latency_ms < fastest[0]:
                fastest = latency_ms, genome
        if fastest is None:
            return None
        return self._steps(fastest[1])

    def _steps(self, genome: Integers) -> tuple[Step, ...] | None:
        return decode(self.problem, genome, self.scratch, self.budget_bytes, 1.0, self._never_fits, self.evaluate)

    @property
    def _never_fits(self) -> float:
        return self.problem.least_latency_ms + 1.0

    def _overflow_bytes(self, genome: Integers) -> float:
        """What steps need beyond the budget, summed over steps; too much, when time is up."""
        if time.monotonic() >= self.deadline:
            return math.inf
        cost = self.evaluate(
            self.problem.tables, genome, self.scratch, self.budget_bytes, 1.0, self._never_fits, numpy.inf
        )
        return float(self.scratch.totals[OVERFLOW]) if cost < numpy.inf else math.inf

    def _stay_after_rerun(self) -> Integers | None:
        return self._first_of_all(STAY_AFTER_RERUN)

    def _rerun_every_time(self) -> Integers | None:
        return self._first_of_all(RERUN_EVERY_TIME)

    def _first_of_all(self, rest: int) -> Integers | None:
        """Drop the first values in order; as few as it takes, by bisection."""

        def dropping(count: int) -> Integers:
            genome = self.base.copy()
            genome[self.order[:count]] &= rest
            return genome

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
        genome = self.base.copy()
        excess = self._overflow_bytes(genome)
        batch = 1 + len(self.order) // TRIALS
        for rest in (STAY_AFTER_RERUN, RERUN_EVERY_TIME):
            for start in range(0, len(self.order), batch):
                if excess == 0:
                    return genome
                values = self.order[start : start + batch]
                before = genome[values]
                genome[values] &= rest
                after = self._overflow_bytes(genome)
                if after < excess:
                    excess = after
                else:
                    genome[values] = before
        return genome if excess == 0 else None
