"""Programs over zeros and ones as sparse arrays, and their Lagrangian bound."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

_ROUNDING = 1e-11
"""Part of the summed magnitudes that a floating-point bound gives up, to stay below its exact value."""


@dataclass(frozen=True, kw_only=True)
class ZeroOneProgram:
    """Minimise `constant + cost·x` over `matrix·x ≤ limit`, x in {0, 1}, exactly one of each group being 1.

    `group[j]` is the group of column j, or −1. Memory rows are scaled to about 1.
    """

    constant_ms: float
    cost_ms: Floats
    matrix: sparse.csr_array
    limit: Floats
    group: Integers
    groups: int


@dataclass
class SparseRows:
    """Rows of a sparse system Σ entry · column ≤ (or =) limit, while they are collected."""

    row_of: list[int] = field(default_factory=list)
    column_of: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    def row(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        """Add a row of (column, entry) terms; columns may repeat."""
        for column, entry in terms:
            self.row_of.append(len(self.limit))
            self.column_of.append(column)
            self.entries.append(entry)
        self.limit.append(limit)

    def matrix(self, columns: int) -> sparse.csr_array:
        return sparse.csr_array((self.entries, (self.row_of, self.column_of)), shape=(len(self.limit), columns))


@dataclass
class ZeroOneBuilder(SparseRows):
    """Columns and rows of a `ZeroOneProgram` while they are collected."""

    cost_ms: list[float] = field(default_factory=list)
    group: list[int] = field(default_factory=list)

    def column(self, cost_ms: float = 0.0, group: int = -1) -> int:
        self.cost_ms.append(cost_ms)
        self.group.append(group)
        return len(self.cost_ms) - 1

    def program(self, constant_ms: float, groups: int) -> ZeroOneProgram:
        return ZeroOneProgram(
            constant_ms=constant_ms,
            cost_ms=np.array(self.cost_ms, dtype=np.float64),
            matrix=self.matrix(len(self.cost_ms)),
            limit=np.array(self.limit, dtype=np.float64),
            group=np.array(self.group, dtype=np.int64),
            groups=groups,
        )


def dual_bound_ms(program: ZeroOneProgram, multipliers: Floats) -> float:
    """The Lagrangian bound of a 0-1 program for the multipliers of its rows, rounded down.

    For multipliers λ ≥ 0 and every feasible x, cost·x ≥ cost·x + λ·(matrix·x − limit), and the right side is
    least when each column takes the sign of its reduced cost, one column in each group.
    """
    if not np.all(np.isfinite(multipliers)):
        return -math.inf
    multipliers = np.maximum(multipliers, 0.0)
    reduced_ms = program.cost_ms + program.matrix.T @ multipliers
    single = program.group < 0
    least_of_group = np.full(program.groups, np.inf)
    np.minimum.at(least_of_group, program.group[~single], reduced_ms[~single])
    terms = np.concatenate(
        [
            np.minimum(reduced_ms[single], 0.0),
            least_of_group,
            -multipliers * program.limit,
            [program.constant_ms],
        ]
    )
    magnitude = float(np.abs(terms).sum() + (abs(program.matrix).T @ multipliers).sum())
    return math.fsum(terms.tolist()) - _ROUNDING * magnitude
