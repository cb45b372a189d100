"""The compiled loop of simulated annealing."""

import math

import numpy
from numpy.typing import NDArray

from monetlite.solving.kernel import LATENCY, OVERFLOW, Scratch, entry, evaluate
from monetlite.solving.moves import Moves, draw, propose, take_back
from monetlite.solving.problem import Floats, Integers, Tables

TEMPERATURE_START, TEMPERATURE_END, PENALTY_START, PENALTY_END, WEIGHT = range(5)
"""Entries of `plan`: temperatures and latency weight in cost per ms of latency, penalties in cost per byte."""

BEST_LATENCY, PRESSURE = range(2)
"""Entries of `record`: the latency of the best genome that fits; what the penalty is multiplied by while
nothing has come to fit."""

REFRESH = 256
"""Iterations between changes of the temperature and the penalty."""


@entry
def anneal(
    tables: Tables,
    moves: Moves,
    genome: Integers,
    best: Integers,
    scratch: Scratch,
    undo: Integers,
    random: NDArray[numpy.uint64],
    record: Floats,
    plan: Floats,
    budget_bytes: int,
    begin: int,
    end: int,
    total: int,
    stop_when_fits: bool,
) -> bool:
    """Iterations `begin` to `end` of a run of `total`; whether something that fits was found, if to stop there.

    `genome` is what the run stands at; what fits and is faster than record[BEST_LATENCY] is copied to `best`.
    """
    weight = plan[WEIGHT]
    temperature = plan[TEMPERATURE_START]
    penalty = plan[PENALTY_START]
    cost = numpy.inf
    for iteration in range(begin, end):
        if (iteration - begin) % REFRESH == 0:
            share = iteration / total
            temperature = plan[TEMPERATURE_START] * (plan[TEMPERATURE_END] / plan[TEMPERATURE_START]) ** share
            penalty = plan[PENALTY_START] * (plan[PENALTY_END] / plan[PENALTY_START]) ** min(1.0, share / 0.85)
            penalty *= record[PRESSURE]
            cost = evaluate(tables, genome, scratch, budget_bytes, weight, penalty, numpy.inf)
            if cost < numpy.inf:
                if scratch.totals[OVERFLOW] > 0 and share > 0.6:
                    record[PRESSURE] *= 1.05
                elif scratch.totals[OVERFLOW] == 0:
                    record[PRESSURE] = max(1.0, record[PRESSURE] / 1.05)
        propose(tables, moves, genome, scratch, undo, random)
        if undo[0, 0] == 0:
            continue
        bound = cost - temperature * math.log(1.0 - draw(random))
        after = evaluate(tables, genome, scratch, budget_bytes, weight, penalty, bound)
        if after > bound or after == numpy.inf:
            take_back(genome, undo)
            continue
        cost = after
        if scratch.totals[OVERFLOW] == 0 and scratch.totals[LATENCY] < record[BEST_LATENCY]:
            record[BEST_LATENCY] = scratch.totals[LATENCY]
            best[:] = genome
            if stop_when_fits:
                return True
    return False
