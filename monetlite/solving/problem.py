"""The problem that every method solves: one reduction of a profile to what can matter in a schedule.

The *main* operators are those that every schedule runs once and in order: forward operators that are not
optional, then backward operators. Re-runs and optional operators run between them; `stage t` is the gap just
before main operator t. Arrays for compiled code are derived from this (`annealing.flat_problem`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph, Phase


@dataclass(frozen=True, slots=True)
class Option:
    """One implementation of an operator.

    `first_extra_bytes` and `again_extra_bytes` are the workspace less the overwritten bytes: the memory that a
    first run, or a later run, takes beyond the live values and its results.
    """

    choice: int
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    first_ms: float
    again_ms: float
    first_extra_bytes: int
    again_extra_bytes: int

    def of_run(self, again: bool) -> tuple[float, int]:
        """Latency in ms and extra bytes of the first run, or of a later one."""
        if again:
            return self.again_ms, self.again_extra_bytes
        return self.first_ms, self.first_extra_bytes

    @property
    def rerun_differs(self) -> bool:
        """True if a later run costs something else than the first."""
        return self.of_run(False) != self.of_run(True)

    def dominates(self, other: "Option") -> bool:
        """True if this can replace `other` in every schedule, at no more latency or memory."""
        return (
            self.reads <= other.reads
            and self.writes == other.writes
            and self.overwrites <= other.overwrites
            and self.first_ms <= other.first_ms
            and self.again_ms <= other.again_ms
            and self.first_extra_bytes <= other.first_extra_bytes
            and self.again_extra_bytes <= other.again_extra_bytes
        )


def _legal_options(profile: Profile, operator: int) -> tuple[Option, ...]:
    graph = profile.graph
    found: list[Option] = []
    for choice, implementation in enumerate(graph.operators[operator].implementations):
        overwrites = frozenset(implementation.overwrites)
        if any(graph.values[value].held or value not in implementation.reads for value in overwrites):
            continue
        first_ms, first_bytes = profile.costs[operator][choice].of_run(again=False)
        again_ms, again_bytes = profile.costs[operator][choice].of_run(again=True)
        overwritten_bytes = sum(graph.values[value].size_bytes for value in implementation.overwrites)
        found.append(
            Option(
                choice=choice,
                reads=frozenset(implementation.reads),
                writes=frozenset(implementation.writes),
                overwrites=overwrites,
                first_ms=float(first_ms),
                again_ms=float(again_ms),
                first_extra_bytes=int(first_bytes - overwritten_bytes),
                again_extra_bytes=int(again_bytes - overwritten_bytes),
            )
        )
    return tuple(found)


def _undominated(options: tuple[Option, ...]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in options:
        if not any(other.dominates(option) for other in kept):
            kept = [other for other in kept if not option.dominates(other)]
            kept.append(option)
    return tuple(kept)


def _common(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    """The intersection of some sets; empty where there are none."""
    found = list(sets)
    return frozenset.intersection(*found) if found else frozenset()


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A profile, reduced.

    Attributes:
        profile: the graph and its costs.
        legal_options: for each operator, the implementations that can be legal: those that overwrite no held
            value, and only values that they read.
        options: for each operator, those of them that no other dominates.
        main: the main operators, in order; the first `forward_main` of them are forward.
    """

    profile: Profile
    legal_options: tuple[tuple[Option, ...], ...]
    options: tuple[tuple[Option, ...], ...]
    main: tuple[int, ...]
    forward_main: int

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """Reduce a profile. Methods minimise the latency of the device, without the host's times."""
        if any(cost.host_ms or cost.recompute_host_ms for costs in profile.costs for cost in costs):
            profile = profile.of_the_device()
        operators = profile.graph.operators
        forward = profile.graph.mandatory_forward
        backward = [i for i, op in enumerate(operators) if op.phase is Phase.BACKWARD]
        legal = tuple(_legal_options(profile, index) for index in range(len(operators)))
        return cls(
            profile=profile,
            legal_options=legal,
            options=tuple(map(_undominated, legal)),
            main=(*forward, *backward),
            forward_main=len(forward),
        )

    @property
    def graph(self) -> OperatorGraph:
        return self.profile.graph

    @cached_property
    def size_bytes(self) -> tuple[int, ...]:
        return tuple(value.size_bytes for value in self.graph.values)

    @cached_property
    def held(self) -> tuple[bool, ...]:
        return tuple(value.held for value in self.graph.values)

    @cached_property
    def resident_bytes(self) -> int:
        return self.graph.resident.total

    @cached_property
    def extra(self) -> tuple[int, ...]:
        """The operators that may run outside the main run: forward ones, optional or rerunnable."""
        return tuple(
            index
            for index, op in enumerate(self.graph.operators)
            if op.phase is Phase.FORWARD and (op.optional or op.rerunnable)
        )

    @cached_property
    def extra_set(self) -> frozenset[int]:
        return frozenset(self.extra)

    @cached_property
    def position(self) -> dict[int, int]:
        """The place of each main operator in the main run."""
        return {operator: at for at, operator in enumerate(self.main)}

    @cached_property
    def must_read(self) -> tuple[frozenset[int], ...]:
        """For each operator, the values that it reads in every implementation."""
        return tuple(_common(option.reads for option in options) for options in self.options)

    @cached_property
    def may_read(self) -> tuple[frozenset[int], ...]:
        """For each operator, the values that it reads in some implementation."""
        return tuple(frozenset().union(*(option.reads for option in options)) for options in self.options)

    @cached_property
    def always_writes(self) -> tuple[frozenset[int], ...]:
        """For each operator, the values that it writes in every implementation."""
        return tuple(_common(option.writes for option in options) for options in self.options)

    @cached_property
    def runnable(self) -> bool:
        """True if every main operator has a legal implementation."""
        return all(self.options[operator] for operator in self.main)

    @cached_property
    def main_least_ms(self) -> tuple[float, ...]:
        """The least latency of each main operator's one mandatory run."""
        return tuple(min((o.first_ms for o in self.options[op]), default=0.0) for op in self.main)

    @cached_property
    def least_latency_ms(self) -> float:
        """Latency of every main operator once, each by its fastest implementation: no schedule is faster."""
        return math.fsum(self.main_least_ms)

    def is_forward(self, operator: int) -> bool:
        return self.graph.operators[operator].phase is Phase.FORWARD

    def useful_before(self, place: int) -> set[int]:
        """The values that could serve anything from just before a place in the main run to the end."""
        useful = {value for operator in self.main[place:] for value in self.may_read[operator]}
        for operator in reversed(self.extra):
            if any(not useful.isdisjoint(option.writes) for option in self.options[operator]):
                useful |= self.may_read[operator]
        return useful

    def least_ms(self, operator: int) -> float:
        """The least latency of a run outside the main run; it may be the first of an optional operator."""
        options = self.options[operator]
        if operator in self.position:
            return min((option.again_ms for option in options), default=0.0)
        return min((min(option.first_ms, option.again_ms) for option in options), default=0.0)
