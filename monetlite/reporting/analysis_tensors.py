"""Why a schedule takes the memory and the time that it does, as data: facts for `monetlite explain`.

Everything is read off the `Timeline` that `simulate` makes of the schedule, and that of plain training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from monetlite.core.costs import Profile
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, ValueKind
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Lifetime, Step, plain_steps
from monetlite.reporting.analysis_overhead import Overhead, overhead
from monetlite.reporting.memory import Breakdown, Holding, break_down, holding_of

LARGEST_TENSORS = 10
LARGEST_AT_PEAK = 5


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor in memory at a step: by what it is held, and the operator that wrote it."""

    name: str
    operator: str
    size_bytes: int
    holding: Holding


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The step that needs the most memory.

    Attributes:
        memory_bytes: what it needs; step: its position among `steps`.
        operator, implementation: what runs there; again: whether it ran before; backward: whether the forward pass
            is over.
        held_bytes: what memory is held for, summing to `memory_bytes`.
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
    largest: tuple[Held, ...]


class Fate(StrEnum):
    """What happens to a tensor of the forward pass."""

    STORED = "stored"
    """It is kept from the forward pass into the backward pass."""
    RECOMPUTED = "recomputed"
    """The forward pass drops it, or never makes it, and the backward pass computes it."""
    UNNEEDED = "not needed"
    """The forward pass drops it, and nothing computes it again."""
    NEVER_MADE = "never made"
    """Plain training makes it; the schedule does not."""
    HELD = "held"
    """The caller, or the operator itself, has it to the end of the step."""


