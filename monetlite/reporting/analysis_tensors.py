"""The peak of a schedule, and the histories of its largest tensors, as data for `monetlite show`."""

from collections.abc import Mapping
from dataclasses import dataclass

from monetlite.core.graph import Phase, ValueKind
from monetlite.core.step_analysis import Fate, Holding, StepAnalysis
from monetlite.core.steps import Lifetime, Step, plain_steps, step_number

LARGEST_TENSORS = 10
LARGEST_AT_PEAK = 5


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor in memory at a step, and the operator that wrote it."""

    name: str
    operator: str
    size_bytes: int
    holding: Holding


@dataclass(frozen=True, kw_only=True)
class PeakStep:
    """The step that needs the most memory.

    Attributes:
        memory_bytes: its memory; step: its number among `steps`.
        operator, implementation: that run there; again: the operator ran before; backward: it is past the border.
        held_bytes: `memory_bytes` by purpose.
        own_bytes: of those, the operator's own inputs, results and workspace.
        largest: the largest tensors there.
    """

    memory_bytes: int
    step: int
    steps: int
    operator: str
    implementation: str
    again: bool
    backward: bool
    held_bytes: Mapping[Holding, int]
    own_bytes: int
    largest: tuple[HeldTensor, ...]


@dataclass(frozen=True, kw_only=True)
class TensorStay:
    """One stay of a tensor in memory.

    Attributes:
        begin, end: numbers of the step that writes it, and of the last that it is there at; writer, until: their
            operators.
        readers: operators that read it in between, in order.
        before: in the backward part, the next backward operator, for which it is computed.
        latency_ms: of the run at `begin`.
        overwritten: the result of `until` takes its memory over.
    """

    begin: int
    end: int
    writer: str
    until: str
    readers: tuple[str, ...]
    before: str | None
    latency_ms: float
    overwritten: bool


@dataclass(frozen=True, kw_only=True)
class SparedRead:
    """An operator that reads a tensor in plain training's backward pass, and not in the schedule's.

    `implementation` is its way to run instead; None if it doesn't run at all.
    """

    operator: str
    implementation: str | None


@dataclass(frozen=True, kw_only=True)
class TensorHistory:
    """A tensor of the forward pass, its fate and its stays in order."""

    name: str
    operator: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    fate: Fate
    stays: tuple[TensorStay, ...]
    spared: tuple[SparedRead, ...]

    @property
    def recomputations(self) -> tuple[TensorStay, ...]:
        """The stays that begin in the backward part."""
        return tuple(stay for stay in self.stays if stay.before is not None)


def peak_step_of(side: StepAnalysis) -> PeakStep:
    """The step that needs the most memory, and the tensors there."""
    graph, timeline = side.graph, side.timeline
    at = timeline.peak_step
    index, choice = timeline.steps[at]
    operator, implementation = graph.operators[index], graph.operators[index].implementations[choice]
    there = side.held_at(at)
    own = {*implementation.reads, *implementation.writes}

    def size(stay: Lifetime) -> int:
        return graph.values[stay.value].size_bytes

    return PeakStep(
        memory_bytes=timeline.memory_bytes[at],
        step=step_number(at),
        steps=len(timeline.steps),
        operator=operator.name,
        implementation=implementation.name,
        again=side.again[at],
        backward=at >= side.timeline.border,
        held_bytes=side.peak_bytes_of,
        own_bytes=side.peak_bytes_of[Holding.WORKSPACE] + sum(size(stay) for stay in there if stay.value in own),
        largest=tuple(
            HeldTensor(
                name=graph.values[stay.value].name,
                operator=graph.operators[graph.writer[stay.value]].name,
                size_bytes=size(stay),
                holding=side.holding(stay),
            )
            for stay in sorted(there, key=size, reverse=True)[:LARGEST_AT_PEAK]
        ),
    )


def largest_tensors(side: StepAnalysis) -> tuple[TensorHistory, ...]:
    """The largest tensors that forward operators write, in the schedule or in plain training; largest first."""
    graph = side.graph
    plain = plain_steps(graph)
    written = {value for index, _ in plain for value in graph.operators[index].writes} | side.stays.keys()
    candidates = [
        value
        for value in written
        if graph.values[value].kind is not ValueKind.STATISTIC
        and graph.operators[graph.writer[value]].phase is Phase.FORWARD
    ]
    candidates.sort(key=lambda value: (-graph.values[value].size_bytes, graph.writer[value], value))
    return tuple(_history(side, plain, value) for value in candidates[:LARGEST_TENSORS])


def _history(side: StepAnalysis, plain: tuple[Step, ...], value: int) -> TensorHistory:
    item, operator = side.graph.values[value], side.graph.operators[side.graph.writer[value]]
    return TensorHistory(
        name=item.name,
        operator=operator.name,
        module=operator.module,
        shape=item.shape,
        dtype=item.dtype,
        size_bytes=item.size_bytes,
        fate=side.fate(value),
        stays=tuple(_stay(side, stay) for stay in side.stays.get(value, ())),
        spared=_spared(side, plain, value),
    )


def _stay(side: StepAnalysis, stay: Lifetime) -> TensorStay:
    operators = [side.graph.operators[index] for index, _ in side.timeline.steps]
    following = (operator.name for operator in operators[stay.begin :] if operator.phase is Phase.BACKWARD)
    return TensorStay(
        begin=step_number(stay.begin),
        end=step_number(stay.end),
        writer=operators[stay.begin].name,
        until=operators[stay.end].name,
        readers=tuple(operators[at].name for at in stay.reads),
        before=next(following, None) if stay.backward else None,
        latency_ms=side.timeline.latencies_ms[stay.begin],
        overwritten=stay.overwritten,
    )


def _spared(side: StepAnalysis, plain: tuple[Step, ...], value: int) -> tuple[SparedRead, ...]:
    """Operators that plain training's backward pass runs on a value, and the schedule without it."""
    found = []
    for index, choice in plain:
        operator = side.graph.operators[index]
        of_backward = operator.phase is Phase.BACKWARD or operator.optional
        if not of_backward or value not in operator.implementations[choice].reads:
            continue
        ways = [operator.implementations[way] for ran, way in side.timeline.steps if ran == index]
        if not any(value in way.reads for way in ways):
            found.append(SparedRead(operator=operator.name, implementation=ways[0].name if ways else None))
    return tuple(found)
