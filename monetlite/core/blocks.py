"""Blocks: a training step as a sequence of stretches between narrow places.

A *cut* lies before a forward operator, and has a place in the backward part: behind it, nothing reads what the
forward part writes after the cut. The bytes that cross a cut are of values that are made on one side of it and read
on the other. A block is what lies between two cuts, in both parts of the step. Skips of a U-Net cross its cuts;
where too much does, the step is one block.

Equal blocks have equal operators in the same order. So numbers of values in that order tell blocks apart exactly,
and no search for an isomorphism is needed.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from monetlite.core.graph import Operator, OperatorGraph, Phase

MIN_INSIDE = 3.0
"""Bytes that a block writes in its forward part, as a multiple of those that cross its end."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of a step; `forward` and `backward` are its operators, by index, ascending."""

    graph: OperatorGraph
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @cached_property
    def written(self) -> frozenset[int]:
        """Values that its operators write, in any implementation."""
        return frozenset(_written(self.graph.operators[index] for index in (*self.forward, *self.backward)))

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that stay in memory when both of its parts have run: outputs, and gradients of parameters."""
        values = self.graph.values
        return sum(values[value].size_bytes for value in self.written if values[value].held)


def reads_of(operator: Operator) -> set[int]:
    """Values that some implementation of an operator reads."""
    return {value for item in operator.implementations for value in item.reads}


def _written(operators: Iterable[Operator]) -> Iterator[int]:
    for operator in operators:
        for item in operator.implementations:
            yield from item.writes


def find_blocks(graph: OperatorGraph, starts: Collection[int] | None = None) -> tuple[Block, ...]:
    """The blocks of a step, in forward order; one if there is no narrow place.

    Args:
        graph: of the step.
        starts: forward operators, by index, before which to cut; by default, wherever the step is narrow.
    """
    operators = graph.operators
    forward = graph.mandatory_forward
    backward = [i for i, op in enumerate(operators) if op.phase is Phase.BACKWARD]
    place_of = {index: place for place, index in enumerate(forward)}
    for index, operator in enumerate(operators):
        if operator.phase is Phase.FORWARD and operator.optional:
            before = [place_of.get(graph.writer.get(value, -1), 0) for value in reads_of(operator)]
            place_of[index] = max(before, default=0)
    crossings = _Crossings(graph, forward, backward, place_of)
    cuts = crossings.narrow() if starts is None else crossings.at(sorted(place_of[index] for index in starts))
    edges = [(0, len(backward)), *cuts, (len(forward), 0)]
    blocks = []
    for (start, last), (end, first) in itertools.pairwise(edges):
        own = tuple(sorted(index for index, place in place_of.items() if start <= place < end))
        blocks.append(Block(graph=graph, forward=own, backward=tuple(backward[first:last])))
    return tuple(blocks)


class _Crossings:
    """The bytes that cross each cut, and its best place in the backward part."""

    def __init__(
        self, graph: OperatorGraph, forward: Sequence[int], backward: Sequence[int], place_of: dict[int, int]
    ) -> None:
        count, values = len(forward), len(graph.values)
        self.size = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
        self.made = np.full(values, count, dtype=np.int64)
        """Place of the forward operator that writes a value; beyond the last for values of the backward part."""
        read_last = np.full(values, -1, dtype=np.int64)
        read_back = np.full(values, len(backward), dtype=np.int64)
        for index, place in place_of.items():
            for value in reads_of(graph.operators[index]):
                read_last[value] = max(read_last[value], place)
            for value in _written([graph.operators[index]]):
                self.made[value] = place
        made_back = np.full(values, len(backward), dtype=np.int64)
        gone_back = np.full(values, -1, dtype=np.int64)
        latest = np.full(len(backward), -1, dtype=np.int64)
        """For each backward operator, the latest place of a forward value that it reads."""
        for at, index in enumerate(backward):
            for value in reads_of(graph.operators[index]):
                read_back[value] = min(read_back[value], at)
                gone_back[value] = at
                if self.made[value] < count:
                    latest[at] = max(latest[at], self.made[value])
            for value in _written([graph.operators[index]]):
                made_back[value] = min(made_back[value], at)
        self.read_last, self.read_back = read_last, read_back
        self.places = count
        # The last backward operator that reads what is written at a place or later, plus one.
        self.turn = np.zeros(count + 1, dtype=np.int64)
        for at, place in enumerate(latest.tolist()):
            if place >= 0:
                self.turn[: place + 1] = at + 1
        held = np.array([value.held for value in graph.values], dtype=bool)
        change = np.zeros(len(backward) + 2, dtype=np.int64)
        passing = (made_back < len(backward)) & (gone_back > made_back) & ~held
        np.add.at(change, made_back[passing] + 1, self.size[passing])
        np.add.at(change, gone_back[passing] + 1, -self.size[passing])
        self.gradient_bytes = np.cumsum(change)
        """Bytes of the backward part that are live just before each of its operators."""

    def crossing_bytes(self, place: int, turn: int) -> int:
        crosses = (self.made < place) & ((self.read_last >= place) | (self.read_back < turn))
        return int(self.size[crosses].sum() + self.gradient_bytes[turn])

    def narrow(self) -> list[tuple[int, int]]:
        """Cuts, as a place of the forward part and one of the backward part."""
        forward_bytes = np.zeros(self.places + 1, dtype=np.int64)
        inside = self.made < self.places
        np.add.at(forward_bytes, self.made[inside] + 1, self.size[inside])
        written = np.cumsum(forward_bytes)
        turns = [self._best_turn(place) for place in range(self.places + 1)]
        crossing = [self.crossing_bytes(place, turns[place]) for place in range(self.places + 1)]
        cuts: list[tuple[int, int]] = []
        start = 0
        for place in range(1, self.places):
            narrowest = crossing[place] <= crossing[place - 1] and crossing[place] <= crossing[place + 1]
            enough = written[place] - written[start] >= MIN_INSIDE * crossing[place]
            below = not cuts or turns[place] < cuts[-1][1]
            if narrowest and enough and below and turns[place] > 0:
                cuts.append((place, turns[place]))
                start = place
        return cuts

    def at(self, places: Iterable[int]) -> list[tuple[int, int]]:
        """Cuts at places of the forward part, where the backward part has one for each."""
        cuts: list[tuple[int, int]] = []
        for place in places:
            turn = self._best_turn(place)
            if place > 0 and turn > 0 and (not cuts or turn < cuts[-1][1]):
                cuts.append((place, turn))
        return cuts

    def _best_turn(self, place: int) -> int:
        """The backward place of a cut where the fewest bytes of gradients pass."""
        first = int(self.turn[place])
        last = int(self.turn[place - 1]) if place > 0 else len(self.gradient_bytes) - 2
        return first + int(np.argmin(self.gradient_bytes[first : max(first, last - 1) + 1]))
