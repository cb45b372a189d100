"""Costs of a model's step with all of its layers, from a trace with few.

Layers fall into the first, two periods of equal ones, and the rest. What the second period reads of the first tells
what any period reads of the one before it; what the first reads of the second, of the one behind it. So periods are
put in behind the second. Everything that does not follow this pattern is refused: a model whose last layer reads
every other one is traced whole.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import DELIVERY, Implementation, Operator, Resident, Value
from monetlite.models.equal_layers import EqualLayers
from monetlite.planning.batch_costs import Unlike
from monetlite.profiling.estimate import beside_cublas
from monetlite.tracing.graph_builder import least_delivery
from monetlite.tracing.names import UniqueNames

_OUTSIDE, _FIRST, _ONE, _TWO, _REST = range(5)
"""Groups of operators: of no layer, the first layer, the first and second period, and the layers behind them."""
_NUMBER = re.compile(r"(#\d+)+(?=$|\[)")
Place: TypeAlias = tuple[int, int]
"""An operator or a value of the trace, and the number of its copy; 0 for the original."""


def at_full_depth(profile: Profile, layers: EqualLayers, resident: Resident) -> Profile:
    """A profile of all layers, from one of the first `layers.depth`, whose gradients are handed over one by one.

    The result is that of a trace of the whole model, but without calls: it is for solving.

    Args:
        profile: without an optimizer and accumulation.
        layers: of the model.
        resident: of the whole model.

    Raises:
        Unlike: the layers do not repeat as they should.
    """
    found = _Deepening(profile, layers).profile(resident)
    return beside_cublas(found, profile.graph) if profile.kind is ProfileKind.ESTIMATED else found


class _Deepening:
    """The way from few layers to all."""

    def __init__(self, traced: Profile, layers: EqualLayers) -> None:
        self.traced, self.layers, self.graph = traced, layers, traced.graph
        self.copies = (layers.count - layers.depth) // layers.period
        self.of_layer = re.compile(rf"(^|(?<=\.)){re.escape(layers.path)}\.(\d+)(?=\.|$)")
        operators = self.graph.operators
        self.segments = _segments(operators)
        self.group = [group for segment in self.segments for group in self._groups(segment)]
        self.group_of = {value: self.group[at] for value, at in self.graph.writer.items()}
        self.members = {
            group: [at for at in range(len(operators)) if self.group[at] == group] for group in (_ONE, _TWO)
        }
        written = {
            group: [value for at in members for value in operators[at].writes]
            for group, members in self.members.items()
        }
        self.later = dict(zip(written[_ONE], written[_TWO], strict=False))
        """For each value of the first period, that of the second."""
        self.last_of: dict[int, int] = {}
        """For values of the rest that the second period reads, those of the second that the first one reads."""
        self.first_of: dict[int, int] = {}
        """For values of the first period that the second one reads, what the first one reads of the first layer."""
        if len(written[_ONE]) != len(written[_TWO]) or len(self.members[_ONE]) != len(self.members[_TWO]):
            raise Unlike("layers have other operators")
        for one, two in zip(*self.members.values(), strict=True):
            self._compare(one, two)
        self._refuse_shortcuts()

    def _layer(self, name: str) -> int | None:
        found = self.of_layer.search(name)
        return None if found is None else int(found[2])

    def _groups(self, segment: Sequence[int]) -> Iterator[int]:
        """Groups of a segment's operators. One without a layer belongs to the layer before it."""
        period, group = self.layers.period, _OUTSIDE
        order = []
        for at in segment:
            layer = self._layer(self.graph.operators[at].module)
            if layer is not None:
                group = _FIRST if layer < 1 else min(_REST, _ONE + (layer - 1) // period)
            order.append(group)
        passed = [group for at, group in enumerate(order) if at == 0 or order[at - 1] != group]
        layered = [group for group in passed if group != _OUTSIDE]
        if layered not in (sorted(layered), sorted(layered, reverse=True)):
            raise Unlike("layers do not run one after another")
        return iter(order)

    def _compare(self, one: int, two: int) -> None:
        """Check that two operators do the same, each for its own layer."""
        first, second = self.graph.operators[one], self.graph.operators[two]
        if _facts(first) != _facts(second) or self.traced.costs[one] != self.traced.costs[two]:
            raise Unlike(f"{first.name} and {second.name} are other operators")
        values = self.graph.values
        for value, other in zip(first.writes, second.writes, strict=True):
            if replace(values[value], name="") != replace(values[other], name=""):
                raise Unlike(f"{values[value].name} and {values[other].name} are other tensors")
        for left, right in zip(first.implementations, second.implementations, strict=True):
            for each in ("reads", "writes", "overwrites"):
                mine, others = getattr(left, each), getattr(right, each)
                if len(mine) != len(others) or not self._match(mine, others):
                    raise Unlike(f"{first.name} and {second.name} read and write other things")

    def _match(self, mine: Iterable[int], others: Iterable[int]) -> bool:
        """True if what an operator of the first period touches is what its match touches, a period later.

        Operands come in the order of values, which differs between layers where some are of another layer.
        """
        wanted = set(others)
        left: dict[int, list[int]] = {_FIRST: [], _TWO: []}
        for value in mine:
            match = value if self.group_of[value] == _OUTSIDE else self.later.get(value)
            if match is None and self.group_of[value] in left:
                left[self.group_of[value]].append(value)
            elif match in wanted:
                wanted.remove(match)
            else:
                return False
        for group, known, behind in ((_FIRST, self.first_of, _ONE), (_TWO, self.last_of, _REST)):
            matches = sorted(value for value in wanted if self.group_of[value] == behind)
            if len(matches) != len(left[group]):
                return False
            for pair in zip(sorted(left[group]), matches, strict=True):
                value, match = pair if group == _FIRST else reversed(pair)
                if known.setdefault(value, match) != match:
                    return False
            wanted.difference_update(matches)
        return not wanted

    def _refuse_shortcuts(self) -> None:
        """Refuse what reads past its neighbours."""
        near = {
            _OUTSIDE: {_OUTSIDE, _FIRST, _REST},
            _FIRST: {_OUTSIDE, _FIRST, _ONE},
            _ONE: {_OUTSIDE, _FIRST, _ONE, _TWO},
            _TWO: {_OUTSIDE, _ONE, _TWO, _REST},
            _REST: {_OUTSIDE, _TWO, _REST},
        }
        for at, operator in enumerate(self.graph.operators):
            for item in operator.implementations:
                for value in (*item.reads, *item.overwrites):
                    if self.group_of[value] not in near[self.group[at]]:
                        raise Unlike(f"{operator.name} reads {self.graph.values[value].name}, of another layer")

    def _places(self) -> Iterator[Place]:
        """Operators of the whole step, in order."""
        for segment in self.segments:
            groups = [self.group[at] for at in segment]
            second = [at for at in segment if self.group[at] == _TWO]
            if not second:
                yield from ((at, 0) for at in segment)
                continue
            forwards = _ONE not in groups or groups.index(_ONE) < groups.index(_TWO)
            start, end = segment.index(second[0]), segment.index(second[-1]) + 1
            yield from ((at, 0) for at in segment[:start])
            numbers = range(self.copies + 1)
            for copy in numbers if forwards else reversed(numbers):
                yield from ((at, copy) for at in second)
            yield from ((at, 0) for at in segment[end:])

    def _read(self, at: int, copy: int, value: int) -> Place:
        """The value in the whole step that an operator's copy reads where the trace has `value`."""
        group, of = self.group[at], self.group_of[value]
        if group == _REST and of == _TWO:
            return value, self.copies
        if group != _TWO or of == _OUTSIDE:
            return value, 0
        if of == _TWO:
            return value, copy
        if of == _ONE:
            return (value, 0) if copy == 0 else (self.later[value], copy - 1)
        return (value, 0) if copy == self.copies else (self.last_of[value], copy + 1)

    def _renamed(self, name: str, at: int, copy: int) -> str:
        """A name with the number of the layer that it is of in the whole step, without a number of its own."""
        past = self.copies if self.group[at] == _REST else copy
        return self.of_layer.sub(
            lambda found: (
                f"{self.layers.path}.{int(found[2]) + past * self.layers.period}"
                if int(found[2]) > self.layers.period
                else found[0]
            ),
            name,
        )

    def profile(self, resident: Resident) -> Profile:
        operators, costs, values = [], [], list[Value]()
        index: dict[Place, int] = {}
        names = UniqueNames()
        places = list(self._places())
        for at, copy in places:
            for value in self.graph.operators[at].writes:
                index[value, copy] = len(index)
        for at, copy in places:
            operator = self.graph.operators[at]
            written = [self.graph.values[value] for value in operator.writes]
            bases = [self._renamed(_NUMBER.sub("", item.name), at, copy) for item in written]
            if operator.family == DELIVERY:  # copies of gradients are named first
                bases = [names.reserve(base) for base in bases]
                name = names.reserve(_NUMBER.sub("", operator.name))
            else:
                plain = self._renamed(_NUMBER.sub("", operator.name), at, copy)
                name = names.reserve(plain)
                bases = [name + base[len(plain) :] if base.startswith(plain) else base for base in bases]
            values += [replace(item, name=base) for item, base in zip(written, bases, strict=True)]

            def mapped(group: tuple[int, ...], at: int = at, copy: int = copy) -> tuple[int, ...]:
                found = [index[self._read(at, copy, value)] for value in group]
                return tuple(sorted(found) if list(group) == sorted(group) else found)

            implementations = tuple(
                Implementation(
                    name=item.name,
                    reads=mapped(item.reads),
                    writes=mapped(item.writes),
                    overwrites=mapped(item.overwrites),
                    tolerance=item.tolerance,
                    devices=item.devices,
                )
                for item in operator.implementations
            )
            operators.append(
                replace(
                    operator,
                    name=name,
                    module=self._renamed(operator.module, at, copy),
                    implementations=implementations,
                )
            )
            costs.append(self.traced.costs[at])
        resident = replace(resident, libraries=self.graph.resident.libraries)
        graph = replace(self.graph, operators=tuple(operators), values=tuple(values), resident=resident)
        return _handed_over(replace(self.traced, graph=graph, costs=tuple(costs)))


def _segments(operators: Sequence[Operator]) -> list[list[int]]:
    """Positions of operators: forward, optional, derived, and backward ones."""
    found: dict[Any, list[int]] = {}
    for at, item in enumerate(operators):
        found.setdefault((item.phase, item.optional, item.derived), []).append(at)
    segments = list(found.values())
    if [at for segment in segments for at in segment] != list(range(len(operators))):
        raise Unlike("operators are in another order")
    return segments


def _facts(operator: Operator) -> object:
    ways = [(item.name, item.tolerance, item.devices) for item in operator.implementations]
    return operator.family, operator.phase, operator.optional, operator.rerunnable, operator.derived, ways


def _handed_over(profile: Profile) -> Profile:
    """The same step with its gradients handed over some at a time, as a trace does it."""
    graph = profile.graph
    delivered = {value for item in graph.operators if item.family == DELIVERY for value in _reads(item)}
    least = least_delivery(sum(graph.values[value].size_bytes for value in delivered))
    operators, costs = [], []
    names = UniqueNames()
    waiting: list[Operator] = []

    def hand_over(cost: tuple[Cost, ...], least: int) -> None:
        reads = sorted({value for each in waiting for value in _reads(each)})
        if not waiting or sum(graph.values[value].size_bytes for value in reads) < least:
            return
        writes = tuple(value for each in waiting for value in each.writes)
        way = replace(waiting[0].implementations[0], reads=tuple(reads), writes=writes)
        operators.append(replace(waiting[0], name=names.reserve("deliver"), implementations=(way,)))
        costs.append(cost)
        waiting.clear()

    nothing = (Cost(latency_ms=0.0, workspace_bytes=0),)
    for item, of in zip(graph.operators, profile.costs, strict=True):
        if item.family == DELIVERY:
            waiting.append(item)
            hand_over(of, least)
        else:
            operators.append(item)
            costs.append(of)
    hand_over(nothing, 0)
    return replace(profile, graph=replace(graph, operators=tuple(operators)), costs=tuple(costs))


def _reads(delivery: Operator) -> tuple[int, ...]:
    return delivery.implementations[0].reads
