"""Simulated annealing, run by run: what a thread needs for it, and a run that may be continued.

The moves and the loop are compiled (`kernel`); here are the arrays they work on, and the clock.
"""

import math
import time
from collections.abc import Callable

import numpy

from monetlite.core.steps import Step
from monetlite.solving.genomes import as_arrays, decode, keep_everything
from monetlite.solving.kernel import anneal
from monetlite.solving.layout import (
    BEST_LATENCY,
    PEAK,
    RECENT_COST,
    REFRESH,
    UNDO_LENGTH,
    Integers,
    Moves,
    new_scratch,
)
from monetlite.solving.problem import Problem

MOST_RERUNS = 20
"""Steps that a schedule may have, over operators."""

CHUNK_SECONDS = 0.05
"""About how long compiled code runs before it looks at the clock."""

NEVER_FITS = 1e9
"""Penalty per byte, over the mean latency of an operator, that no latency makes up for."""


class Walker:
    """One run of annealing, which may be continued."""

    def __init__(self, genome: Integers, figures: tuple[float, float, float, float, float], total: int) -> None:
        self.genome = genome.copy()
        self.best = genome.copy()
        self.figures = numpy.array(figures, dtype=numpy.float64)
        self.record = numpy.array([numpy.inf, 1.0, numpy.inf])
        self.total = total
        self.at = 0

    @property
    def best_ms(self) -> float:
        """The latency of the best genome so far that fits; infinite if none does."""
        return float(self.record[BEST_LATENCY])

    @property
    def recent_cost(self) -> float:
        return float(self.record[RECENT_COST])


class Workspace:
    """The arrays of one thread."""

    def __init__(self, problem: Problem, moves: Moves, seed: int) -> None:
        self.problem = problem
        self.moves = moves
        self.scratch = new_scratch(
            problem.value_count, problem.operator_count, MOST_RERUNS * problem.operator_count + 64
        )
        self.undo = numpy.zeros((UNDO_LENGTH, 2), dtype=numpy.int64)
        self.random = numpy.random.SeedSequence(seed).generate_state(1, numpy.uint64) | numpy.uint64(1)
        self.mean_ms = problem.least_latency_ms / max(1, len(problem.graph.operators)) or 1.0
        self.rate = 6e6 / max(1, problem.operator_count)
        """Iterations a second."""
        self.chunk = REFRESH
        self.nobody = numpy.zeros((0, keep_everything(problem).size), dtype=numpy.int64)

    def steps(self, genome: Integers, budget_bytes: int) -> tuple[Step, ...] | None:
        """The steps of a genome, as fast as they can be while within the budget where that is possible."""
        return decode(self.problem, genome, self.scratch, budget_bytes, 1.0, self.mean_ms * NEVER_FITS)

    def arrays(self, genome: Integers, budget_bytes: int) -> tuple[Integers, Integers] | None:
        """The same as two arrays: operators, and implementations."""
        return as_arrays(self.problem, genome, self.scratch, budget_bytes, 1.0, self.mean_ms * NEVER_FITS)

    def smallest_peak(self, genome: Integers) -> tuple[int, tuple[Step, ...] | None]:
        """The peak of a genome with the options that need least, in bytes, and its steps."""
        steps = decode(self.problem, genome, self.scratch, 0, 1e-12 / self.mean_ms, 1.0)
        return int(self.scratch.totals[PEAK]), steps

    def advance(
        self,
        walker: Walker,
        budget_bytes: int,
        share: float,
        finished: Callable[[], bool],
        *,
        elite: Integers | None = None,
        stop_when_fits: bool = False,
    ) -> bool:
        """Anneal until a share of the run is done; whether a run that is to stop when something fits did."""
        others = self.nobody if elite is None else elite
        until = min(walker.total, int(walker.total * share))
        while walker.at < until and not finished():
            began = time.perf_counter()
            end = min(until, walker.at + self.chunk)
            if anneal(
                self.problem.tables,
                self.moves,
                walker.genome,
                walker.best,
                self.scratch,
                self.undo,
                self.random,
                others,
                walker.record,
                walker.figures,
                budget_bytes,
                walker.at,
                end,
                walker.total,
                stop_when_fits,
            ):
                return True
            elapsed = max(1e-6, time.perf_counter() - began)
            self.rate = (end - walker.at) / elapsed
            walker.at = end
            if elapsed < CHUNK_SECONDS / 2:
                self.chunk *= 2
        return False


def round_down(iterations: float) -> int:
    """The next of 2ⁿ and 3·2ⁿ⁻¹ below: runs are then as long again where the machine is about as fast."""
    power: int = 2 ** max(6, int(math.log2(max(64.0, iterations))))
    return power * 3 // 2 if iterations >= 1.5 * power else power