@dataclass(frozen=True, kw_only=True)
class Stay:
    """One stay of a tensor in memory.

    Attributes:
        begin, end: steps: the one that writes it, and the last that it is there at.
        writer: the operator of `begin`; until: that of `end`; readers: those that read it in between, in order.
        before: for what is computed in the backward pass, the next operator that runs once in order: what it is
            computed for.
        latency_ms: what the run at `begin` takes.
        overwritten: whether the result of `until` takes its memory over.
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
class Spared:
    """An operator that reads a tensor in plain training's backward pass, and not in the schedule's.

    `implementation` is how it runs instead; None where it doesn't run at all.
    """

    operator: str
    implementation: str | None


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the forward pass, and what happens to it.

    `stays` are in order; `spared` says which operators of the backward pass do without it.
    """

    name: str
    operator: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    fate: Fate
    stays: tuple[Stay, ...]
    spared: tuple[Spared, ...]

    @property
    def recomputations(self) -> tuple[Stay, ...]:
        """The stays that begin in the backward pass."""
        return tuple(stay for stay in self.stays if stay.before is not None)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a schedule does, and why it takes what it takes.

    `device`, `kind` and `environment` are of the costs that it was priced with; `plain_peak_bytes` is plain
    training's; `tensors` are the largest of the forward pass, largest first.
    """

    device: str
    kind: str
    environment: Mapping[str, str]
    peak: Peak
    plain_peak_bytes: int
    tensors: tuple[Tensor, ...]
    overhead: Overhead

    def as_solved(self, schedule: Schedule) -> bool:
        """Whether the costs are those that a schedule was solved with, as far as it shows: its bound holds then."""
        same_time = math.isclose(self.overhead.latency_ms, schedule.latency_ms, rel_tol=1e-6)
        return same_time and self.peak.memory_bytes == schedule.peak_bytes


def explain(profile: Profile, steps: tuple[Step, ...], plain: Profile | None = None) -> Explanation:
    """Explain a schedule's steps.

    Args:
        profile: the graph and its costs.
        steps: legal on it.
        plain: the profile of plain training, where that has its images in another layout.

    Raises:
        IllegalSchedule: the steps are not legal.
    """
    plain = plain or profile
    timeline = simulate(profile, steps)
    before = simulate(plain, plain_steps(plain.graph))
    parts = break_down(profile, timeline)
    return Explanation(
        device=profile.device,
        kind=str(profile.kind),
        environment=profile.environment,
        peak=peak_of(profile, parts),
        plain_peak_bytes=before.peak_bytes,
        tensors=largest_tensors(profile.graph, parts, LARGEST_TENSORS),
        overhead=overhead(profile, timeline, plain, before),
    )


def peak_of(profile: Profile, parts: Breakdown) -> Peak:
    """The step that needs the most memory, and what is held there."""
    graph, timeline = profile.graph, parts.timeline
    at = timeline.peak_step
    index, choice = timeline.steps[at]
    operator, implementation = graph.operators[index], graph.operators[index].implementations[choice]
    there = [stay for stay in parts.lifetimes if stay.begin <= at <= stay.end]
    # What is overwritten has given its memory to the result, which is counted.
    there = [stay for stay in there if not (stay.overwritten and stay.end == at)]
    own = {*implementation.reads, *implementation.writes}
    size = graph.values
    return Peak(
        memory_bytes=timeline.memory_bytes[at],
        step=at,
        steps=len(timeline.steps),
        operator=operator.name,
        implementation=implementation.name,
        again=any(earlier == index for earlier, _ in timeline.steps[:at]),
        backward=at >= parts.backward_begins,
        held_bytes={holding: parts.bytes_of[holding][at] for holding in Holding},
        own_bytes=parts.bytes_of[Holding.WORKSPACE][at]
        + sum(size[stay.value].size_bytes for stay in there if stay.value in own),
        largest=tuple(
            Held(
                name=size[stay.value].name,
                operator=graph.operators[graph.writer[stay.value]].name,
                size_bytes=size[stay.value].size_bytes,
                holding=holding_of(graph, stay),
            )
            for stay in sorted(there, key=lambda stay: -size[stay.value].size_bytes)[:LARGEST_AT_PEAK]
        ),
    )


def largest_tensors(graph: OperatorGraph, parts: Breakdown, count: int) -> tuple[Tensor, ...]:
    """The largest tensors that forward operators write, in the schedule or in plain training, with their fates."""
    plain = plain_steps(graph)
    written = {value for index, _ in plain for value in graph.operators[index].writes}
    written.update(value for writes in parts.timeline.writes for value in writes)
    candidates = [
        value
        for value in written
        if graph.values[value].kind is not ValueKind.STATISTIC
        and graph.operators[graph.writer[value]].phase is Phase.FORWARD
    ]
    candidates.sort(key=lambda value: (-graph.values[value].size_bytes, graph.writer[value], value))
    stays: dict[int, list[Lifetime]] = {}
    for stay in parts.lifetimes:
        stays.setdefault(stay.value, []).append(stay)
    return tuple(_tensor(graph, parts, plain, value, stays.get(value, [])) for value in candidates[:count])


def _tensor(
    graph: OperatorGraph, parts: Breakdown, plain: tuple[Step, ...], value: int, stays: list[Lifetime]
) -> Tensor:
    item, operator = graph.values[value], graph.operators[graph.writer[value]]
    return Tensor(
        name=item.name,
        operator=operator.name,
        module=operator.module,
        shape=item.shape,
        dtype=item.dtype,
        size_bytes=item.size_bytes,
        fate=_fate(item.held, stays, parts.backward_begins),
        stays=tuple(_stay(graph, parts, stay) for stay in stays),
        spared=_spared(graph, plain, parts.timeline.steps, value),
    )


def _fate(held: bool, stays: list[Lifetime], backward_begins: int) -> Fate:
    if not stays:
        return Fate.NEVER_MADE
    if held:
        return Fate.HELD
    if any(not stay.backward and stay.end >= backward_begins for stay in stays):
        return Fate.STORED
    if stays[-1].backward:
        return Fate.RECOMPUTED
    return Fate.UNNEEDED


def _stay(graph: OperatorGraph, parts: Breakdown, stay: Lifetime) -> Stay:
    timeline = parts.timeline

    def name(at: int) -> str:
        return graph.operators[timeline.steps[at][0]].name

    return Stay(
        begin=stay.begin,
        end=stay.end,
        writer=name(stay.begin),
        until=name(stay.end),
        readers=tuple(name(at) for at in stay.reads),
        before=_next_backward(graph, timeline, stay.begin) if stay.backward else None,
        latency_ms=timeline.latencies_ms[stay.begin],
        overwritten=stay.overwritten,
    )


def _next_backward(graph: OperatorGraph, timeline: Timeline, at: int) -> str | None:
    """The first backward operator after a step."""
    following = (graph.operators[index] for index, _ in timeline.steps[at:])
    return next((operator.name for operator in following if operator.phase is Phase.BACKWARD), None)


def _spared(
    graph: OperatorGraph, plain: tuple[Step, ...], steps: tuple[Step, ...], value: int
) -> tuple[Spared, ...]:
    """Operators that plain training's backward pass runs on a value, and the schedule without it."""
    chosen: dict[int, list[Implementation]] = {}
    for index, choice in steps:
        chosen.setdefault(index, []).append(graph.operators[index].implementations[choice])
    found = []
    for index, choice in plain:
        operator = graph.operators[index]
        if not _of_backward(operator) or value not in operator.implementations[choice].reads:
            continue
        ways = chosen.get(index, [])
        if not any(value in way.reads for way in ways):
            found.append(Spared(operator=operator.name, implementation=ways[0].name if ways else None))
    return tuple(found)


def _of_backward(operator: Operator) -> bool:
    """Whether only the backward pass needs an operator."""
    return operator.phase is Phase.BACKWARD or operator.optional


__all__ = [
    "Explanation",
    "Fate",
    "Held",
    "Peak",
    "Spared",
    "Stay",
    "Tensor",
    "explain",
    "largest_tensors",
    "peak_of",
]
