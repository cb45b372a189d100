"""Plans of a stretch of blocks: ways to run it, of which none is better in time and in every figure of memory.

A stretch is solved as a step of its own (`stretch_profile`). What enters it is in memory all along. Between its two
parts stands one more operator, the *turn*, which reads what leaves the stretch and writes the gradients that come
back. The turn's workspace sets how much may be kept from the forward part to the backward part. At the end stands
another, which reads the gradients that pass on.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeAlias

from monetlite.core.blocks import Block, reads_of
from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import Implementation, Operator, Phase, Resident
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.annealing.compiled import (
    GROUP_OPTIONS,
    OPERATOR_GROUPS,
    OPTION_EXTRA,
    AnnealingCost,
    Integers,
)
from monetlite.solving.annealing.flat_problem import encode, flatten, keep_everything, read_least
from monetlite.solving.annealing.runs import AnnealingRun, Workspace
from monetlite.solving.baselines import keep_only, lighter_steps
from monetlite.solving.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a stretch.

    Attributes:
        time_ms: of all its runs.
        kept_bytes: live from its forward to its backward part, what leaves it included.
        forward_bytes, backward_bytes: the peaks inside its parts, of its own values and workspaces.
        forward, backward: steps, by the position of an operator in the stretch.
        choices: of the annealing.
    """

    time_ms: float
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    choices: Integers = field(compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)

    def dominates(self, other: "Plan") -> bool:
        return (
            self.time_ms <= other.time_ms
            and self.kept_bytes <= other.kept_bytes
            and self.forward_bytes <= other.forward_bytes
            and self.backward_bytes <= other.backward_bytes
        )


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Some blocks in a row, as a step of their own.

    Attributes:
        profile: the stretch, the turn and the end.
        operators: for each operator before the turn and after it, its index in the whole graph.
        original: for each operator, the index that each implementation that is left had.
        turn: index of the turn.
        gradient_bytes: what the turn writes.
        kind: equal for stretches that have the same plans.
    """

    profile: Profile
    operators: tuple[int, ...]
    original: tuple[tuple[int, ...], ...]
    turn: int
    gradient_bytes: int
    kind: Hashable

    def whole(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        """Steps of the stretch, by the operators of the whole graph."""
        return tuple((self.operators[at], self.original[at][choice]) for at, choice in steps)


_Row: TypeAlias = tuple[Operator, tuple[Cost, ...], tuple[int, ...]]
_NONE = -1
"""Index in the whole graph of operators that are not there."""
_ITERATIONS = 300
"""Iterations of annealing for each value that may be dropped."""
_HEAT, _PENALTIES = 0.3, (0.17, 3.0)
"""Temperature in the beginning over the mean time of an operator; penalties over time per byte of the stretch."""
_LOWER = 0.9
"""Part of a plan's peak within which another is looked for."""
_LOWERINGS, _NOT_WORTH_IT = 8, 0.99
"""Searches for plans of a lower peak, at most; the part of a peak that is worth no more of them."""


