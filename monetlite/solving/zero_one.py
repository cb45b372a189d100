"""Programs over zeros and ones as sparse arrays: what relaxations build, and bounds and solvers read."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]


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
class Builder:
    """Collects columns and rows."""

    cost_ms: list[float] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    column_of: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    def column(self, cost_ms: float = 0.0, group: int = -1) -> int:
        self.cost_ms.append(cost_ms)
        self.group.append(group)
        return len(self.cost_ms) - 1

    def row(self, terms: Iterable[tuple[int, float]], limit: float) -> None:
        """Add Σ coefficient · column ≤ limit; columns may repeat."""
        row = len(self.limit)
        for column, coefficient in terms:
            self.row_of.append(row)
            self.column_of.append(column)
            self.entries.append(coefficient)
        self.limit.append(limit)

    def program(self, constant_ms: float, groups: int) -> ZeroOneProgram:
        shape = (len(self.limit), len(self.cost_ms))
        return ZeroOneProgram(
            constant_ms=constant_ms,
            cost_ms=np.array(self.cost_ms, dtype=np.float64),
            matrix=sparse.csr_array((self.entries, (self.row_of, self.column_of)), shape=shape),
            limit=np.array(self.limit, dtype=np.float64),
            group=np.array(self.group, dtype=np.int64),
            groups=groups,
        )
