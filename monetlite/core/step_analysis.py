"""Memory of a training step by what it is held for, and the fate of each value.

Everything is derived from the `Timeline` that `simulate` makes, whose figures are split and never changed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph, ValueKind
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Lifetime, Step, lifetimes, reruns


class Holding(StrEnum):
    """Purposes of memory, in the order in which pictures stack them from the bottom."""

    WEIGHTS = "weights"
    """Parameters and buffers."""
    INPUTS = "inputs"
    OPTIMIZER = "optimizer state"
    WEIGHT_GRADIENTS = "weight gradients"
    """Gradients of parameters and inputs, those of earlier batches included; never freed within the step."""
    STORED = "stored"
    """Activations and values derived from them, written in the forward part."""
    RECOMPUTED = "recomputed"
    """The same, written in the backward part."""
    GRADIENTS = "gradients in flight"
    """Gradients of activations."""
    WORKSPACE = "workspace"
    """An operator's own memory while it runs, and what libraries keep between their calls."""


_OF_KIND = {
    ValueKind.PARAM_GRAD: Holding.WEIGHT_GRADIENTS,
    ValueKind.GRADIENT: Holding.GRADIENTS,
    ValueKind.TANGENT: Holding.GRADIENTS,
}


class Fate(StrEnum):
    """Ways that a value can go, in the order in which pictures stack them from the bottom."""

    STORED = "stored"
    """Kept from the forward part into the backward part."""
    STORED_THEN_RECOMPUTED = "stored, then recomputed"
    """Kept for a part of the backward part, and computed again for another."""
    RECOMPUTED = "recomputed"
    """Dropped in the forward part, or not made there, and computed in the backward part."""
    FREED = "not needed again"
    """Dropped in the forward part; nothing computes it again."""
    NEVER_MADE = "never made"
    HELD = "held"
    """Kept to the end of the training step, by the caller or by its operator."""
    GRADIENT = "gradient in flight"
    """The gradient of an activation, written and read in the backward part."""


@dataclass(frozen=True, kw_only=True)
class StepAnalysis:
    """One way to run the training step: its memory by purpose, and the fate of each value."""

    profile: Profile
    timeline: Timeline

    @classmethod
    def of_steps(cls, profile: Profile, steps: Iterable[Step], **others: Any) -> Self:
        """The analysis of steps; `others` are fields of a subclass.

        Raises:
            IllegalSchedule: as `simulate`.
        """
        return cls(profile=profile, timeline=simulate(profile, steps), **others)

    @property
    def graph(self) -> OperatorGraph:
        return self.profile.graph

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.timeline.steps

    @cached_property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """Every stay of a value in memory, in the order in which they begin."""
        return lifetimes(self.graph, self.steps)

    @cached_property
    def stays(self) -> dict[int, list[Lifetime]]:
        """The stays of each value that is made."""
        found: dict[int, list[Lifetime]] = {}
        for stay in self.lifetimes:
            found.setdefault(stay.value, []).append(stay)
        return found

    @cached_property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @cached_property
    def latency_ms(self) -> float:
        return self.timeline.latency_ms

    @cached_property
    def peak_operator(self) -> str:
        """Name of the operator that runs at the peak."""
        return self.graph.operators[self.timeline.steps[self.timeline.peak_step][0]].name

    @property
    def resident_bytes(self) -> Mapping[Holding, int]:
        """Memory that is held all through the step."""
        resident = self.graph.resident
        return dict.fromkeys(Holding, 0) | {
            Holding.WEIGHTS: resident.parameters + resident.buffers,
            Holding.INPUTS: resident.inputs,
            Holding.OPTIMIZER: resident.optimizer,
            Holding.WEIGHT_GRADIENTS: resident.gradients,
            Holding.WORKSPACE: resident.libraries,
        }

    @cached_property
    def again(self) -> tuple[bool, ...]:
        """For each step, True if its operator ran before."""
        return tuple(reruns(self.steps))

    @cached_property
    def bytes_of(self) -> Mapping[Holding, tuple[int, ...]]:
        """Memory that each step holds, by purpose. Over all purposes it sums to the timeline's `memory_bytes`."""
        changes = {holding: [0] * (len(self.timeline.steps) + 1) for holding in Holding}
        for stay in self.lifetimes:
            size_bytes = self.graph.values[stay.value].size_bytes
            held = changes[self.holding(stay)]
            held[stay.begin] += size_bytes
            held[stay.end if stay.overwritten else stay.end + 1] -= size_bytes
        resident = self.resident_bytes
        found = {
            holding: tuple(held + resident[holding] for held in accumulate(changes[holding][:-1]))
            for holding in Holding
        }
        libraries = resident[Holding.WORKSPACE]
        return found | {Holding.WORKSPACE: tuple(libraries + taken for taken in self.timeline.workspace_bytes)}

    @property
    def peak_bytes_of(self) -> Mapping[Holding, int]:
        """Memory at the peak, by purpose."""
        return {holding: self.bytes_of[holding][self.timeline.peak_step] for holding in Holding}

    def holding(self, stay: Lifetime) -> Holding:
        """Purpose that a value is held for during one stay."""
        kept = Holding.RECOMPUTED if stay.backward else Holding.STORED
        return _OF_KIND.get(self.graph.values[stay.value].kind, kept)

    def held_at(self, step: int) -> list[Lifetime]:
        """Stays that a step's memory counts. An overwritten value has given its memory to the result."""
        return [
            stay
            for stay in self.lifetimes
            if stay.begin <= step <= stay.end and not (stay.overwritten and stay.end == step)
        ]

    def fate(self, value: int) -> Fate:
        """Fate of a value, by its index."""
        stays = self.stays.get(value)
        if not stays:
            return Fate.NEVER_MADE
        if self.graph.values[value].held:
            return Fate.HELD
        if self.graph.values[value].kind is ValueKind.GRADIENT:
            return Fate.GRADIENT
        recomputed = stays[-1].backward
        if any(stay.begin < self.timeline.border <= stay.end for stay in stays):
            return Fate.STORED_THEN_RECOMPUTED if recomputed else Fate.STORED
        return Fate.RECOMPUTED if recomputed else Fate.FREED
