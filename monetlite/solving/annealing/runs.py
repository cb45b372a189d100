"""Runs of simulated annealing, and the arrays that a thread needs for them.

There is one driver for three costs (`AnnealingCost`): latency within a budget, smallest peak, and gaps of reserved
memory. The moves and the loop are compiled (`compiled`); here are the arrays they work on, and the clock.
"""

import math
from collections.abc import Callable

import numpy

from monetlite.core.steps import Step
from monetlite.solving.annealing.compiled import (
    BEST_LATENCY,
    OVERFLOW,
    RECENT_COST,
    REFRESH,
    UNDO_LENGTH,
    AnnealingCost,
    Integers,
    anneal,
    new_scratch,
)
from monetlite.solving.annealing.flat_problem import FlatProblem, decode, keep_everything
from monetlite.solving.clock import now

MAX_STEPS_PER_OPERATOR = 20
"""Longest schedule, as a multiple of the number of operators."""

CHUNK_SECONDS = 0.05
"""Time in compiled code between two looks at the clock, about."""

NEVER_FITS = 1e9
"""Penalty per byte, over the mean latency of an operator, that no latency makes up for."""


class AnnealingRun:
    """One run of annealing, which may be continued.

    Args:
        start: choices to begin with.
        cost: to lower.
        temperatures: in the beginning and in the end, in the cost's unit.
        penalties: likewise, in the cost's unit per byte.
        total: iterations.
    """

    def __init__(
        self,
        start: Integers,
        cost: AnnealingCost,
        temperatures: tuple[float, float],
        penalties: tuple[float, float],
        total: int,
    ) -> None:
        self.choices = start.copy()
        self.best = start.copy()
        self.cost = cost
        self.schedule = numpy.array((*temperatures, *penalties), dtype=numpy.float64)
        self.record = numpy.array([numpy.inf, 1.0, numpy.inf])
        self.total = total
        self.at = 0

    @property
    def best_ms(self) -> float:
        """The latency of the best choices so far that fit; infinite if none do."""
        return float(self.record[BEST_LATENCY])

    def forget_best(self) -> None:
        """Take the next choices that fit as the best, whatever their latency."""
        self.record[BEST_LATENCY] = numpy.inf

    @property
    def recent_cost(self) -> float:
        return float(self.record[RECENT_COST])


class Workspace:
    """The arrays of one thread."""

    def __init__(self, flat: FlatProblem, seed: int) -> None:
        self.flat = flat
        self.moves = flat.moves
        self.scratch = new_scratch(
            flat.value_count, flat.operator_count, MAX_STEPS_PER_OPERATOR * flat.operator_count + 64
        )
        self.undo = numpy.zeros((UNDO_LENGTH, 2), dtype=numpy.int64)
        self.random = numpy.random.SeedSequence(seed).generate_state(1, numpy.uint64) | numpy.uint64(1)
        self.rate = 6e6 / max(1, flat.operator_count)
        """Iterations a second."""
        self.chunk = REFRESH
        self.no_others = numpy.zeros((0, keep_everything(flat).size), dtype=numpy.int64)

    def iterations(self, most: float, seconds: float) -> int:
        """Iterations of a run that takes at most so many seconds.

        It is the next of 2ⁿ and 3·2ⁿ⁻¹ below: runs are then as long again where the machine is about as fast.
        """
        wanted = min(most, self.rate * seconds)
        power: int = 2 ** max(6, int(math.log2(max(64.0, wanted))))
        return power * 3 // 2 if wanted >= 1.5 * power else power

    def steps(self, choices: Integers, budget_bytes: int) -> tuple[Step, ...] | None:
        """The steps of choices, as fast as they can be while within the budget where that is possible."""
        return decode(self.flat, choices, self.scratch, budget_bytes, 1.0, self.flat.mean_ms * NEVER_FITS)

    @property
    def fits(self) -> bool:
        """True if the latest steps are within their budget."""
        return bool(self.scratch.totals[OVERFLOW] == 0)

    def smallest_peak(self, choices: Integers) -> tuple[Step, ...] | None:
        """The steps of choices with the implementations that need least memory."""
        return decode(self.flat, choices, self.scratch, 0, 1e-12 / self.flat.mean_ms, 1.0)

    def advance(
        self,
        run: AnnealingRun,
        share: float,
        finished: Callable[[], bool],
        *,
        others: Integers | None = None,
        stop_when_fits: bool = False,
    ) -> bool:
        """Anneal until a share of the run is done.

        Args:
            run: to continue. share: of its iterations. finished: asked about every `CHUNK_SECONDS`.
            others: choices that moves may copy from, one a row.
            stop_when_fits: stop as soon as something without overflow is found.

        Returns:
            True if it stopped since something fits.
        """
        until = min(run.total, int(run.total * share))
        while run.at < until and not finished():
            began = now()
            end = min(until, run.at + self.chunk)
            if anneal(
                self.flat.tables,
                self.moves,
                run.choices,
                run.best,
                self.scratch,
                self.undo,
                self.random,
                self.no_others if others is None else others,
                run.record,
                run.schedule,
                run.cost,
                run.at,
                end,
                run.total,
                stop_when_fits,
            ):
                return True
            elapsed = max(1e-6, now() - began)
            self.rate = (end - run.at) / elapsed
            run.at = end
            if elapsed < CHUNK_SECONDS / 2:
                self.chunk *= 2
        return False