class Stretches:
    """The stretches of a step.

    Args:
        profile: of the whole step. blocks: all of its blocks.
    """

    def __init__(self, profile: Profile, blocks: Sequence[Block]) -> None:
        self.profile = profile
        self.blocks = blocks
        self.readers: list[list[int]] = [[] for _ in profile.graph.values]
        for index, operator in enumerate(profile.graph.operators):
            for value in reads_of(operator):
                self.readers[value].append(index)

    def stretch(self, start: int, end: int) -> Stretch:
        """Blocks `start` to `end`, the latter excluded, as a step of their own."""
        graph, blocks = self.profile.graph, self.blocks[start:end]
        forward = sorted(index for block in blocks for index in block.forward)
        backward = sorted(index for block in blocks for index in block.backward)
        own = {*forward, *backward}
        written = sorted({value for block in blocks for value in block.written})
        is_forward = {value for value in written if graph.operators[graph.writer[value]].phase is Phase.FORWARD}
        shared = [value for value in written if any(reader not in own for reader in self.readers[value])]
        entering = sorted(
            value
            for value in {value for index in backward for value in reads_of(graph.operators[index])}.difference(
                written
            )
            if graph.operators[graph.writer[value]].phase is Phase.BACKWARD
        )
        number = {value: at for at, value in enumerate((*written, *entering))}
        parts = (
            [self._own(index, number, own) for index in forward],
            [_bare("turn", [number[v] for v in shared if v in is_forward], [number[v] for v in entering])],
            [self._own(index, number, own) for index in backward],
            [_bare("end", [number[v] for v in shared if v not in is_forward], [])],
        )
        operators, costs, original = zip(*(item for part in parts for item in part), strict=True)
        values = tuple(graph.values[value] for value in number)
        small = replace(graph, name="stretch", operators=operators, values=values, resident=Resident(), inputs={})
        return Stretch(
            profile=replace(self.profile, graph=small, costs=costs),
            operators=(*forward, _NONE, *backward, _NONE),
            original=original,
            turn=len(forward),
            gradient_bytes=sum(graph.values[value].size_bytes for value in entering),
            kind=(
                tuple((value.size_bytes, value.kind) for value in values),
                tuple((op.family, op.phase, op.optional, op.rerunnable) for op in operators),
                tuple((w.reads, w.writes, w.overwrites) for op in operators for w in op.implementations),
                costs,
            ),
        )

    def _own(self, index: int, number: dict[int, int], own: set[int]) -> _Row:
        """An operator with the implementations that overwrite nothing that is read elsewhere later."""
        operator, costs = self.profile.graph.operators[index], self.profile.costs[index]

        def may_go(value: int) -> bool:
            return value in number and all(reader in own or reader < index for reader in self.readers[value])

        left = tuple(
            choice for choice, way in enumerate(operator.implementations) if all(map(may_go, way.overwrites))
        ) or (0,)
        ways = tuple(
            replace(
                way,
                reads=tuple(number[value] for value in way.reads if value in number),
                writes=tuple(number[value] for value in way.writes),
                overwrites=tuple(number[value] for value in way.overwrites if value in number),
            )
            for way in (operator.implementations[choice] for choice in left)
        )
        return replace(operator, implementations=ways), tuple(costs[choice] for choice in left), left


def _bare(name: str, reads: list[int], writes: list[int]) -> _Row:
    """An operator that takes no time and no workspace."""
    way = Implementation(name="default", reads=tuple(reads), writes=tuple(writes))
    operator = Operator(name=name, family=name, phase=Phase.BACKWARD, implementations=(way,), rerunnable=False)
    return operator, (Cost(latency_ms=0.0, workspace_bytes=0),), (0,)


