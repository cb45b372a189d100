"""What memory holds at each step of a schedule, and why: the data behind timelines and explanations.

Derived from the `Timeline` that `simulate` makes, whose figures it splits and never changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph, Resident, ValueKind
from monetlite.core.simulate import Timeline
from monetlite.core.steps import Lifetime, border, lifetimes


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
class Breakdown:
    """The memory of a schedule, split.

    `bytes_of[holding][i]` is what step i holds for one purpose; over all of them they sum to the timeline's
    `memory_bytes[i]`. `lifetimes` are in the order in which they begin.
    `backward_begins` is the border.
    """

    timeline: Timeline
    lifetimes: tuple[Lifetime, ...]
    bytes_of: Mapping[Holding, tuple[int, ...]]
    backward_begins: int


def break_down(profile: Profile, timeline: Timeline) -> Breakdown:
    """Split what each step of a simulated schedule holds, by what it is held for."""
    graph = profile.graph
    stays = lifetimes(graph, timeline.steps)
    changes = {holding: [0] * (len(timeline.steps) + 1) for holding in Holding}
    for stay in stays:
        size_bytes = graph.values[stay.value].size_bytes
        held = changes[holding_of(graph, stay)]
        held[stay.begin] += size_bytes
        held[stay.end if stay.overwritten else stay.end + 1] -= size_bytes
    always = always_there(graph.resident)
    bytes_of = {
        holding: tuple(held + always.get(holding, 0) for held in accumulate(changes[holding][:-1]))
        for holding in Holding
    }
    libraries = always[Holding.WORKSPACE]
    bytes_of[Holding.WORKSPACE] = tuple(libraries + taken for taken in workspaces(profile, timeline))
    return Breakdown(
        timeline=timeline, lifetimes=stays, bytes_of=bytes_of, backward_begins=border(graph, timeline.steps)
    )


def always_there(resident: Resident) -> dict[Holding, int]:
    """Bytes in memory all through the step, by what they are held for."""
    return {
        Holding.WEIGHTS: resident.parameters + resident.buffers,
        Holding.INPUTS: resident.inputs,
        Holding.OPTIMIZER: resident.optimizer,
        Holding.WEIGHT_GRADIENTS: resident.gradients,
        Holding.WORKSPACE: resident.libraries,
    }


def holding_of(graph: OperatorGraph, stay: Lifetime) -> Holding:
    """What a value is held for during one stay in memory."""
    kept = Holding.RECOMPUTED if stay.backward else Holding.STORED
    return _OF_KIND.get(graph.values[stay.value].kind, kept)


def workspaces(profile: Profile, timeline: Timeline) -> tuple[int, ...]:
    """Bytes that each step takes beyond what it reads and writes."""
    ran: set[int] = set()
    taken: list[int] = []
    for index, choice in timeline.steps:
        taken.append(profile.costs[index][choice].of_run(again=index in ran)[1])
        ran.add(index)
    return tuple(taken)


__all__ = [
    "Breakdown",
    "Holding",
    "always_there",
    "break_down",
    "holding_of",
    "workspaces",
]
