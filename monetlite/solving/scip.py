"""SCIP through its own interface, where a cutoff, a dual bound while it runs, or stopping it is needed."""

import math
from collections.abc import Callable
from typing import Any

from monetlite.errors import SolverError
from monetlite.solving.relaxation import ZeroOneProgram


def import_pyscipopt() -> Any:
    """The pyscipopt module.

    Raises:
        SolverError: it is not installed.
    """
    try:
        import pyscipopt
    except ImportError as error:
        raise SolverError("SCIP is not installed; pip install pyscipopt, or choose HIGHS") from error
    return pyscipopt


def minimise_dual_bound(
    program: ZeroOneProgram,
    *,
    seconds: float,
    cutoff_ms: float = math.inf,
    on_bound: Callable[[float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> float:
    """Solve a 0-1 program for its dual bound, in ms; infinite where nothing below `cutoff_ms` is feasible.

    The GIL is released while SCIP runs; the callbacks are called from the same thread, with it held.
    """
    pyscipopt = import_pyscipopt()
    model = pyscipopt.Model()
    model.hideOutput()
    columns = [model.addVar(vtype="B", obj=float(cost_ms)) for cost_ms in program.cost_ms]
    matrix = program.matrix.tocsr()
    for row in range(program.limit.size):
        begin, end = matrix.indptr[row], matrix.indptr[row + 1]
        terms = pyscipopt.quicksum(float(matrix.data[k]) * columns[matrix.indices[k]] for k in range(begin, end))
        if begin == end:
            if program.limit[row] < 0:
                return math.inf
            continue
        model.addCons(terms <= float(program.limit[row]))
    members: list[list[Any]] = [[] for _ in range(program.groups)]
    for column, group in zip(columns, program.group, strict=True):
        if group >= 0:
            members[group].append(column)
    for choices in members:
        model.addCons(pyscipopt.quicksum(choices) == 1)
    model.addObjoffset(program.constant_ms)
    if math.isfinite(cutoff_ms):
        model.setObjlimit(cutoff_ms)
    model.setParam("limits/time", max(0.0, seconds))
    model.setParam("misc/catchctrlc", False)
    # Only the bound is wanted: no heuristics.
    model.setHeuristics(pyscipopt.SCIP_PARAMSETTING.OFF)

    class Watch(pyscipopt.Eventhdlr):  # type: ignore[name-defined,misc]
        def eventinit(self) -> None:
            for event in (pyscipopt.SCIP_EVENTTYPE.LPSOLVED, pyscipopt.SCIP_EVENTTYPE.NODESOLVED):
                self.model.catchEvent(event, self)

        def eventexec(self, event: Any) -> None:
            if on_bound is not None:
                on_bound(float(self.model.getDualbound()))
            if should_stop is not None and should_stop():
                self.model.interruptSolve()

    model.includeEventhdlr(Watch(), "watch", "reports the dual bound, and stops when asked")
    model.optimizeNogil()
    status = model.getStatus()
    if status == "infeasible":
        return math.inf
    bound_ms = float(model.getDualbound())
    return bound_ms if abs(bound_ms) < model.infinity() else -math.inf
