"""The master program: one plan for each stretch of blocks, within one budget.

A boolean program. With x[r, p] for plan p of stretch r, which begins at block s(r) and ends before block e(r):

| row | says |
| --- | --- |
| for each block, the sum of x over the stretches that hold it is 1 | every block has one plan |
| total[b] = total[b−1] + the sum of kept · x over the stretches that end at b | bytes kept from blocks before b |
| total[s] + the sum of forward_bytes · x over the stretches that begin at s ≤ room | the peak of a forward part |
| total[s] + the sum of (backward_bytes + later) · x over them ≤ room | and of a backward part |

`later` is what the backward parts of later blocks leave in memory for good: gradients of parameters. The running
total keeps rows sparse. A schedule that is put together of plans takes no more memory than the rows say, except for
gradients that pass several blocks.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monetlite.core.schedule import Status
from monetlite.solving.blocks.block_plans import Plan
from monetlite.solving.bounding.zero_one import ZeroOneProgram
from monetlite.solving.program import solve_rows


@dataclass(frozen=True, kw_only=True)
class Master:
    """Data of the master program.

    Attributes:
        plans: of each stretch, by its first block and the one after its last.
        later_bytes: for each block, what backward parts of the blocks after it leave in memory for good.
        room_bytes: the budget less what is resident.
    """

    plans: Mapping[tuple[int, int], Sequence[Plan]]
    later_bytes: Sequence[int]
    room_bytes: int

    def solve(self, solver: str, deadline: float, gap: float) -> list[tuple[tuple[int, int], Plan]] | None:
        """The fastest plans within the budget, in order; None if none fit, or the time is up.

        Args:
            solver: as cvxpy knows it. deadline: of `time.monotonic`. gap: to which it has to be optimal.
        """
        rows, blocks = ZeroOneProgram(), len(self.later_bytes)
        chosen = [(stretch, plan) for stretch, plans in self.plans.items() for plan in plans]
        scale = 1.0 / self.room_bytes
        columns = [rows.column(plan.time_ms) for _, plan in chosen]
        total = [rows.column() for _ in range(blocks + 1)]
        holding: dict[int, list[int]] = defaultdict(list)
        beginning: dict[int, list[tuple[int, Plan, int]]] = defaultdict(list)
        ending: dict[int, list[tuple[int, Plan]]] = defaultdict(list)
        for column, ((start, end), plan) in zip(columns, chosen, strict=True):
            for block in range(start, end):
                holding[block].append(column)
            beginning[start].append((column, plan, self.later_bytes[end - 1]))
            ending[end].append((column, plan))
        rows.row([(total[0], 1.0)], 0.0, equal=True)
        for block in range(blocks):
            rows.row([(column, 1.0) for column in holding[block]], 1.0, equal=True)
            kept = [(column, plan.kept_bytes * scale) for column, plan in ending[block + 1]]
            rows.row([*kept, (total[block], 1.0), (total[block + 1], -1.0)], 0.0, equal=True)
            before = (total[block], 1.0)
            rows.row([before, *((c, plan.forward_bytes * scale) for c, plan, _ in beginning[block])], 1.0)
            rows.row(
                [before, *((c, (plan.backward_bytes + later) * scale) for c, plan, later in beginning[block])], 1.0
            )
        upper = [1.0] * len(rows.cost_ms)
        status, found, _ = solve_rows(rows, columns, upper, solver, deadline, gap=gap)
        if found is None or status not in (Status.OPTIMAL, Status.FEASIBLE):
            return None
        taken = [item for column, item in zip(columns, chosen, strict=True) if found[column] > 0.5]
        return sorted(taken, key=lambda item: item[0])