class PlanSearch:
    """The search for plans of a stretch: annealing within limits on what is kept and on the peak inside.

    Args:
        stretch: the blocks. seed: of the annealing.
    """

    def __init__(self, stretch: Stretch, seed: int) -> None:
        self.stretch = stretch
        self.flat = flatten(Problem.of(stretch.profile))
        self.workspace = Workspace(self.flat, seed)
        self.plans: list[Plan] = []
        tables = self.flat.tables
        self.turn_row = int(tables.groups[int(tables.operators[stretch.turn, OPERATOR_GROUPS]), GROUP_OPTIONS])
        self.roomy_bytes = 4 * self.flat.plain_peak_bytes
        leaving = stretch.profile.graph.operators[stretch.turn].implementations[0].reads
        checkpointed = encode(self.flat, keep_only(stretch.profile, leaving))
        self.starts = [keep_everything(self.flat), read_least(self.flat), checkpointed]
        for start in self.starts:
            self._take(start, self.roomy_bytes)

    def sweep(self, points: int, seconds: float, finished: Callable[[], bool]) -> None:
        """Look for plans that keep less and less: so many, in about so many seconds."""
        most = max((plan.kept_bytes for plan in self.plans), default=0)
        choices = self.starts[0]
        for point in range(1, points + 1):
            if finished():
                return
            kept_bytes = most * (points - point) // points
            choices = self._solve(kept_bytes, self.roomy_bytes, choices, seconds / points, finished)

    def lower(self, seconds: float, finished: Callable[[], bool]) -> None:
        """Look for plans of a lower and lower peak inside, in about so many seconds."""
        part = _LOWER
        for _ in range(_LOWERINGS):
            if finished() or part > _NOT_WORTH_IT:
                return
            leanest = min(self.plans, key=attrgetter("peak_bytes"))
            peak_bytes = int(part * leanest.peak_bytes)
            kept_bytes = peak_bytes - self.stretch.gradient_bytes
            self._solve(kept_bytes, peak_bytes, leanest.choices, seconds / _LOWERINGS, finished)
            if min(plan.peak_bytes for plan in self.plans) == leanest.peak_bytes:
                part = (1 + part) / 2

    def lighten(self, finished: Callable[[], bool]) -> None:
        """Add lighter ways to run each plan: no limit of a sweep is on the peaks inside."""
        for plan in list(self.plans):
            whole = (*plan.forward, (self.stretch.turn, 0), *plan.backward, (len(self.stretch.operators) - 1, 0))
            for lighter in lighter_steps(self.stretch.profile, whole):
                if finished():
                    return
                self._add(self._plan(lighter.steps, encode(self.flat, lighter.steps)))

    def improve(self, reduced_ms: Callable[[Plan], float], seconds: float, finished: Callable[[], bool]) -> float:
        """Look for a plan of less reduced cost, between the best by that and its neighbours.

        Args:
            reduced_ms: the reduced cost of a plan, in ms. seconds: about how long. finished: asked often.

        Returns:
            How much lower the least reduced cost got, in ms.
        """
        self.plans.sort(key=lambda plan: plan.kept_bytes)
        before_ms, at = min((reduced_ms(plan), at) for at, plan in enumerate(self.plans))
        best = self.plans[at]
        around = {(plan.kept_bytes + best.kept_bytes) // 2 for plan in self.plans[max(0, at - 1) : at + 2]}
        limits = [(kept_bytes, self.roomy_bytes) for kept_bytes in sorted(around)]
        limits.append((best.kept_bytes, int(_LOWER * best.peak_bytes)))
        for kept_bytes, peak_bytes in limits:
            self._solve(kept_bytes, peak_bytes, best.choices, seconds / len(limits), finished)
        return before_ms - min(map(reduced_ms, self.plans))

    def _solve(
        self, kept_bytes: int, peak_bytes: int, start: Integers, seconds: float, finished: Callable[[], bool]
    ) -> Integers:
        """Look for the fastest plan within limits; returns choices to go on from."""
        flat = self.flat
        flat.tables.options[self.turn_row, OPTION_EXTRA] = peak_bytes - kept_bytes - self.stretch.gradient_bytes
        iterations = self.workspace.iterations(_ITERATIONS * max(1, flat.droppable.size), seconds)
        hot = _HEAT * flat.mean_ms
        scale = flat.problem.least_latency_ms / max(1, flat.plain_peak_bytes)
        penalties = (_PENALTIES[0] * scale, _PENALTIES[1] * scale)
        run = AnnealingRun(start, AnnealingCost(budget_bytes=peak_bytes), (hot, hot / 30), penalties, iterations)
        self.workspace.advance(run, 1.0, finished)
        if run.best_ms < math.inf:
            self._take(run.best, peak_bytes)
            return run.best
        return run.choices

    def _take(self, choices: Integers, peak_bytes: int) -> None:
        """Add the plan of some choices, if no other is better in every way."""
        steps = self.workspace.steps(choices, peak_bytes)
        self._add(None if steps is None else self._plan(steps, choices))

    def _add(self, plan: Plan | None) -> None:
        if plan is not None and not any(other.dominates(plan) for other in self.plans):
            self.plans = [other for other in self.plans if not plan.dominates(other)] + [plan]

    def _plan(self, steps: tuple[Step, ...], choices: Integers) -> Plan | None:
        """The plan of steps; None if they run something again before the turn, which is another block's time."""
        turn = next(at for at, (operator, _) in enumerate(steps) if operator == self.stretch.turn)
        if len({operator for operator, _ in steps[:turn]}) < turn:
            return None
        timeline = simulate(self.stretch.profile, steps)
        end = len(steps) - 1
        return Plan(
            time_ms=timeline.latency_ms,
            kept_bytes=timeline.memory_bytes[turn] - self.stretch.gradient_bytes,
            forward_bytes=max(timeline.memory_bytes[:turn], default=0),
            backward_bytes=max(timeline.memory_bytes[turn:]),
            forward=steps[:turn],
            backward=steps[turn + 1 : end],
            choices=choices.copy(),
        )
