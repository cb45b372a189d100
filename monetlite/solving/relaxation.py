"""A relaxation of the whole problem as a sparse 0-1 program, whose optimum bounds every legal schedule.

Notation, against MONeT (Shah et al., ICLR 2021, section 4) and Checkmate (Jain et al., MLSys 2020, section 4):

| here | is | MONeT | Checkmate |
| --- | --- | --- | --- |
| `stored[v]` | v is live when the forward part ends | s^N_v | S at the first backward stage |
| `live[v, k]` | v is live just before the k-th checkpoint | s^k_v | S |
| `rerun[o, k]` | operator o runs outside the main run between checkpoints k−1 and k | r^k_i | R |
| `chosen[m, g]` | main operator m runs with implementation g | δ^k_{i,l} | – |

*Checkpoints* are a subset of the backward main operators: the memory row is written only there. Between two
of them, `rerun` says that an operator ran at least once, whenever and however often.

Every legal schedule within the budget gives a feasible point of no more cost, so the optimum is a lower bound
on the latency of all of them:

- a value is live before checkpoint k only if it was live before checkpoint k−1 or made in between:
  `live[v, k] ≤ live[v, k−1] + rerun[o, k]`, for *every* checkpoint, so that a value that is kept for one reader
  cannot be forgotten on the way; a value that an operator in between overwrote must be made again;
- what a main operator reads is live before it; what a re-run reads was live at the last checkpoint, or was
  made since: only reads and writes common to all implementations of a re-run are used;
- the memory of a main operator is at least what is live, its outputs and its workspace, less what it overwrites;
- gradients that a later operator reads in every implementation stay live until then, for nothing makes them
  again; held values stay live to the end; these are constants;
- runs in different intervals are different runs, so their cheapest latencies add up;
- memory during re-runs is ignored, as are values that are small, have several makers, or are not modelled:
  they are taken to weigh nothing and to be always there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

from monetlite.solving.options import Option, Outline

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
class _Builder:
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


@dataclass(frozen=True, kw_only=True)
class _Lifetimes:
    """What is known of values before anything is decided.

    `fixed_bytes[m]` is live before main operator m in every schedule, and is no modelled value;
    `pinned_until[v]` is the last main operator before which value v certainly is live, −1 if there is none.
    """

    fixed_bytes: list[int]
    pinned_until: list[int]


def certain_lifetimes(outline: Outline) -> _Lifetimes:
    """The values that are live before each main operator whatever the schedule, modelled values left out.

    A value that only a main operator makes, and that cannot be made again, stays from its maker to the last
    main operator that reads it in every implementation; a held value stays to the end.
    """
    count = len(outline.main)
    pinned_until = [-1] * len(outline.size_bytes)
    for at, operator in enumerate(outline.main):
        for value in outline.must_read[operator]:
            pinned_until[value] = at
    change = [0] * (count + 1)
    for value, makers in enumerate(outline.producers):
        if len(makers) != 1 or makers[0] not in outline.position:
            pinned_until[value] = -1
            continue
        maker, made_at = makers[0], outline.position[makers[0]]
        if value not in outline.always_writes[maker]:
            pinned_until[value] = -1
            continue
        if outline.held[value]:
            pinned_until[value] = count - 1
        elif made_at < outline.forward_main and outline.profile.graph.operators[maker].rerunnable:
            # It can be made again in the backward part: certain only up to its last forward reader.
            pinned_until[value] = max(
                (at for at in outline.main_readers[value] if at < outline.forward_main), default=-1
            )
        if pinned_until[value] > made_at:
            change[made_at + 1] += outline.size_bytes[value]
            change[pinned_until[value] + 1] -= outline.size_bytes[value]
        else:
            pinned_until[value] = -1
    fixed_bytes, running = [], 0
    for at in range(count):
        running += change[at]
        fixed_bytes.append(running)
    return _Lifetimes(fixed_bytes=fixed_bytes, pinned_until=pinned_until)


def own_bytes(outline: Outline, at: int, option: Option, lifetimes: _Lifetimes, modelled: set[int]) -> int:
    """What main operator `at` needs with an option beyond `fixed_bytes` and modelled values."""
    size = outline.size_bytes
    reads = sum(
        size[value]
        for value in option.reads
        if value not in modelled and not _pinned(outline, lifetimes, value, at)
    )
    return reads + sum(size[value] for value in option.writes) + option.first_extra_bytes


def _pinned(outline: Outline, lifetimes: _Lifetimes, value: int, at: int) -> bool:
    """Whether `fixed_bytes[at]` counts the value."""
    if lifetimes.pinned_until[value] < at:
        return False
    return outline.position[outline.producers[value][0]] < at


def relaxation(
    outline: Outline, budget_bytes: int, *, checkpoint_limit: int, value_limit: int, spans: tuple[int, ...] = ()
) -> ZeroOneProgram:
    """Build the relaxation, coarser the smaller the limits are.

    Args:
        outline: the problem.
        budget_bytes: the budget.
        checkpoint_limit: the most backward operators that get a memory row.
        value_limit: the most values that are modelled; the largest are.
    """
    build = _Builder()
    lifetimes = certain_lifetimes(outline)
    room = float(budget_bytes - outline.resident_bytes)
    scale = 1.0 / max(room, 1.0)
    modelled = _modelled_values(outline, value_limit)
    modelled_set = set(modelled)
    maker = {value: outline.producers[value][0] for value in modelled}
    size = {value: outline.size_bytes[value] * scale for value in modelled}
    forward = outline.forward_main
    count = len(outline.main)

    constant_ms = 0.0
    chosen: dict[int, list[tuple[Option, int]]] = {}
    fixed_choice: dict[int, Option] = {}
    groups = 0
    for at, operator in enumerate(outline.main):
        options = _worthwhile(outline, at, operator, lifetimes, modelled_set)
        if len(options) == 1:
            fixed_choice[at] = options[0]
            constant_ms += options[0].first_ms
            continue
        least_ms = min(option.first_ms for option in options)
        constant_ms += least_ms
        chosen[at] = [(option, build.column(option.first_ms - least_ms, groups)) for option in options]
        groups += 1

    def own_terms(at: int) -> tuple[list[tuple[int, float]], float]:
        """The memory of main operator `at` that depends on its implementation: columns, and a constant."""
        if at in fixed_choice:
            return [], own_bytes(outline, at, fixed_choice[at], lifetimes, modelled_set) * scale
        return [
            (column, own_bytes(outline, at, option, lifetimes, modelled_set) * scale)
            for option, column in chosen[at]
        ], 0.0

    # The forward part: what is stored, and the memory of each of its operators.
    useful = outline.useful_before(forward)
    stored: dict[int, int] = {}
    for value in modelled:
        if value not in useful:
            continue
        operator = maker[value]
        if operator in outline.position:
            stored[value] = build.column()
        elif (first := outline.least_ms(operator)) >= 0:
            # An optional operator's output is there only if it ran in the forward part.
            stored[value] = build.column(0.0)
    early: dict[int, int] = {}
    for value, column in stored.items():
        operator = maker[value]
        if operator not in outline.position:
            if operator not in early:
                early[operator] = build.column(outline.least_ms(operator))
            build.row([(column, 1.0), (early[operator], -1.0)], 0.0)
    for at in range(forward):
        terms, own = own_terms(at)
        fixed = (lifetimes.fixed_bytes[at]) * scale + own
        for value, column in stored.items():
            operator = maker[value]
            if operator in outline.position and outline.position[operator] < at:
                if not _pinned(outline, lifetimes, value, at):
                    terms.append((column, size[value]))
        build.row(terms, room * scale - fixed)
        for option, column in chosen.get(at, []):
            for value in option.overwrites & stored.keys():
                if maker[value] in outline.position:
                    build.row([(column, 1.0), (stored[value], 1.0)], 1.0)
        if at in fixed_choice:
            for value in fixed_choice[at].overwrites & stored.keys():
                if maker[value] in outline.position:
                    build.row([(stored[value], 1.0)], 0.0)

    # The backward part, interval by interval.
    checkpoints = _checkpoints(outline, lifetimes, modelled_set, checkpoint_limit)
    before: dict[int, int] = dict(stored)
    started = forward
    live_at = [before]
    rerun_in: list[dict[int, int]] = []
    starts = []
    for checkpoint in checkpoints:
        needed = outline.useful_before(started)
        rerun: dict[int, int] = {}
        for value in modelled:
            operator = maker[value]
            if operator in rerun or value not in needed:
                continue
            if operator in outline.extra_set:
                rerun[operator] = build.column(outline.least_ms(operator))
        at_checkpoint = outline.useful_before(checkpoint)

        def source(value: int) -> list[tuple[int, float]]:
            """Minus what can supply the value during this interval."""
            terms = []
            if value in before:
                terms.append((before[value], -1.0))
            if maker[value] in rerun:
                terms.append((rerun[maker[value]], -1.0))
            return terms

        for operator, column in rerun.items():
            for value in outline.must_read[operator] & modelled_set:
                build.row([(column, 1.0), *source(value)], 0.0)
        live = {value: build.column() for value in modelled if value in at_checkpoint and source(value)}
        for value, column in live.items():
            build.row([(column, 1.0), *source(value)], 0.0)
        for at in range(started, checkpoint + 1):
            if at in fixed_choice:
                reading = {value: None for value in fixed_choice[at].reads & modelled_set}
                for value in reading:
                    supply = [(live[value], -1.0)] if at == checkpoint and value in live else source(value)
                    build.row(supply, -1.0)
                continue
            by_value: dict[int, list[int]] = {}
            for option, column in chosen[at]:
                for value in option.reads & modelled_set:
                    by_value.setdefault(value, []).append(column)
            for value, columns in by_value.items():
                supply = [(live[value], -1.0)] if at == checkpoint and value in live else source(value)
                if len(columns) == len(chosen[at]):
                    build.row(supply, -1.0)
                else:
                    build.row([*((column, 1.0) for column in columns), *supply], 0.0)
        for at in range(max(started - 1, forward), checkpoint):
            overwriting = [(fixed_choice[at], -1)] if at in fixed_choice else chosen[at]
            for option, column in overwriting:
                for value in option.overwrites & live.keys():
                    terms = [(live[value], 1.0)]
                    if column >= 0:
                        terms.append((column, 1.0))
                    if maker[value] in rerun:
                        terms.append((rerun[maker[value]], -1.0))
                    build.row(terms, 1.0 if column >= 0 else 0.0)
        terms, own = own_terms(checkpoint)
        terms.extend((column, size[value]) for value, column in live.items())
        build.row(terms, room * scale - lifetimes.fixed_bytes[checkpoint] * scale - own)
        before = live
        live_at.append(live)
        rerun_in.append(rerun)
        starts.append(started)
        started = checkpoint + 1
    for span in spans:
        for first in range(0, len(checkpoints), span):
            last = min(first + span, len(checkpoints))
            if last - first < 2:
                continue
            begin = live_at[first]
            once: dict[int, int] = {}
            for interval in range(first, last):
                for operator in rerun_in[interval]:
                    once.setdefault(operator, -1)
            for operator in once:
                once[operator] = build.column()
                cols = [rerun_in[i][operator] for i in range(first, last) if operator in rerun_in[i]]
                build.row([(once[operator], 1.0), *((c, -1.0) for c in cols)], 0.0)
            def supply_of(value):
                terms = []
                if value in begin:
                    terms.append((begin[value], -1.0))
                if maker[value] in once:
                    terms.append((once[maker[value]], -1.0))
                return terms
            for operator, column in once.items():
                for value in outline.must_read[operator] & modelled_set:
                    build.row([(column, 1.0), *supply_of(value)], 0.0)
            for interval in range(first, last):
                if interval > first:
                    for value, column in live_at[interval + 1].items():
                        build.row([(column, 1.0), *supply_of(value)], 0.0)
                for at in range(starts[interval], checkpoints[interval] + 1):
                    if at in fixed_choice:
                        for value in fixed_choice[at].reads & modelled_set:
                            build.row(supply_of(value), -1.0)
                        continue
                    by_value = {}
                    for option, column in chosen[at]:
                        for value in option.reads & modelled_set:
                            by_value.setdefault(value, []).append(column)
                    for value, columns in by_value.items():
                        build.row([*((column, 1.0) for column in columns), *supply_of(value)], 0.0)
    assert started == count
    return build.program(constant_ms, groups)


def _worthwhile(
    outline: Outline, at: int, operator: int, lifetimes: _Lifetimes, modelled: set[int]
) -> list[Option]:
    """The options of a main operator that differ here: reading fewer modelled values at no more cost wins."""
    kept: list[tuple[tuple[float, int], frozenset[int], frozenset[int], Option]] = []
    options = outline.options[operator]
    described = [
        (option.first_ms, own_bytes(outline, at, option, lifetimes, modelled), option) for option in options
    ]
    for first_ms, own, option in sorted(described, key=lambda item: item[:2]):
        reads, overwrites = option.reads & modelled, option.overwrites & modelled
        if not any(
            cost[0] <= first_ms and cost[1] <= own and other <= reads and over <= overwrites
            for cost, other, over, _ in kept
        ):
            kept.append(((first_ms, own), reads, overwrites, option))
    return [option for _, _, _, option in kept]


def _modelled_values(outline: Outline, limit: int) -> list[int]:
    """The forward values whose liveness is decided: the largest with one maker that always writes them."""
    candidates = [
        value
        for value, makers in enumerate(outline.producers)
        if len(makers) == 1
        and outline.size_bytes[value] > 0
        and not outline.held[value]
        and outline.is_forward(makers[0])
        and value in outline.always_writes[makers[0]]
        and (makers[0] in outline.position or makers[0] in outline.extra_set)
    ]
    # One that cannot be made again is pinned to its certain readers; the rest of its life is not worth columns.
    candidates = [value for value in candidates if outline.profile.graph.operators[outline.producers[value][0]].rerunnable]
    candidates.sort(key=lambda value: -outline.size_bytes[value])
    largest = outline.size_bytes[candidates[0]] if candidates else 0
    if len(candidates) > 64:
        candidates = [value for value in candidates if outline.size_bytes[value] >= largest / 1000]
    return sorted(candidates[:limit])


def _checkpoints(
    outline: Outline, lifetimes: _Lifetimes, modelled: set[int], limit: int
) -> list[int]:
    """Backward places for memory rows: of each stretch of the backward part, the operator that needs the most."""
    places = list(range(outline.forward_main, len(outline.main)))
    if not places:
        return []

    def demand(at: int) -> int:
        options = outline.options[outline.main[at]]
        reads = min(
            (
                own_bytes(outline, at, option, lifetimes, modelled)
                + sum(outline.size_bytes[value] for value in option.reads & modelled)
                for option in options
            ),
            default=0,
        )
        return lifetimes.fixed_bytes[at] + reads

    if len(places) > limit:
        stretches = np.array_split(np.array(places), max(1, limit - 1))
        places = sorted({max((int(at) for at in stretch), key=demand) for stretch in stretches} | {places[-1]})
    return places
