"""Lower bounds on the latency of every legal schedule within a budget, from the relaxation, by HiGHS.

The bound of the linear relaxation comes from dual multipliers, whoever computed them and however exactly:
Lagrangian duality turns *any* non-negative multipliers into a valid bound (`zero_one.dual_bound_ms`). So a solver's
tolerances, or its running out of time, cost quality and never validity.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from monetlite.solving.bounding.highs import loaded
from monetlite.solving.bounding.relaxation import Relaxation
from monetlite.solving.bounding.zero_one import Floats, ZeroOneProgram, dual_bound_ms, rounded_down
from monetlite.solving.clock import now
from monetlite.solving.problem import Problem

COARSE_ROWS = (2, 3, 4, 8, 16)
"""Memory rows of each part of the step in coarse relaxations."""
_MAX_SHARE = 0.25
"""Part of the time left that a linear program may take where a larger one is to follow."""
_HEURISTIC_EFFORT = 0.2
"""Part of the effort that goes to solutions, where somebody wants them; HiGHS's default is 0.05."""
_RISE = 2e-5
"""Part of the bound by which it has to rise to be rising."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyBound:
    """A bound on the latency of every schedule within the budget.

    Attributes:
        lower_bound_ms: the bound.
        relaxation: its origin, for `integer_bound` to continue with.
        solution: of the linear relaxation, between 0 and 1 for each column.
    """

    lower_bound_ms: float
    relaxation: Relaxation
    solution: Floats | None


def latency_bound(relaxation: Relaxation, *, seconds: float) -> LatencyBound:
    """Bound the latency of every legal schedule within a budget by a linear program.

    Args:
        relaxation: of the problem, for the budget.
        seconds: the most that the linear program may take; unfinished, it still gives a bound.
    """
    program = relaxation.program
    bound_ms = relaxation.problem.least_latency_ms
    highs, unit_ms = loaded(program, seconds=max(0.1, seconds))
    highs.run()
    found = highs.getSolution()
    if found.dual_valid:
        bound_ms = max(bound_ms, dual_bound_ms(program, -unit_ms * np.array(found.row_dual, dtype=np.float64)))
    solution = np.array(found.col_value, dtype=np.float64) if found.value_valid else None
    return LatencyBound(lower_bound_ms=bound_ms, relaxation=relaxation, solution=solution)


def latency_bounds(problem: Problem, budget_bytes: int, *, seconds: float) -> Iterator[LatencyBound]:
    """Bounds by `latency_bound`, from coarse relaxations of all values to one of the largest values and every row.

    The coarse ones take a second for ten thousand operators, and are often the best: they see every layer of a deep
    model. The first that takes a quarter of the time left is the last.

    Args:
        problem: the graph and its costs, reduced. budget_bytes: the budget.
        seconds: the most that all of them may take.
    """
    deadline = now() + seconds
    for rows in COARSE_ROWS:
        began, left = now(), deadline - now()
        coarse = Relaxation(problem, budget_bytes, checkpoint_limit=rows, forward_limit=rows, value_limit=None)
        yield latency_bound(coarse, seconds=deadline - now())
        if now() - began > _MAX_SHARE * left:
            return
    finest = Relaxation(problem, budget_bytes)
    yield latency_bound(finest, seconds=deadline - now())


def integer_bound(
    program: ZeroOneProgram,
    *,
    seconds: float,
    cutoff_ms: float = math.inf,
    on_bound: Callable[[float], None] = lambda bound_ms: None,
    on_solution: Callable[[Floats], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    patience_seconds: float = math.inf,
) -> tuple[float, bool]:
    """Tighten a relaxation's bound by branch and bound and cuts (HiGHS).

    Every legal schedule is a 0-1 point of the relaxation, so the dual bound is valid for all of them,
    finished or not. `cutoff_ms`, the latency of a known schedule, prunes what could only confirm it: the
    result is never above it. Rounding leaves a gap of 0.0002% where the cutoff itself is proven.

    Args:
        program: the relaxation.
        seconds: when to stop.
        cutoff_ms: the latency of a schedule that is known.
        on_bound: told of the bound as it rises.
        on_solution: told of the columns of each better solution of the relaxation; looking for them takes time.
        should_stop: asked often.
        patience_seconds: stop once the bound has not risen for so long, and for half of the time so far.

    Returns:
        The dual bound in ms, rounded down; and True if the relaxation says no more.

    The GIL is released while HiGHS runs; the callbacks are called from the same thread, with it held.
    """
    every = range(len(program.cost_ms))
    highs, unit_ms = loaded(program, integer=every, seconds=seconds, cutoff_ms=cutoff_ms)
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
    began = risen_at = now()
    highest_ms = -math.inf

    def stalled(bound_ms: float) -> bool:
        nonlocal highest_ms, risen_at
        at = now()
        if bound_ms > highest_ms + _RISE * abs(bound_ms) or not math.isfinite(highest_ms):
            highest_ms, risen_at = bound_ms, at
        return at - risen_at > max(patience_seconds, 0.5 * (at - began))

    def watch(event: Any) -> None:
        try:
            if raised:
                event.interrupt()
                return
            bound_ms = in_ms(float(event.data_out.mip_dual_bound))
            on_bound(rounded_down(bound_ms, unit_ms))
            if stalled(bound_ms) or should_stop():
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
    status = highs.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return rounded_down(cutoff_ms, unit_ms), True
    bound_ms = min(in_ms(float(highs.getInfo().mip_dual_bound)), cutoff_ms)
    return rounded_down(bound_ms, unit_ms), status == highspy.HighsModelStatus.kOptimal
