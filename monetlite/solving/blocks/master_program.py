"""The master program: one plan for each stretch of blocks, within one budget.

A boolean program. With x[r, p] for plan p of stretch r, which begins at block s(r) and ends before block e(r):

| row | says |
| --- | --- |
| for each block, the sum of x over the stretches that hold it is 1 | every block has one plan |
| total[b] = total[b−1] + the sum of kept · x over the stretches that end at b | bytes kept from blocks before b |
| total[s] + the sum of forward_bytes · x over the stretches that begin at s ≤ room | the peak of a forward part |
| total[s] + the sum of (backward_bytes + later) · x over them ≤ room | and of a backward part |

`later` is what the backward parts of later blocks leave in memory for good: gradients of parameters. The running
total keeps rows sparse. The multipliers of the linear relaxation say what a byte is worth in each row (`prices`): a
plan that is not there yet is worth adding if its reduced cost is negative (column generation; Dantzig and Wolfe,
1960). A schedule that is put together of plans takes no more memory than the rows say, except for gradients that
pass several blocks.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from monetlite.solving.blocks.block_plans import Plan
from monetlite.solving.bounding.highs import loaded
from monetlite.solving.bounding.zero_one import ZeroOneProgram
from monetlite.solving.clock import now

Place = tuple[int, int]
"""A stretch by its first block and the one after its last."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Multipliers of the master program's linear relaxation, as a stretch sees them.

    `kept`, `forward` and `backward` are in ms per byte; `worth_ms` is what the relaxation pays for the stretch.
    """

    kept: float
    forward: float
    backward: float
    worth_ms: float

    def reduced_ms(self, plan: Plan) -> float:
        """The reduced cost of a plan: negative if the linear relaxation gets better with it."""
        bytes_ms = (
            self.kept * plan.kept_bytes + self.forward * plan.forward_bytes + self.backward * plan.backward_bytes
        )
        return plan.time_ms + bytes_ms - self.worth_ms


NEAR = 800
"""Plans that a schedule is first looked for among."""
_COVER, _TOTAL, _FORWARD, _BACKWARD, _ROWS = range(5)
"""Rows of a block, and their number."""


class MasterProgram:
    """The rows of the master program.

    Args:
        plans: of each stretch.
        later_bytes: for each block, what backward parts of the blocks after it leave in memory for good.
        room_bytes: the budget less what is resident.
    """

    def __init__(self, plans: Mapping[Place, Sequence[Plan]], later_bytes: Sequence[int], room_bytes: int) -> None:
        self.later_bytes = later_bytes
        self.scale = scale = 1.0 / max(1, room_bytes)
        self.offered = [(place, plan) for place, of in plans.items() for plan in of]
        self.rows = ZeroOneProgram()
        self.columns = [self.rows.column(plan.time_ms) for _, plan in self.offered]
        total = [self.rows.column() for _ in range(len(later_bytes) + 1)]
        holding: dict[int, list[int]] = defaultdict(list)
        beginning: dict[int, list[tuple[int, Plan, int]]] = defaultdict(list)
        ending: dict[int, list[tuple[int, Plan]]] = defaultdict(list)
        for column, ((start, end), plan) in zip(self.columns, self.offered, strict=True):
            for block in range(start, end):
                holding[block].append(column)
            beginning[start].append((column, plan, later_bytes[end - 1]))
            ending[end].append((column, plan))
        self.rows.row([(total[0], 1.0)], 0.0, equal=True)
        for block in range(len(later_bytes)):
            kept = [(column, plan.kept_bytes * scale) for column, plan in ending[block + 1]]
            before = (total[block], 1.0)
            forward = [(column, plan.forward_bytes * scale) for column, plan, _ in beginning[block]]
            backward = [(column, (plan.backward_bytes + later) * scale) for column, plan, later in beginning[block]]
            self.rows.row([(column, 1.0) for column in holding[block]], 1.0, equal=True)
            self.rows.row([*kept, before, (total[block + 1], -1.0)], 0.0, equal=True)
            self.rows.row([before, *forward], 1.0)
            self.rows.row([before, *backward], 1.0)

    def solve(self, deadline: float, gap: float) -> list[tuple[Place, Plan]] | None:
        """The fastest plans within the budget, in order; None if none fit, or the time is up before any are found.

        Plans are taken of those with the smallest reduced costs; of all, where these make no schedule. For a Qwen3
        of 36 layers that is 0.05% slower at most, in a fiftieth of the time.

        Args:
            deadline: of `clock.now`. gap: part of the time to which it has to be optimal.
        """
        relaxed, _ = self._relaxed()
        if relaxed is None:
            return None
        reduced = np.array(relaxed.getSolution().col_dual)[self.columns]
        far = [self.columns[at] for at in np.argsort(reduced, kind="stable")[NEAR:]]
        return self._solved(deadline, gap, far) or (self._solved(deadline, gap, []) if far else None)

    def _relaxed(self) -> tuple[Any, float]:
        """The linear relaxation, solved, and the ms of its unit; None in its place if nothing fits."""
        highs, unit_ms = loaded(self.rows, seconds=math.inf)
        highs.run()
        solved = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return highs if solved else None, unit_ms

    def _solved(self, deadline: float, gap: float, left_out: Sequence[int]) -> list[tuple[Place, Plan]] | None:
        """The same without some columns."""
        highs, _ = loaded(self.rows, integer=self.columns, seconds=max(0.1, deadline - now()))
        for column in left_out:
            highs.changeColBounds(column, 0.0, 0.0)
        highs.setOptionValue("mip_rel_gap", gap)
        highs.run()
        if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        found = highs.getSolution().col_value
        taken = [item for column, item in zip(self.columns, self.offered, strict=True) if found[column] > 0.5]
        return sorted(taken, key=lambda item: item[0])

    def prices(self) -> dict[Place, Prices] | None:
        """Multipliers of the linear relaxation as each stretch sees them; None if nothing fits."""
        highs, unit_ms = self._relaxed()
        if highs is None:
            return None
        of = -unit_ms * np.array(highs.getSolution().row_dual)[1:].reshape(-1, _ROWS)
        prices: dict[Place, Prices] = {}
        for (start, end), _ in self.offered:
            later_ms = of[start, _BACKWARD] * self.later_bytes[end - 1] * self.scale
            prices[start, end] = Prices(
                kept=float(of[end - 1, _TOTAL]) * self.scale,
                forward=float(of[start, _FORWARD]) * self.scale,
                backward=float(of[start, _BACKWARD]) * self.scale,
                worth_ms=float(-of[start:end, _COVER].sum() - later_ms),
            )
        return prices
