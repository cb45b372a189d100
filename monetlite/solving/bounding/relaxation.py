"""A relaxation of the whole problem as a sparse 0-1 program, whose optimum bounds every legal schedule.

Notation, against MONeT (Shah et al., ICLR 2021) and Checkmate (Jain et al., MLSys 2020, section 4):

| here | is | MONeT | Checkmate |
| --- | --- | --- | --- |
| `stored[v]` | v is live when the forward part ends | s^N_v | S at the first backward stage |
| `live[v, k]` | v is live just before the k-th checkpoint | s^k_v | S |
| `rerun[o, k]` | operator o runs outside the main run between checkpoints k−1 and k | r^k_i | R |
| `chosen[m, g]` | main operator m runs with implementation g | δ^k_{i,l} | – |

*Checkpoints* are a subset of the backward main operators: the memory row is written only there. Between two
of them, `rerun` says that an operator ran at least once, whenever and however often. More checkpoints say more of
the memory, and less of the time: a part of a run in each of many intervals costs the linear relaxation little.

Every legal schedule within the budget gives a feasible point of no more cost, so the optimum is a lower bound
on the latency of all of them:

- a value is live before checkpoint k only if it was live before checkpoint k−1 or made in between:
  `live[v, k] ≤ live[v, k−1] + rerun[o, k]`, for *every* checkpoint; a value that is kept for one reader
  cannot be forgotten on the way; a value that an operator in between overwrote must be made again;
- what a main operator reads is live before it; what a re-run reads was live at the last checkpoint, or was
  made since: only reads and writes common to all implementations of a re-run are used;
- the memory of a main operator is at least what is live, its outputs and workspace, less what it overwrites;
- gradients that a later operator reads in every implementation stay live until then, for nothing makes them
  again; held values stay live to the end; these are constants;
- runs in different intervals are different runs, so their cheapest latencies add up;
- an optional operator whose results are read in any case runs at least once;
- one that runs in the forward part reads what was made there, by other such operators, too; it has everything
  beside it that is stored and was made before it; until it runs, what it reads stays;
- memory during re-runs is ignored, as are values that are small or not modelled: they are taken to weigh nothing
  and to be always there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.solving.bounding.peak_bound import certain_lifetimes
from monetlite.solving.bounding.zero_one import ZeroOneProgram
from monetlite.solving.problem import Option, Problem

_SPAN_LENGTH = 16
"""Besides single intervals and the whole backward part, supply rows are written over so many intervals."""


@dataclass(frozen=True, kw_only=True)
class _Span:
    """A stretch of the backward part, from just before `places[0]` to main operator `places[-1]`.

    `before` has the columns of values live when it starts, `once` of operators that run outside the main run in it.
    """

    places: range
    before: dict[int, int]
    once: dict[int, int]


class Relaxation:
    """The relaxation of a problem.

    Args:
        problem: the problem.
        budget_bytes: the budget.
        checkpoint_limit: the most backward operators that get a memory row: the one at plain training's
            peak, the neediest of stretches, the last one.
        forward_limit: likewise for forward operators.
        value_limit: the most values that are modelled; the largest are.

    Attributes:
        program: the relaxation.
        stored: for each value that may be stored, its column.
        chosen: for each main operator, its options, each with its column (−1 where there is no choice).
        checkpoints: places in the main run, ascending.
        early: for each optional operator, the column of its run in the forward part.
        live: for each checkpoint, the columns of the values that may be live just before it.
        modelled: the values that have columns.
    """

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        *,
        checkpoint_limit: int = 60,
        forward_limit: int | None = None,
        value_limit: int | None = 400,
    ) -> None:
        self.problem = problem
        self.program = ZeroOneProgram()
        self.lifetimes = certain_lifetimes(problem)
        self.room = float(budget_bytes - problem.resident_bytes)
        self.scale = 1.0 / max(abs(self.room), 1.0)
        self.values = _modelled_values(problem, value_limit)
        self.modelled = frozenset(self.values)
        self.maker = problem.graph.writer
        self.plain_bytes = _plain_bytes(problem)
        forward, backward = range(problem.forward_main), range(problem.forward_main, len(problem.main))
        self.forward_rows = frozenset(self._neediest(forward, forward_limit))
        self.checkpoints = self._neediest(backward, checkpoint_limit)
        self.early: dict[int, int] = {}
        self.chosen = [self._choices(at) for at in range(len(problem.main))]
        self.stored = self._forward_part()
        self.live: list[dict[int, int]] = []
        self._backward_part()

    def _neediest(self, places: range, limit: int | None) -> list[int]:
        """At most so many places in the main run: plain training's peak, the neediest of each stretch, the last."""
        if limit is None or len(places) <= limit:
            return list(places)
        peak = max(places, key=self.plain_bytes.__getitem__)
        stretches = np.array_split(np.array(places), limit - 2) if limit > 2 else []
        return sorted({peak, places[-1], *(max((int(at) for at in of), key=self._demand) for of in stretches)})

    def _demand(self, at: int) -> int:
        """Bytes that main operator `at` takes by itself."""
        options = self.problem.options[self.problem.main[at]]
        own = min(
            (
                self.lifetimes.own_bytes(at, option, self.modelled)
                + sum(self.problem.size_bytes[value] for value in option.reads & self.modelled)
                for option in options
            ),
            default=0,
        )
        return self.lifetimes.fixed_bytes[at] + own

    def _certain_runs(self, intervals: Sequence[_Span]) -> None:
        """Add rows: optional operators whose results are read in any case run at least once."""
        problem, waiting, certain = self.problem, list(self.problem.main), set[int]()
        while waiting:
            for value in problem.must_read[waiting.pop()]:
                maker = self.maker[value]
                if maker not in problem.position and maker not in certain:
                    certain.add(maker)
                    waiting.append(maker)
        modelled = {self.maker[value] for value in self.values} & problem.extra_set
        for operator in sorted(certain):
            if operator in modelled and operator in self.early:
                runs = [self.early[operator], *(span.once[operator] for span in intervals if operator in span.once)]
                self.program.row([(column, -1.0) for column in runs], -1.0)
            elif operator not in self.early:
                self.program.constant_ms += problem.least_ms(operator)

    def _backward_part(self) -> None:
        intervals: list[_Span] = []
        start, before = self.problem.forward_main, self.stored
        for checkpoint in self.checkpoints:
            span = _Span(places=range(start, checkpoint + 1), before=before, once=self._runs(start))
            before = self._live_columns(span, checkpoint)
            self._supply(span, [before])
            self._overwriting(span, before)
            self._memory(checkpoint, before)
            intervals.append(span)
            self.live.append(before)
            start = checkpoint + 1
        self._certain_runs(intervals)
        for length in (_SPAN_LENGTH, max(1, len(intervals))):
            if length < 2 * len(intervals):
                for first in range(0, len(intervals), length):
                    self._joined(intervals[first : first + length], self.live[first : first + length])

    def _choices(self, at: int) -> list[tuple[Option, int]]:
        options = self._worthwhile(at)
        least_ms = min(option.first_ms for option in options)
        self.program.constant_ms += least_ms
        if len(options) == 1:
            return [(options[0], -1)]
        chosen = [(option, self.program.column(option.first_ms - least_ms)) for option in options]
        self.program.row([(column, 1.0) for _, column in chosen], 1.0, equal=True)
        return chosen

    def _worthwhile(self, at: int) -> list[Option]:
        """The options of a main operator that differ here: reading fewer modelled values at no more cost wins."""
        options = self.problem.options[self.problem.main[at]]
        own = {option: self.lifetimes.own_bytes(at, option, self.modelled) for option in options}
        kept: list[Option] = []
        for option in sorted(options, key=lambda option: (option.first_ms, own[option])):
            if not any(
                own[better] <= own[option]
                and better.reads & self.modelled <= option.reads
                and better.overwrites & self.modelled <= option.overwrites
                for better in kept
            ):
                kept.append(option)
        return kept

    def _forward_part(self) -> dict[int, int]:
        """Columns and rows of the forward part; returns the columns of what is stored at its end."""
        problem, position = self.problem, self.problem.position
        useful = problem.useful_before(problem.forward_main)
        stored = {value: self.program.column() for value in self.values if value in useful}
        for value, column in stored.items():
            if self.maker[value] not in position:
                self.program.row([(column, 1.0), (self._early_run(self.maker[value]), -1.0)], 0.0)
        waiting = self._waiting(stored)
        for at in range(problem.forward_main):
            # A stored value is live from its maker on; one that is pinned here is counted already.
            if at in self.forward_rows:
                live = {
                    value: column
                    for value, column in stored.items()
                    if position.get(self.maker[value], at) < at and not self.lifetimes.pinned(value, at)
                }
                may_read = problem.may_read[problem.main[at]]
                self._memory(
                    at,
                    live,
                    [
                        (column, size_bytes)
                        for source, column, size_bytes in waiting
                        if position[self.maker[source]] < at
                        and source not in may_read
                        and not self.lifetimes.pinned(source, at)
                    ],
                )
            for option, choice in self.chosen[at]:
                for value in option.overwrites & stored.keys():
                    if self.maker[value] in position:
                        self._excluded([(stored[value], 1.0)], choice)
        if problem.forward_main:
            for operator, column in self.early.items():
                self._early_memory(operator, column, stored)
        return stored

    def _early_run(self, operator: int) -> int:
        """The column for a run of an optional operator in the forward part, where what it reads was made, too."""
        early = self.early
        if operator not in early:
            early[operator] = self.program.column(self.problem.least_ms(operator))
            for value in self.problem.must_read[operator]:
                maker = self.maker[value]
                if maker not in self.problem.position:
                    self.program.row([(early[operator], 1.0), (self._early_run(maker), -1.0)], 0.0)
        return early[operator]

    def _waiting(self, stored: dict[int, int]) -> list[tuple[int, int, int]]:
        """Bytes of stored outputs of optional operators, before it is known if the operator ran.

        Until it ran, what it reads has to stay: either the output is live or a source of it. Each source that
        is not stored itself gives (source, column, bytes): so much is live after the source's maker. What
        several outputs weigh by the same source is never more than the source.
        """
        size = self.problem.size_bytes
        found: list[tuple[int, int, int]] = []
        left = dict(enumerate(size))
        for value, column in stored.items():
            operator = self.maker[value]
            if operator in self.problem.position:
                continue
            sources = [
                source
                for source in self.problem.must_read[operator] & self.modelled
                if self.maker[source] in self.problem.position
            ]
            if not sources:
                continue
            source = max(sources, key=lambda candidate: (left[candidate], candidate))
            weight = min(size[value], left[source])
            left[source] -= weight
            alone = column
            if source in stored:
                alone = self.program.column()
                self.program.row([(column, 1.0), (stored[source], -1.0), (alone, -1.0)], 0.0)
            found.append((source, alone, weight))
        return found

    def _early_memory(self, operator: int, column: int, stored: dict[int, int]) -> None:
        """The memory of an optional operator that runs in the forward part.

        Whatever is stored and made no later than one of its sources is live beside it, for nothing is made
        twice there. Where it does not run, the row says no more than the last forward operator's.
        """
        problem, size, position = self.problem, self.problem.size_bytes, self.problem.position
        reads = problem.must_read[operator] & self.modelled
        ready = max((position.get(self.maker[value], -1) for value in reads), default=-1)
        beside = [
            (stored[value], size[value] * self.scale)
            for value in stored
            if position.get(self.maker[value], ready + 1) <= ready and value not in reads
        ]
        slack = max(0, *(-option.first_extra_bytes for option, _ in self.chosen[problem.forward_main - 1]))
        own = sum(size[value] for value in reads) + self._least_bytes(operator)
        self.program.row([*beside, (column, (own + slack) * self.scale)], (self.room + slack) * self.scale)

    def _runs(self, start: int) -> dict[int, int]:
        """A column for each operator that could usefully run outside the main run from place `start` on."""
        needed = self.problem.useful_before(start)
        operators = {self.maker[value]: None for value in self.values if value in needed}
        return {
            operator: self.program.column(self.problem.least_ms(operator))
            for operator in operators
            if operator in self.problem.extra_set
        }

    def _live_columns(self, span: _Span, checkpoint: int) -> dict[int, int]:
        useful = self.problem.useful_before(checkpoint)
        return {v: self.program.column() for v in self.values if v in useful and self._sources(span, v)}

    def _sources(self, span: _Span, value: int) -> list[tuple[int, float]]:
        """Minus the columns of which one has to be 1 if the value is to be live at some time in the span."""
        columns = (span.before.get(value), span.once.get(self.maker[value]))
        return [(column, -1.0) for column in columns if column is not None]

    def _supply(self, span: _Span, live: list[dict[int, int]]) -> None:
        """Add rows: each value that is read or live in the span was live before it, or is made in it."""
        for operator, column in span.once.items():
            for value in self.problem.must_read[operator] & self.modelled:
                self.program.row([(column, 1.0), *self._sources(span, value)], 0.0)
        for columns in live:
            for value, column in columns.items():
                self.program.row([(column, 1.0), *self._sources(span, value)], 0.0)
        at_end = live[-1]
        for at in span.places:
            readers: dict[int, list[int]] = {}
            for option, choice in self.chosen[at]:
                for value in option.reads & self.modelled:
                    readers.setdefault(value, []).append(choice)
            for value, choices in readers.items():
                at_last = at == span.places[-1] and value in at_end
                supply = [(at_end[value], -1.0)] if at_last else self._sources(span, value)
                if len(choices) == len(self.chosen[at]):
                    self.program.row(supply, -1.0)
                else:
                    self.program.row([*((choice, 1.0) for choice in choices), *supply], 0.0)

    def _overwriting(self, span: _Span, live: dict[int, int]) -> None:
        """Add rows: a value that a main operator since the last checkpoint overwrote is made again to be live."""
        for at in range(max(span.places[0] - 1, self.problem.forward_main), span.places[-1]):
            for option, choice in self.chosen[at]:
                for value in option.overwrites & live.keys():
                    terms = [(live[value], 1.0)]
                    if self.maker[value] in span.once:
                        terms.append((span.once[self.maker[value]], -1.0))
                    self._excluded(terms, choice)

    def _excluded(self, terms: list[tuple[int, float]], choice: int) -> None:
        """Add a row: the terms add up to nothing where a main operator's choice is made; −1 is always made."""
        chosen = [] if choice < 0 else [(choice, 1.0)]
        self.program.row([*terms, *chosen], float(len(chosen)))

    def _memory(self, at: int, live: dict[int, int], also: Sequence[tuple[int, int]] = ()) -> None:
        """The memory of main operator `at`, with what is live before it, is within the budget.

        `also` has columns and bytes of more that is live.
        """
        size = self.problem.size_bytes
        terms = [(column, size[value] * self.scale) for value, column in live.items()]
        terms += [(column, size_bytes * self.scale) for column, size_bytes in also]
        room = self.room - self.lifetimes.fixed_bytes[at]
        for option, choice in self.chosen[at]:
            own = self.lifetimes.own_bytes(at, option, self.modelled)
            if choice < 0:
                room -= own
            else:
                terms.append((choice, own * self.scale))
        self.program.row(terms, room * self.scale)

    def _least_bytes(self, operator: int) -> int:
        """Bytes of a run of an optional operator, beyond the modelled values that it reads in any case."""
        problem, size = self.problem, self.problem.size_bytes
        counted = problem.must_read[operator] & self.modelled
        return min(
            min(option.first_extra_bytes, option.again_extra_bytes)
            + sum(size[value] for value in option.overwrites - counted)
            + sum(size[value] for value in option.writes if not problem.held[value])
            for option in problem.options[operator]
        )

    def _joined(self, intervals: list[_Span], live: list[dict[int, int]]) -> None:
        """The supply rows again over several intervals, with a column for `ran at least once` in all of them.

        The sum over intervals may exceed 1 in the linear relaxation, where a part of a run here and a part
        there add up; `once` may not, and this is what lifts the bound most.
        """
        if len(intervals) < 2:
            return
        operators = {operator: None for span in intervals for operator in span.once}
        once = {operator: self.program.column() for operator in operators}
        for operator, column in once.items():
            runs = [(span.once[operator], -1.0) for span in intervals if operator in span.once]
            self.program.row([(column, 1.0), *runs], 0.0)
        places = range(intervals[0].places[0], intervals[-1].places[-1] + 1)
        self._supply(_Span(places=places, before=intervals[0].before, once=once), live)


def _plain_bytes(problem: Problem) -> list[int]:
    """Plain training's memory at each main operator."""
    timeline = simulate(problem.profile, plain_steps(problem.graph))
    operators = (operator for operator, _ in timeline.steps)
    used_bytes = dict(zip(operators, timeline.memory_bytes, strict=True))
    return [used_bytes[operator] for operator in problem.main]


def _modelled_values(problem: Problem, limit: int | None) -> list[int]:
    """The forward values whose liveness is decided: the largest that are written in every implementation."""
    candidates = [
        value
        for value, maker in sorted(problem.graph.writer.items())
        if problem.size_bytes[value] > 0
        and not problem.held[value]
        and problem.is_forward(maker)
        and value in problem.always_writes[maker]
        # One that cannot be made again is pinned to its certain readers already.
        and problem.graph.operators[maker].rerunnable
    ]
    candidates.sort(key=lambda value: -problem.size_bytes[value])
    largest = problem.size_bytes[candidates[0]] if candidates else 0
    if len(candidates) > 64:
        candidates = [value for value in candidates if problem.size_bytes[value] >= largest / 1000]
    return sorted(candidates[:limit])
