"""Plans within plans: blocks run again from a checkpoint, and some of them again from a checkpoint inside.

Dynamic programming over stretches of blocks and the memory that is left for them. T(i, j, m) is the least time for
blocks i to j, the latter excluded, where what enters block i is in memory and m bytes are left. Either the first
blocks, up to e, run by a plan p, which keeps what it keeps until the others are done. Or the first ones, up to k,
run forward alone, leave what the others read, and run once more when these are done:

    T(i, j, m) = min of  time(p) + T(e, j, m - kept(p))  and  forward(i, k) + T(k, j, m - left(i, k)) + T(i, k, m)

Each is allowed where its peaks are within m. This is the dynamic program for chains of Beaumont et al. (2019,
"Optimal checkpointing for heterogeneous chains"), with a choice of plans for each block as in Zhao et al. (2023,
"Rockmate"). The master program is the same without running anything forward alone, and without rounding of bytes.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import OperatorGraph, Phase
from monetlite.core.simulate import Timeline
from monetlite.core.steps import Step, reruns
from monetlite.solving.blocks.block_plans import Plan
from monetlite.solving.blocks.deep_step import DeepStep

MOST_UNITS = 96
"""The most parts that a step is cut into here, and few more at its end: time grows with their third power."""
_UNIT_LENGTHS = (1, 2, 4)
"""Numbers of blocks in a part, all of which the stages of a deep step look for plans of."""
_LEVELS = 240
"""Equal parts of memory, to which bytes are rounded up."""
_ROOMY = 1.1
"""Memory of the program over that of the budget: rounded bytes promise too little."""


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """A way to run a part forward alone.

    Attributes:
        first, first_ms: steps of the first time, when all that has to run once does, and their latency.
        again, again_ms: of later times, when only that runs which something behind the part reads.
        peak_bytes: of the part's own values and workspaces.
    """

    first: tuple[Step, ...]
    first_ms: float
    again: tuple[Step, ...]
    again_ms: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The program, solved for up to so much memory.

    Attributes:
        level_bytes: of a level of memory.
        time_ms: T, by first part, the part after the last, and level; infinite where nothing fits, and in as many
            levels again before level 0.
        choice: by the same but for these, the plan of the first part, or the number of its plans and the part
            before which to cut.
    """

    level_bytes: float
    time_ms: npt.NDArray[np.float64]
    choice: npt.NDArray[np.int32]

    def levels(self, sizes: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Bytes in levels, rounded up."""
        return np.ceil(np.asarray(sizes) / self.level_bytes - 1e-9).astype(np.int64)


def nested_plans(deep: DeepStep) -> "NestedPlans | None":
    """Schedules that nest the plans of a step's blocks; None of too many, or while plans of parts are missing."""
    places = unit_places(len(deep.blocks))
    known = len(places) < MOST_UNITS + len(_UNIT_LENGTHS) and deep.plans().keys() >= set(places)
    return NestedPlans(deep) if known else None


class NestedPlans:
    """Schedules that nest the plans of a step's blocks.

    Args:
        deep: the step, with plans of the parts (`unit_places`).
    """

    def __init__(self, deep: DeepStep) -> None:
        self.deep = deep
        self.graph = deep.profile.graph
        self.places = unit_places(len(deep.blocks))
        offered = deep.plans()
        self.plans: list[list[Plan]] = [offered[place] for place in self.places]
        self.stretches = [deep.stretches[place] for place in self.places]
        self.later_bytes = [deep.later_bytes[end - 1] for _, end in self.places]
        unit_of = {
            index: unit
            for unit, (start, end) in enumerate(self.places)
            for block in deep.blocks[start:end]
            for index in (*block.forward, *block.backward)
        }
        self._measure_cuts(unit_of)
        self.forward = [self._forward_alone(unit) for unit in range(len(self.places))]

    def _measure_cuts(self, unit_of: dict[int, int]) -> None:
        """Find what crosses each cut between two parts.

        A value whose operator can't run again is in memory from its first run to its last use.
        """
        count, graph = len(self.places), self.graph
        self.left_bytes = np.zeros((count + 1, count + 1), dtype=np.int64)
        """Bytes that parts, from one on and up to another, write for what comes behind."""
        self.gradient_bytes = np.zeros(count + 1, dtype=np.int64)
        """Bytes of gradients that go from the parts behind a cut to those before it."""
        self.leaving: list[set[int]] = [set() for _ in range(count)]
        for value, writer in graph.writer.items():
            info, operator = graph.values[value], graph.operators[writer]
            unit, readers = unit_of[writer], [unit_of[at] for at in self.deep.cut.readers[value]]
            if operator.phase is Phase.BACKWARD:
                if not info.held and readers:
                    self.gradient_bytes[min(readers) + 1 : unit + 1] += info.size_bytes
                continue
            last = max(readers, default=unit)
            if last > unit:
                self.leaving[unit].add(value)
            if not operator.rerunnable and readers:
                last = count
            self.left_bytes[: unit + 1, unit + 1 : last + 1] += info.size_bytes

    def _forward_alone(self, unit: int) -> _Forward:
        """The fastest way forward that needs no more than the part's leanest plan, or the leanest way."""
        plans = self.plans[unit]
        ways = [
            self._leaving_only(unit, steps)
            for steps in {self.stretches[unit].whole(plan.forward) for plan in plans}
        ]
        enough_bytes = min(plan.peak_bytes for plan in plans)
        return min(ways, key=lambda way: (max(enough_bytes, way.peak_bytes), way.again_ms, way.peak_bytes))

    def _leaving_only(self, unit: int, steps: Sequence[Step]) -> _Forward:
        """The way that takes of these steps what has to run for what leaves a part."""
        values, leaving = self.graph.values, self.leaving[unit]
        needed, useful = set(leaving), []
        freed: list[set[int]] = []
        for index, choice in reversed(steps):
            way = self.graph.operators[index].implementations[choice]
            if needed.isdisjoint(way.writes):
                continue
            useful.append((index, choice))
            freed.append({value for value in way.reads if value not in needed})
            needed.update(way.reads)
        time_ms, live, live_bytes, peak_bytes = 0.0, set[int](), 0, 0
        for (index, choice), last in zip(reversed(useful), reversed(freed), strict=True):
            way = self.graph.operators[index].implementations[choice]
            latency_ms, workspace_bytes = self.deep.profile.costs[index][choice].of_run(again=True)
            time_ms += latency_ms
            live.update(way.writes)
            live_bytes += sum(values[value].size_bytes for value in way.writes)
            overwritten = sum(values[value].size_bytes for value in way.overwrites)
            peak_bytes = max(peak_bytes, live_bytes + workspace_bytes - overwritten)
            gone = {value for value in live if value in last or (value in way.writes and value not in needed)}
            live -= gone
            live_bytes -= sum(values[value].size_bytes for value in gone)
        first = tuple(step for step in steps if step in useful or not self.graph.operators[step[0]].optional)
        first_ms = sum(self.deep.profile.costs[index][choice].of_run(again=False)[0] for index, choice in first)
        again = tuple(reversed(useful))
        return _Forward(first=first, first_ms=first_ms, again=again, again_ms=time_ms, peak_bytes=peak_bytes)

    def within(self, budget_bytes: int, finished: Callable[[], bool] = lambda: False) -> Timeline | None:
        """The fastest schedule that the plans make within a budget; the leanest one if none fits; None without any.

        Args:
            budget_bytes: no step may need more. finished: asked often.
        """
        table = self._solve(self._room_bytes(budget_bytes), finished)
        if table is None:
            return None
        levels = self._levels(table)
        fitting: Timeline | None = None
        leanest: Timeline | None = None
        low, high = 0, len(levels)  # peaks are by and large in the order of levels
        with contextlib.suppress(IllegalSchedule):
            while low < high and not (leanest and finished()):
                middle = (low + high) // 2
                timeline = self.deep.timeline_of(self._steps(table, levels[middle]))
                if timeline.peak_bytes <= budget_bytes:
                    fitting, low = timeline, middle + 1
                else:
                    high = middle
                if leanest is None or timeline.peak_bytes < leanest.peak_bytes:
                    leanest = timeline
        return fitting or leanest

    def leanest(self, most_bytes: int, finished: Callable[[], bool] = lambda: False) -> Timeline | None:
        """The schedule of the smallest peak that the plans make; None if it isn't below `most_bytes`."""
        found: Timeline | None = None
        with contextlib.suppress(IllegalSchedule):
            # Less room is cut into finer levels, which round less.
            while (table := self._solve(self._room_bytes(most_bytes), finished)) is not None:
                levels = self._levels(table)
                timeline = self.deep.timeline_of(self._steps(table, levels[0])) if levels else None
                if timeline is None or timeline.peak_bytes >= most_bytes:
                    break
                found, most_bytes = timeline, timeline.peak_bytes
        return found

    def _room_bytes(self, budget_bytes: int) -> float:
        """Memory of the program for a budget."""
        return _ROOMY * (budget_bytes - self.graph.resident.total)

    def _levels(self, table: _Table) -> list[int]:
        """The levels of a table from which on something else is the fastest, ascending."""
        time_ms = table.time_ms[0, len(self.places), _LEVELS:]
        return [at for at in range(_LEVELS + 1) if time_ms[at] < (time_ms[at - 1] if at else math.inf)]

    def _solve(self, room_bytes: float, finished: Callable[[], bool]) -> _Table | None:
        """The program for so much memory; None if there is none, or the time is up."""
        if room_bytes <= 0:
            return None
        count = len(self.places)
        table = _Table(
            level_bytes=room_bytes / _LEVELS,
            time_ms=np.full((count + 1, count + 1, 2 * _LEVELS + 1), np.inf),
            choice=np.full((count + 1, count + 1, _LEVELS + 1), -1, dtype=np.int32),
        )
        time_ms, levels_of = table.time_ms, table.levels
        level = np.arange(_LEVELS + 1)
        for unit in range(count + 1):
            time_ms[unit, unit, _LEVELS:] = 0.0
        plan_ms = [np.array([plan.time_ms for plan in of]) for of in self.plans]
        kept = [levels_of([plan.kept_bytes for plan in of]) for of in self.plans]
        first_ms = np.cumsum([0.0, *(way.first_ms for way in self.forward)])
        again_ms = np.cumsum([0.0, *(way.again_ms for way in self.forward)])
        for first in reversed(range(count)):
            passing = [
                int(self.left_bytes[first, unit]) + self.forward[unit].peak_bytes for unit in range(first, count)
            ]
            forward_bytes = np.maximum.accumulate(passing)
            for end in range(first + 1, count + 1):
                if finished():
                    return None
                done_bytes = self.later_bytes[end - 1] + int(self.gradient_bytes[end])
                peaks = [
                    max(plan.forward_bytes + done_bytes, plan.backward_bytes + self.later_bytes[first])
                    for plan in self.plans[first]
                ]
                cuts = np.arange(first + 1, end)
                behind = np.array([*itertools.repeat(first + 1, len(peaks)), *cuts])
                left = levels_of(self.left_bytes[first, first + 1 : end])
                taken = np.concatenate([kept[first] * (end > first + 1), left])
                needed = levels_of([*peaks, *(forward_bytes[: end - first - 1] + done_bytes)])
                passed_ms = first_ms if end == count else again_ms
                ms = np.concatenate([plan_ms[first], passed_ms[cuts] - passed_ms[first]])
                ways = (
                    ms[:, None]
                    + time_ms[behind[:, None], end, _LEVELS + level - np.minimum(taken, _LEVELS)[:, None]]
                )
                ways[len(peaks) :] += time_ms[first, first + 1 : end, _LEVELS:]
                ways[level < np.maximum(needed, taken)[:, None]] = np.inf
                table.choice[first, end] = best = ways.argmin(axis=0)
                time_ms[first, end, _LEVELS:] = ways[best, level]
        return table

    def _steps(self, table: _Table, level: int) -> tuple[Step, ...]:
        """The schedule of a level at which something fits."""
        steps: list[Step] = []
        ran: set[int] = set()

        def run(more: Iterable[Step]) -> None:
            for index, choice in more:
                operator = self.graph.operators[index]
                if operator.phase is Phase.FORWARD and index in ran and not operator.rerunnable:
                    continue
                ran.add(index)
                steps.append((index, choice))

        def go_through(first: int, end: int, level: int) -> None:
            if first == end:
                return
            choice, plans = int(table.choice[first, end, level]), self.plans[first]
            if choice < len(plans):
                plan, stretch = plans[choice], self.stretches[first]
                run(stretch.whole(plan.forward))
                go_through(first + 1, end, level - int(table.levels(plan.kept_bytes)) if end > first + 1 else level)
                run(stretch.whole(plan.backward))
                return
            cut = first + 1 + choice - len(plans)
            for unit in range(first, cut):
                way = self.forward[unit]
                run(way.first if end == len(self.places) else way.again)
            go_through(cut, end, level - int(table.levels(self.left_bytes[first, cut])))
            go_through(first, cut, level)

        go_through(0, len(self.places), level)
        return _without_idle_reruns(self.graph, steps)


def unit_places(blocks: int) -> list[tuple[int, int]]:
    """The parts of a step of so many blocks: few enough, of equal lengths but for the last ones.

    Each is the first block and the one after the last.
    """
    length = next((length for length in _UNIT_LENGTHS if blocks <= MOST_UNITS * length), _UNIT_LENGTHS[-1])
    places: list[tuple[int, int]] = []
    start = 0
    while start < blocks:
        length = next(item for item in reversed(_UNIT_LENGTHS) if item <= min(length, blocks - start))
        places.append((start, start + length))
        start += length
    return places


def _without_idle_reruns(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps without re-runs whose results nothing reads before they are written again."""
    needed = [value.held for value in graph.values]
    kept: list[Step] = []
    for step, again in reversed(list(zip(steps, reruns(steps), strict=True))):
        operator = graph.operators[step[0]]
        implementation = operator.implementations[step[1]]
        useful = any(needed[value] and not graph.values[value].held for value in implementation.writes)
        if (again or operator.optional) and not useful:
            continue
        kept.append(step)
        for value in implementation.writes:
            needed[value] = graph.values[value].held
        for value in implementation.reads:
            needed[value] = True
    return tuple(reversed(kept))
