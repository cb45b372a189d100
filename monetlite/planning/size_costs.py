"""Memory of schedules at any batch and length, from one trace.

The trace is made at a batch and a length with a prime factor that no size of the model has. So the factors of a
tensor's bytes tell how often the batch and the length are in it, and its memory at other sizes follows. A sum such
as `length + 1` has no such factor: sizes are checked against the trace at the sizes that were asked for.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import OPTIMIZER_STEP, Resident, Value
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step

_BATCHES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)
_FACTORS = (61, 59, 53, 47, 43, 41, 37, 31, 29, 23, 19, 17, 13, 11)
_LEAST_UNIT, _MOST_UNIT = 8, 128
Power: TypeAlias = tuple[int, int]
"""Exponents of the batch and of the length in a size."""


@dataclass(frozen=True, kw_only=True)
class TellingSizes:
    """A batch that is a prime, and a length with a prime factor; 0 where there is no length."""

    batch: int
    length: int = 0
    factor: int = 0

    def power(self, size: int) -> Power:
        """Exponents of batch and length in a size."""
        return _multiplicity(size, self.batch), _multiplicity(size, self.factor)


def telling_sizes(dimensions: Iterable[int], length: int | None) -> TellingSizes | None:
    """Sizes to trace at, the length at most as given; None if every choice is a factor of a dimension."""
    known = {size for size in dimensions if size > 1}

    def free(prime: int) -> bool:
        return all(size % prime for size in known)

    batch = next(filter(free, _BATCHES), None)
    if batch is None or length is None:
        return None if batch is None else TellingSizes(batch=batch)
    unit = min(max(_LEAST_UNIT, 2 ** max(0, (length // 64).bit_length() - 1)), _MOST_UNIT)
    fitting = (factor for factor in _FACTORS if factor * unit <= length and factor != batch and free(factor))
    factor = next(fitting, None)
    return None if factor is None else TellingSizes(batch=batch, length=unit * factor, factor=factor)


def _multiplicity(size: int, prime: int) -> int:
    count = 0
    while prime and size and size % prime == 0:
        size, count = size // prime, count + 1
    return count


class SizedStep:
    """A step traced at telling sizes, and its memory at others.

    Args:
        profile: with the optimizer and accumulation.
        sizes: that it was traced at.
        asked, batch, length: the step at other sizes. Both tell of workspace that has a constant part.
    """

    def __init__(self, profile: Profile, sizes: TellingSizes, asked: Profile, batch: int, length: int) -> None:
        self.profile, self.sizes = profile, sizes
        graph = profile.graph
        wide, long = batch / sizes.batch, length / sizes.length if sizes.length else 1.0
        there = {
            (operator.name, way.name): cost.workspace_bytes
            for operator, costs in zip(asked.graph.operators, asked.costs, strict=True)
            for way, cost in zip(operator.implementations, costs, strict=True)
        }
        value_of = [sizes.power(value.size_bytes) for value in graph.values]
        workspaces = [
            [
                {(0, 0): cost.workspace_bytes}
                if operator.family == OPTIMIZER_STEP
                else self._workspace(cost.workspace_bytes, there.get((operator.name, way.name)), wide, long)
                for way, cost in zip(operator.implementations, costs, strict=True)
            ]
            for operator, costs in zip(graph.operators, profile.costs, strict=True)
        ]
        inputs = sizes.power(graph.resident.inputs)
        grown = itertools.chain.from_iterable(itertools.chain.from_iterable(workspaces))
        powers = {(0, 0), inputs, *value_of, *grown}
        self.parts = {power: self._part(power, value_of, workspaces, inputs) for power in powers}
        """For each power, the step with the memory that grows so, and nothing else."""

    def _workspace(self, size: int, asked: int | None, wide: float, long: float) -> dict[Power, int]:
        """Workspace by power. That of tiles grows with their rows, and has sums of a constant size.

        Args:
            size: in the trace, in bytes.
            asked: at the sizes that were asked for, if known.
            wide, long: their batch and length as multiples of the trace's.
        """
        batches, lengths = self.sizes.power(size)
        if asked is not None and round(size * wide**batches * long**lengths) != asked and wide * long != 1:
            growing = round((size - asked) / (1 - wide * long))
            if 0 < growing <= size:
                return {(0, 0): size - growing, (1, 1 if self.sizes.length else 0): growing}
        return {(batches, lengths): size}

    def _part(
        self,
        power: Power,
        value_of: Sequence[Power],
        workspaces: Sequence[Sequence[Mapping[Power, int]]],
        inputs: Power,
    ) -> Profile:
        graph = self.profile.graph

        def value(item: Value, own: Power) -> Value:
            return item if own == power else replace(item, size_bytes=0)

        resident = replace(graph.resident, inputs=0) if power == (0, 0) else Resident()
        if inputs == power:
            resident = replace(resident, inputs=graph.resident.inputs)
        costs = (tuple(Cost(latency_ms=0.0, workspace_bytes=own.get(power, 0)) for own in of) for of in workspaces)
        return replace(
            self.profile,
            graph=replace(graph, values=tuple(map(value, graph.values, value_of)), resident=resident),
            costs=tuple(costs),
        )

    def peak(self, steps: Sequence[Step]) -> "Callable[[int, int], int]":
        """The peak of a schedule, in bytes, as a function of batch and length. A length of 0 is the trace's own."""
        memory = {
            power: np.array(simulate(part, steps).memory_bytes, dtype=np.float64)
            for power, part in self.parts.items()
        }

        def at(batch: int, length: int) -> int:
            wide = batch / self.sizes.batch
            long = length / self.sizes.length if length and self.sizes.length else 1.0
            grown = [of * (wide**often * long**times) for (often, times), of in memory.items()]
            return int(np.sum(grown, axis=0).max())

        return at


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all smaller ones do; 0 if none does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
