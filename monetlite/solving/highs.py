"""HiGHS through its own interface, where duals, a dual bound while it runs, or stopping it is needed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse

from monetlite.core.errors import SolverError
from monetlite.solving.zero_one import Floats, ZeroOneProgram

_USUAL_COST = 1e4
"""What costs are scaled to add up to, since the solver's tolerances on them are absolute."""

_HEURISTIC_EFFORT = 0.2
"""Part of the effort that goes to solutions, where somebody wants them; HiGHS's default is 0.05."""


def import_highspy() -> Any:
    """The highspy module.

    Raises:
        SolverError: it is not installed.
    """
    try:
        import highspy
    except ImportError as error:
        raise SolverError("bounds need HiGHS, which is not installed; pip install highspy") from error
    return highspy


def solve_linear(program: ZeroOneProgram, *, seconds: float) -> tuple[Floats | None, Floats | None]:
    """The columns of the linear relaxation's solution, and dual multipliers of the rows; None where missing."""
    highs, unit_ms = _loaded(program, integer=False, seconds=seconds)
    highs.run()
    solution = highs.getSolution()
    columns = np.array(solution.col_value, dtype=np.float64) if solution.value_valid else None
    duals = -unit_ms * np.array(solution.row_dual[: program.limit.size], dtype=np.float64)
    return columns, duals if solution.dual_valid else None


def minimise_dual_bound(
    program: ZeroOneProgram,
    *,
    seconds: float,
    cutoff_ms: float = math.inf,
    on_bound: Callable[[float], None] | None = None,
    on_solution: Callable[[Floats], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> float:
    """Solve a 0-1 program for its dual bound, in ms; infinite where nothing below `cutoff_ms` is feasible.

    The GIL is released while HiGHS runs; the callbacks are called from the same thread, with it held.
    """
    highspy = import_highspy()
    highs, unit_ms = _loaded(program, integer=True, seconds=seconds)
    highs.setOptionValue("mip_heuristic_effort", 0.0 if on_solution is None else _HEURISTIC_EFFORT)
    # No gap is good enough.
    highs.setOptionValue("mip_rel_gap", 0.0)
    if math.isfinite(cutoff_ms):
        highs.setOptionValue("objective_bound", (cutoff_ms - program.constant_ms) / unit_ms)

    def in_ms(bound: float) -> float:
        if abs(bound) >= highspy.kHighsInf:
            return math.copysign(math.inf, bound)
        return program.constant_ms + unit_ms * bound

    raised: list[BaseException] = []

    def watch(event: Any) -> None:
        try:
            if raised:
                event.interrupt()
                return
            if on_bound is not None:
                on_bound(in_ms(float(event.data_out.mip_dual_bound)))
            if should_stop is not None and should_stop():
                event.interrupt()
        except BaseException as error:
            # Nothing may be thrown through the solver.
            raised.append(error)
            event.interrupt()

    def found(event: Any) -> None:
        try:
            if on_solution is not None and not raised:
                on_solution(np.array(event.data_out.mip_solution, dtype=np.float64))
        except BaseException as error:
            raised.append(error)

    highs.cbMipInterrupt.subscribe(watch)
    highs.cbMipImprovingSolution.subscribe(found)
    highs.run()
    if raised:
        raise raised[0]
    if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        return math.inf
    return in_ms(float(highs.getInfo().mip_dual_bound))


def _loaded(program: ZeroOneProgram, *, integer: bool, seconds: float) -> tuple[Any, float]:
    """HiGHS with the program, less its constant, and by how many ms its objective has to be multiplied."""
    highspy = import_highspy()
    columns, rows = program.cost_ms.size, program.limit.size
    members = np.flatnonzero(program.group >= 0)
    one_of = sparse.csr_array(
        (np.ones(members.size), (program.group[members], members)), shape=(program.groups, columns)
    )
    matrix = sparse.csr_array(sparse.vstack([program.matrix, one_of], format="csr"))
    matrix.sum_duplicates()
    unit_ms = float(np.abs(program.cost_ms).sum()) / _USUAL_COST or 1.0
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, rows + program.groups
    model.col_cost_ = program.cost_ms / unit_ms
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
    model.row_lower_ = np.concatenate([np.full(rows, -highspy.kHighsInf), np.ones(program.groups)])
    model.row_upper_ = np.concatenate([program.limit, np.ones(program.groups)])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    if integer:
        model.integrality_ = [highspy.HighsVarType.kInteger] * columns
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("time_limit", float(max(0.0, seconds)))
    highs.setOptionValue("threads", 1)
    highs.passModel(model)
    return highs, unit_ms
