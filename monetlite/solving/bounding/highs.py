"""HiGHS through its own interface: for duals, bounds while it runs, and stopping it."""

import math
from collections.abc import Collection
from typing import Any

import highspy
import numpy as np

from monetlite.solving.bounding.zero_one import ZeroOneProgram
from monetlite.solving.clock import on_the_wall


def loaded(
    program: ZeroOneProgram, *, integer: Collection[int] = (), seconds: float, cutoff_ms: float = math.inf
) -> tuple[Any, float]:
    """HiGHS with the program, less its constant, and the ms that a unit of its objective stands for.

    Args:
        program: the rows; every column is between 0 and 1, and 0 if it costs more than the cutoff.
        integer: columns that are 0 or 1.
        seconds: its time limit.
    """
    columns, rows = len(program.cost_ms), len(program.limit)
    matrix = program.matrix()
    matrix.sum_duplicates()
    cost_ms, limit = np.array(program.cost_ms), np.array(program.limit)
    unit_ms, useful = program.unit_ms(cutoff_ms), program.useful(cutoff_ms)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, rows
    model.col_cost_ = np.where(useful, cost_ms, 0.0) / unit_ms
    model.col_lower_, model.col_upper_ = np.zeros(columns), useful.astype(np.float64)
    model.row_lower_ = np.where(program.equal, limit, -highspy.kHighsInf)
    model.row_upper_ = limit
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    if integer:
        kinds = [highspy.HighsVarType.kContinuous] * columns
        for column in integer:
            kinds[column] = highspy.HighsVarType.kInteger
        model.integrality_ = kinds
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.silent()
    highs.setOptionValue("time_limit", on_the_wall(max(0.0, seconds)))
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    return highs, unit_ms
