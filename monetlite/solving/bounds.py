"""Lower bounds that hold for every legal schedule: on its latency within a budget, and on its peak.

The latency bound comes from dual multipliers of the relaxation in `relaxation`, whoever computed them and
however exactly: Lagrangian duality turns *any* non-negative multipliers into a valid bound (`dual_bound_ms`),
so a solver's tolerances, an interior point without crossover or a run out of time cost quality, never validity.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from monetlite.costs import Profile
from monetlite.solving.options import Outline
from monetlite.solving.relaxation import Floats, ZeroOneProgram, relaxation

_ROUNDING = 1e-11
"""How much of the summed magnitudes a floating-point bound gives up, to stay below its exact value."""


def trivial_bound_ms(profile: Profile) -> float:
    """Every main operator once, each with its fastest implementation: in ms."""
    outline = Outline.of(profile)
    return math.fsum(outline.main_least_ms)


def dual_bound_ms(program: ZeroOneProgram, multipliers: Floats) -> float:
    """The Lagrangian bound of a 0-1 program for the multipliers of its rows, rounded down.

    For multipliers λ ≥ 0 and every feasible x, cost·x ≥ cost·x + λ·(matrix·x − limit), and the right side is
    least when each column takes the sign of its reduced cost, one column in each group.
    """
    multipliers = np.maximum(multipliers, 0.0)
    if not np.all(np.isfinite(multipliers)):
        return -math.inf
    reduced_ms = program.cost_ms + program.matrix.T @ multipliers
    single = program.group < 0
    least_of_group = np.full(program.groups, np.inf)
    np.minimum.at(least_of_group, program.group[~single], reduced_ms[~single])
    terms = [
        np.minimum(reduced_ms[single], 0.0),
        least_of_group,
        -multipliers * program.limit,
        np.array([program.constant_ms]),
    ]
    magnitude = sum(float(np.abs(part).sum()) for part in terms)
    magnitude += float((abs(program.matrix).T @ multipliers).sum())
    return math.fsum(float(x) for part in terms for x in part) - _ROUNDING * magnitude


@dataclass(frozen=True, kw_only=True)
class LinearBound:
    """The bound of one linear relaxation, and how large that was."""

    lower_bound_ms: float
    rows: int
    columns: int
    seconds: float


def linear_bound(
    profile: Profile,
    budget_bytes: int,
    *,
    seconds: float,
    checkpoint_limit: int = 120,
    value_limit: int = 400,
    method: str = "simplex", spans=()
) -> LinearBound:
    began = time.monotonic()
    outline = Outline.of(profile)
    program = relaxation(
        outline, budget_bytes, checkpoint_limit=checkpoint_limit, value_limit=value_limit, spans=spans
    )
    built = time.monotonic()
    multipliers = _row_multipliers(program, seconds=seconds, method=method)
    bound = dual_bound_ms(program, multipliers) if multipliers is not None else -math.inf
    return LinearBound(lower_bound_ms=bound, rows=program.limit.size, columns=program.cost_ms.size, seconds=time.monotonic()-began)


def _row_multipliers(program: ZeroOneProgram, *, seconds: float, method: str) -> Floats | None:
    import highspy

    columns = program.cost_ms.size
    rows = program.limit.size
    matrix = program.matrix.tocsr()
    # The groups' rows come last.
    from scipy import sparse

    member = np.flatnonzero(program.group >= 0)
    choice = sparse.csr_array(
        (np.ones(member.size), (program.group[member], member)), shape=(program.groups, columns)
    )
    full = sparse.vstack([matrix, choice], format="csr")
    full.sum_duplicates()
    lp = highspy.HighsLp()
    lp.num_col_ = columns
    lp.num_row_ = rows + program.groups
    lp.col_cost_ = program.cost_ms
    lp.col_lower_ = np.zeros(columns)
    lp.col_upper_ = np.ones(columns)
    lp.row_lower_ = np.concatenate([np.full(rows, -highspy.kHighsInf), np.ones(program.groups)])
    lp.row_upper_ = np.concatenate([program.limit, np.ones(program.groups)])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = full.indptr
    lp.a_matrix_.index_ = full.indices
    lp.a_matrix_.value_ = full.data
    highs = highspy.Highs()
    highs.silent()
    highs.setOptionValue("time_limit", float(seconds))
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("solver", method)
    if method == "ipm":
        highs.setOptionValue("run_crossover", "off")
    highs.passModel(lp)
    highs.run()
    print(highs.getModelStatus(), highs.getInfo().objective_function_value + program.constant_ms)
    solution = highs.getSolution()
    if not solution.dual_valid:
        return None
    return -np.array(solution.row_dual[:rows])


def smallest_budget_bound(profile: Profile) -> int:
    """A number of bytes below which no budget is feasible."""
    return profile.graph.resident.total
