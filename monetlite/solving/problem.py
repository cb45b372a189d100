"""A `Profile` as flat arrays, for compiled code.

What plain training calls an operator's implementations becomes two levels here. A *group* is a set of
implementations that read and write the same values: which group an operator runs with changes what has to
be in memory. Within a group, *options* differ in latency, workspace and what they overwrite, which
nothing but the step itself feels, so the best option of a step follows from the memory that is left there.

| here | MONeT (Shah et al., ICLR 2021) |
| --- | --- |
| group of a backward operator | the choice of recipe, m with the values in its dependence set |
| option | the implementation of a recipe, δ |
| value kept at the end of the forward pass | s at the last forward stage |
| value re-run | r |
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

from monetlite.costs import Profile
from monetlite.graph import OperatorGraph, Phase
from monetlite.schedule import plain_steps, simulate

Integers: TypeAlias = NDArray[numpy.int64]
Floats: TypeAlias = NDArray[numpy.float64]
Flags: TypeAlias = NDArray[numpy.bool_]

TINY_FRACTION = 100_000
"""Values smaller than the plain peak divided by this are never dropped by the search."""


class Tables(NamedTuple):
    """The arrays that the kernel reads. `x_start[i]:x_start[i + 1]` is the slice of `x` that belongs to i.

    Sizes are in bytes, latencies in ms. The options of group g are those of row 2·g for an operator's first
    run and of row 2·g + 1 for later ones, fastest first.
    """

    resident_bytes: int
    value_bytes: Integers
    value_held: Flags
    value_writer: Integers
    """Operator that writes the value, or -1."""
    rerunnable: Flags
    group_start: Integers
    """Groups of each operator."""
    reads_start: Integers
    reads: Integers
    """Values that each group reads, in ascending order."""
    writes_start: Integers
    writes: Integers
    option_start: Integers
    option_latency: Floats
    option_extra: Integers
    """Workspace less the bytes that the option overwrites."""
    option_implementation: Integers
    overwrites_start: Integers
    overwrites: Integers
    """Values that each option overwrites."""
    forward: Integers
    """Mandatory forward operators, in order."""
    backward: Integers
    early_start: Integers
    early: Integers
    """For each position in `forward`, optional operators whose inputs are all there right after it."""
    late_start: Integers
    late: Integers
    """For each position in `forward`, optional operators one of whose inputs is read there for the last time."""
    reader_start: Integers
    readers: Integers
    """Forward operators that read each value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What the search works on.

    Attributes:
        profile: where it comes from.
        tables: the same as arrays.
        droppable: forward values that may be dropped and computed again: not held to the end of the step, not
            written by an operator that can't be run again, not tiny beside the plain peak.
        group_of: for each operator, the group of each of its implementations; -1 for one that can never run
            legally.
        plain_peak_bytes, plain_latency_ms: of plain training.
        least_latency_ms: the latency of running every mandatory operator once, each as fast as it can: no
            schedule is faster.
    """

    profile: Profile
    tables: Tables
    droppable: Integers
    group_of: tuple[tuple[int, ...], ...]
    plain_peak_bytes: int
    plain_latency_ms: float
    least_latency_ms: float

    @property
    def graph(self) -> OperatorGraph:
        return self.profile.graph

    @property
    def value_count(self) -> int:
        return len(self.graph.values)

    @property
    def operator_count(self) -> int:
        return len(self.graph.operators)


class _Option(NamedTuple):
    latency_ms: float
    extra_bytes: int
    implementation: int
    overwrites: tuple[int, ...]


def build_problem(profile: Profile) -> Problem:
    """Flatten a profile; `Problem` says what is kept.

    Implementations that another of the same group beats on both latency and workspace, and under no more
    conditions (what has to die to be overwritten), are left out; for first runs and re-runs apart.
    """
    graph = profile.graph
    size = [value.size_bytes for value in graph.values]
    held = [value.held for value in graph.values]
    plain = simulate(profile, plain_steps(graph))
    writer: dict[int, int] = {}
    group_counts: list[int] = []
    group_of: list[tuple[int, ...]] = []
    reads: list[Sequence[int]] = []
    writes: list[Sequence[int]] = []
    options: list[list[_Option]] = []
    least_latency_ms = 0.0
    for index, operator in enumerate(graph.operators):
        members: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for choice, implementation in enumerate(operator.implementations):
            if _can_run(implementation.reads, implementation.overwrites, held):
                key = (tuple(sorted(set(implementation.reads))), tuple(dict.fromkeys(implementation.writes)))
                members.setdefault(key, []).append(choice)
        chosen = [-1] * len(operator.implementations)
        fastest_ms: list[float] = []
        for (group_reads, group_writes), choices in members.items():
            for choice in choices:
                chosen[choice] = len(reads)
            for value in group_writes:
                writer.setdefault(value, index)
            reads.append(group_reads)
            writes.append(group_writes)
            for again in (False, True):
                offered = list(_offered(profile, index, choices, again, size))
                options.append(_pareto(offered))
            fastest_ms.append(options[-2][0].latency_ms)
        group_counts.append(len(members))
        group_of.append(tuple(chosen))
        if not operator.optional or operator.phase is Phase.BACKWARD:
            least_latency_ms += min(fastest_ms, default=0.0)
    forward = [i for i, op in enumerate(graph.operators) if op.phase is Phase.FORWARD and not op.optional]
    early, late = _optional_positions(graph, forward, writer)
    reader_lists = _forward_readers(graph, range(len(size)))
    option_start, flat_options = _flatten(options)
    tables = Tables(
        resident_bytes=graph.resident.total,
        value_bytes=_integers(size),
        value_held=numpy.array(held, dtype=numpy.bool_),
        value_writer=_integers([writer.get(value, -1) for value in range(len(size))]),
        rerunnable=numpy.array([op.rerunnable for op in graph.operators], dtype=numpy.bool_),
        group_start=_starts(group_counts),
        reads_start=_starts(map(len, reads)),
        reads=_integers(value for row in reads for value in row),
        writes_start=_starts(map(len, writes)),
        writes=_integers(value for row in writes for value in row),
        option_start=option_start,
        option_latency=numpy.array([option.latency_ms for option in flat_options], dtype=numpy.float64),
        option_extra=_integers(option.extra_bytes for option in flat_options),
        option_implementation=_integers(option.implementation for option in flat_options),
        overwrites_start=_starts(len(option.overwrites) for option in flat_options),
        overwrites=_integers(value for option in flat_options for value in option.overwrites),
        forward=_integers(forward),
        backward=_integers(i for i, op in enumerate(graph.operators) if op.phase is Phase.BACKWARD),
        early_start=_starts(map(len, early)),
        early=_integers(operator for row in early for operator in row),
        late_start=_starts(map(len, late)),
        late=_integers(operator for row in late for operator in row),
        reader_start=_starts(map(len, reader_lists)),
        readers=_integers(operator for row in reader_lists for operator in row),
    )
    return Problem(
        profile=profile,
        tables=tables,
        droppable=_droppable(graph, writer, plain.peak_bytes // TINY_FRACTION),
        group_of=tuple(group_of),
        plain_peak_bytes=plain.peak_bytes,
        plain_latency_ms=plain.latency_ms,
        least_latency_ms=least_latency_ms,
    )


def _can_run(reads: tuple[int, ...], overwrites: tuple[int, ...], held: list[bool]) -> bool:
    """Whether what an implementation overwrites can ever die at its step."""
    return all(value in reads and not held[value] for value in overwrites)


def _offered(
    profile: Profile, operator: int, choices: list[int], again: bool, size: list[int]
) -> Iterator[_Option]:
    for choice in choices:
        latency_ms, workspace_bytes = profile.costs[operator][choice].of_run(again)
        overwrites = profile.graph.operators[operator].implementations[choice].overwrites
        extra_bytes = workspace_bytes - sum(size[value] for value in overwrites)
        yield _Option(float(latency_ms), int(extra_bytes), choice, overwrites)


def _pareto(offered: list[_Option]) -> list[_Option]:
    """Options that none beats on latency, memory and conditions at once, fastest first."""
    ordered = sorted(offered, key=lambda option: (option.latency_ms, option.extra_bytes, len(option.overwrites)))
    kept: list[_Option] = []
    for option in ordered:
        if not any(
            better.extra_bytes <= option.extra_bytes and set(better.overwrites) <= set(option.overwrites)
            for better in kept
        ):
            kept.append(option)
    return kept


def _optional_positions(
    graph: OperatorGraph, forward: list[int], writer: dict[int, int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Where in the forward pass each optional operator can run first, and last while its inputs are read anyway."""
    position_of = {operator: position for position, operator in enumerate(forward)}
    last_read: dict[int, int] = {}
    for position, operator in enumerate(forward):
        for implementation in graph.operators[operator].implementations:
            last_read.update(dict.fromkeys(implementation.reads, position))
    first_position = dict(position_of)
    early: list[list[int]] = [[] for _ in forward]
    late: list[list[int]] = [[] for _ in forward]
    for index, candidate in enumerate(graph.operators):
        if candidate.phase is Phase.BACKWARD or not candidate.optional or not forward:
            continue
        reads = candidate.implementations[0].reads
        ready = max((first_position[writer[value]] for value in reads), default=0)
        first_position[index] = ready
        early[ready].append(index)
        latest = min((last_read.get(value, ready) for value in reads), default=ready)
        late[max(ready, latest)].append(index)
    return early, late


def _forward_readers(graph: OperatorGraph, values: Iterable[int]) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in values]
    for index, operator in enumerate(graph.operators):
        if operator.phase is Phase.FORWARD:
            for value in {value for implementation in operator.implementations for value in implementation.reads}:
                readers[value].append(index)
    return readers


def _droppable(graph: OperatorGraph, writer: dict[int, int], tiny_bytes: int) -> Integers:
    chosen: list[int] = []
    for index, value in enumerate(graph.values):
        if index in writer and not value.held and value.size_bytes >= tiny_bytes:
            operator = graph.operators[writer[index]]
            if operator.phase is Phase.FORWARD and operator.rerunnable:
                chosen.append(index)
    return _integers(chosen)


def _integers(values: Iterable[int]) -> Integers:
    return numpy.array(list(values), dtype=numpy.int64)


def _starts(counts: Iterable[int]) -> Integers:
    return numpy.concatenate([[0], numpy.cumsum(_integers(counts))]).astype(numpy.int64)


def _flatten(rows: list[list[Any]]) -> tuple[Integers, list[Any]]:
    return _starts(map(len, rows)), [item for row in rows for item in row]
