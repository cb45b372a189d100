"""0-1 programs as sparse rows, and their Lagrangian bound."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats: TypeAlias = npt.NDArray[np.float64]

_ROUNDING = 1e-11
"""Part of the summed magnitudes that a floating-point bound gives up, to stay below its exact value."""

_USUAL_COST = 1e4
"""Sum that costs are scaled to for a solver, whose tolerances on them are absolute."""
_BRANCH_AND_BOUND_ROUNDING, _UNIT_ROUNDING = 2e-6, 1e-5
"""Parts of a branch-and-bound's dual bound, and of a unit of its objective, that are given up for the solver's
tolerances (1e-6)."""


@dataclass
class ZeroOneProgram:
    """Minimise `constant_ms + cost_ms·x` over rows `matrix·x ≤ limit`, or `= limit` where `equal`; x is 0 or 1.

    Memory rows are scaled to about 1.
    """

    constant_ms: float = 0.0
    cost_ms: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    _row_of: list[int] = field(default_factory=list)
    _column_of: list[int] = field(default_factory=list)
    _entries: list[float] = field(default_factory=list)

    def useful(self, cutoff_ms: float) -> npt.NDArray[np.bool_]:
        """Columns that a solution within the cutoff may have: none that alone costs more."""
        cost_ms: Floats = np.array(self.cost_ms, dtype=np.float64)
        room_ms = cutoff_ms - self.constant_ms - float(np.minimum(cost_ms, 0.0).sum())
        affordable: npt.NDArray[np.bool_] = cost_ms <= max(0.0, room_ms) * (1 + _BRANCH_AND_BOUND_ROUNDING)
        return affordable

    def unit_ms(self, cutoff_ms: float = math.inf) -> float:
        """Milliseconds that a unit of a solver's objective stands for, of columns that are useful."""
        return float(np.abs(self.cost_ms)[self.useful(cutoff_ms)].sum()) / _USUAL_COST or 1.0

    def column(self, cost_ms: float = 0.0) -> int:
        self.cost_ms.append(cost_ms)
        return len(self.cost_ms) - 1

    def row(self, terms: Iterable[tuple[int, float]], limit: float, *, equal: bool = False) -> None:
        """Add a row of (column, entry) terms; columns may repeat."""
        for column, entry in terms:
            self._row_of.append(len(self.limit))
            self._column_of.append(column)
            self._entries.append(entry)
        self.limit.append(limit)
        self.equal.append(equal)

    def matrix(self) -> sparse.csr_array:
        shape = (len(self.limit), len(self.cost_ms))
        return sparse.csr_array((self._entries, (self._row_of, self._column_of)), shape=shape)


def dual_bound_ms(program: ZeroOneProgram, multipliers: Floats) -> float:
    """The Lagrangian bound of a 0-1 program for the multipliers of its rows, rounded down.

    For every feasible x and multipliers λ, not negative where a row is no equation, cost·x ≥ cost·x + λ·(matrix·x −
    limit). The right side is least when each column takes the sign of its reduced cost.
    """
    if not np.all(np.isfinite(multipliers)):
        return -math.inf
    multipliers = np.where(program.equal, multipliers, np.maximum(multipliers, 0.0))
    matrix = program.matrix()
    reduced_ms = np.array(program.cost_ms) + matrix.T @ multipliers
    terms = [*np.minimum(reduced_ms, 0.0), *(-multipliers * np.array(program.limit)), program.constant_ms]
    magnitude = float(np.abs(terms).sum() + (abs(matrix).T @ np.abs(multipliers)).sum())
    return math.fsum(terms) - _ROUNDING * magnitude


def rounded_down(bound_ms: float, unit_ms: float) -> float:
    """A dual bound of branch and bound, less the solver's tolerances; the same if it is infinite."""
    if not math.isfinite(bound_ms):
        return bound_ms
    return bound_ms - _BRANCH_AND_BOUND_ROUNDING * abs(bound_ms) - _UNIT_ROUNDING * unit_ms
