"""Costs of a training step at batches that it wasn't traced at, from two that it was."""

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import Operator, Resident, TensorSpec, Value


class Unlike(Exception):
    """Two traces of a model that are not the same step at two batches."""


def at_batch(known: Mapping[int, Profile], batch: int) -> Profile:
    """A profile at a batch, from those of the nearest two others that are the same step.

    A size is taken to be in proportion to the batch, or the same at every batch; anything else is refused. A
    latency and a workspace lie on the line through two, workspaces rounded up. Calls are those of a traced batch:
    the profile is for solving.

    Raises:
        Unlike: no two of them differ in sizes only.
    """
    nearest = sorted(known, key=lambda other: (abs(other - batch), other))
    for one, other in itertools.combinations(nearest, 2):
        with suppress(Unlike):
            least, most = sorted((one, other))
            return _TwoBatches(known[least], known[most], least, most, batch).profile()
    raise Unlike("no two are of one step at two batches")


def same_step(one: Profile, other: Profile) -> bool:
    """True if both offer the same implementations for the same values, whatever they cost."""
    return one.graph.fingerprint == other.graph.fingerprint and _offers(one) == _offers(other)


def _offers(profile: Profile) -> list[object]:
    def of(operator: Operator) -> object:
        return [(item.name, item.reads, item.writes, item.overwrites) for item in operator.implementations]

    return [of(operator) for operator in profile.graph.operators]


class _TwoBatches:
    """The line through two profiles of one step, at batches `least` and `most`."""

    def __init__(self, one: Profile, other: Profile, least: int, most: int, batch: int) -> None:
        self.one, self.other = one, other
        self.least, self.most, self.batch = least, most, batch
        self.share = Fraction(batch - least, most - least)

    def profile(self) -> Profile:
        one, other = self.one, self.other
        if one.graph.structure != other.graph.structure or _offers(one) != _offers(other):
            raise Unlike("they have other operators or implementations")
        graph = replace(
            one.graph,
            values=tuple(map(self._value, one.graph.values, other.graph.values)),
            resident=self._resident(one.graph.resident, other.graph.resident),
            inputs={name: self._spec(spec, other.graph.inputs[name]) for name, spec in one.graph.inputs.items()},
        )
        costs = tuple(tuple(map(self._cost, of, others)) for of, others in zip(one.costs, other.costs, strict=True))
        source = None if one.source is None else replace(one.source, batch=self.batch)
        return replace(one, graph=graph, costs=costs, source=source)

    def _size(self, one: int, other: int) -> int:
        if one == other:
            return one
        size, rest = divmod(one * self.batch, self.least)
        if rest or one * self.most != other * self.least:
            raise Unlike(f"{one} and {other} are not in proportion to the batch")
        return size

    def _sizes(self, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        if len(one) != len(other):
            raise Unlike("tensors have other dimensions")
        return tuple(map(self._size, one, other))

    def _value(self, one: Value, other: Value) -> Value:
        shape = self._sizes(one.shape, other.shape)
        return replace(one, size_bytes=self._size(one.size_bytes, other.size_bytes), shape=shape)

    def _spec(self, one: TensorSpec, other: TensorSpec) -> TensorSpec:
        return replace(one, shape=self._sizes(one.shape, other.shape), stride=self._sizes(one.stride, other.stride))

    def _between(self, one: int, other: int) -> int:
        return max(min(one, other, 0), -int(-(one + (other - one) * self.share) // 1))

    def _resident(self, one: Resident, other: Resident) -> Resident:
        return Resident(
            **{item.name: self._between(getattr(one, item.name), getattr(other, item.name)) for item in fields(one)}
        )

    def _cost(self, one: Cost, other: Cost) -> Cost:
        def figure(name: str) -> Any:
            low, high = getattr(one, name), getattr(other, name)
            if low is None or high is None:
                if low is not high:
                    raise Unlike("costs of re-runs are known of one of them only")
                return None
            if name.endswith("_ms"):
                return max(0.0, low + (high - low) * float(self.share))
            return self._between(low, high)

        return Cost(**{item.name: figure(item.name) for item in fields(Cost)})
