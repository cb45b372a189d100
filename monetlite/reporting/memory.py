"""What memory holds at each step of a schedule, and why: the data behind timelines and explanations.

Derived from the `Timeline` that `simulate` makes, whose figures it splits and never changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph, Phase, Resident, ValueKind
from monetlite.core.schedule import Timeline


class Holding(StrEnum):
    """What memory is held for; in the order in which pictures stack it, from the bottom."""

    WEIGHTS = "weights"
    """Parameters and buffers."""
    INPUTS = "inputs"
    OPTIMIZER = "optimizer state"
    WEIGHT_GRADIENTS = "weight gradients"
    """Of parameters and inputs, those of earlier batches included; never freed within the step."""
    STORED = "stored"
    """Activations and what is derived from them, as the forward pass left them."""
    RECOMPUTED = "recomputed"
    """The same, computed again (or only) during the backward pass."""
    GRADIENTS = "gradients in flight"
    """Of activations, on their way back."""
    WORKSPACE = "workspace"
    """What an operator takes for itself while it runs, and what libraries keep between their calls."""


_OF_KIND = {
    ValueKind.PARAM_GRAD: Holding.WEIGHT_GRADIENTS,
    ValueKind.GRADIENT: Holding.GRADIENTS,
    ValueKind.TANGENT: Holding.GRADIENTS,
}


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """One stay of a value in memory.

    Attributes:
        value: its index in the graph; holding: what it is held for.
        begin: the step that writes it; end: the last step that it is in memory at.
        reads: the steps that read it while it is there.
        overwritten: whether the step `end` takes its memory over for a result.
    """

    value: int
    holding: Holding
    begin: int
    end: int
    reads: tuple[int, ...]
    overwritten: bool = False


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The memory of a schedule, split.

    `bytes_of[holding][i]` is what step i holds for one purpose; over all of them they sum to the timeline's
    `memory_bytes[i]`. `backward_begins` is the first step of the backward part.
    """

    timeline: Timeline
    lifetimes: tuple[Lifetime, ...]
    bytes_of: Mapping[Holding, tuple[int, ...]]
    backward_begins: int


def break_down(profile: Profile, timeline: Timeline) -> Breakdown:
    """Split what each step of a simulated schedule holds, by what it is held for."""
    graph = profile.graph
    begins = backward_begins(graph, timeline)
    stays = lifetimes(graph, timeline)
    changes = {holding: [0] * (len(timeline.steps) + 1) for holding in Holding}
    for stay in stays:
        size_bytes = graph.values[stay.value].size_bytes
        changes[stay.holding][stay.begin] += size_bytes
        changes[stay.holding][stay.end if stay.overwritten else stay.end + 1] -= size_bytes
    always = always_there(graph.resident)
    bytes_of = {
        holding: tuple(held + always.get(holding, 0) for held in accumulate(changes[holding][:-1]))
        for holding in Holding
    }
    libraries = always[Holding.WORKSPACE]
    bytes_of[Holding.WORKSPACE] = tuple(libraries + taken for taken in workspaces(profile, timeline))
    return Breakdown(timeline=timeline, lifetimes=stays, bytes_of=bytes_of, backward_begins=begins)


def always_there(resident: Resident) -> dict[Holding, int]:
    """Bytes in memory all through the step, by what they are held for."""
    return {
        Holding.WEIGHTS: resident.parameters + resident.buffers,
        Holding.INPUTS: resident.inputs,
        Holding.OPTIMIZER: resident.optimizer,
        Holding.WEIGHT_GRADIENTS: resident.gradients,
        Holding.WORKSPACE: resident.libraries,
    }


def lifetimes(graph: OperatorGraph, timeline: Timeline) -> tuple[Lifetime, ...]:
    """Every stay of a value in memory, in the order in which they begin."""
    begins = backward_begins(graph, timeline)
    last = len(timeline.steps) - 1
    there: dict[int, tuple[int, list[int]]] = {}
    found: list[Lifetime] = []

    def leave(value: int, at: int, overwritten: bool) -> None:
        begin, reads = there.pop(value)
        kept = Holding.RECOMPUTED if begin >= begins else Holding.STORED
        found.append(
            Lifetime(
                value=value,
                holding=_OF_KIND.get(graph.values[value].kind, kept),
                begin=begin,
                end=at,
                reads=tuple(reads),
                overwritten=overwritten,
            )
        )

    for at, (index, choice) in enumerate(timeline.steps):
        implementation = graph.operators[index].implementations[choice]
        for value in implementation.reads:
            there[value][1].append(at)
        for value in implementation.writes:
            there.setdefault(value, (at, []))
        for value in timeline.frees[at]:
            if value in there:
                leave(value, at, value in implementation.overwrites)
    for value in tuple(there):
        leave(value, last, False)
    return tuple(sorted(found, key=lambda stay: (stay.begin, stay.value)))


def workspaces(profile: Profile, timeline: Timeline) -> tuple[int, ...]:
    """Bytes that each step takes beyond what it reads and writes."""
    ran: set[int] = set()
    taken: list[int] = []
    for index, choice in timeline.steps:
        taken.append(profile.costs[index][choice].of_run(again=index in ran)[1])
        ran.add(index)
    return tuple(taken)


def backward_begins(graph: OperatorGraph, timeline: Timeline) -> int:
    """The first step after the forward pass: the number of steps, if nothing comes after it."""
    waiting = {
        index
        for index, operator in enumerate(graph.operators)
        if operator.phase is Phase.FORWARD and not operator.optional
    }
    for at, (index, _) in enumerate(timeline.steps):
        if not waiting:
            return at
        waiting.discard(index)
    return len(timeline.steps)


__all__ = [
    "Breakdown",
    "Holding",
    "Lifetime",
    "always_there",
    "backward_begins",
    "break_down",
    "lifetimes",
    "workspaces",
]
