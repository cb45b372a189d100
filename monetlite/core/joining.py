"""Several captured graphs as one training step, with the code that runs between them.

A model that TorchDynamo takes apart is captured in pieces. What lies outside of them runs as in plain training.

    forward:   outside 0, piece 0, outside 1, piece 1, ..., piece n-1, outside n
    backward:  outside n, piece n-1, ..., outside 1, piece 0, outside 0

Each piece has its own autograd node. So its operators are re-run in its own backward part only, and a tensor that
it hands on stays in memory until the code behind it has been through its backward part.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import (
    DELIVERY,
    LOSS,
    OUTSIDE,
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    Resident,
    TensorSpec,
    Value,
    ValueKind,
)
from monetlite.core.steps import Step, border


@dataclass(frozen=True, kw_only=True)
class LetGo:
    """The lifetime of a tensor that is gone when the forward pass ends.

    Attributes:
        until: number of the code outside that lets it go.
        takers: pieces that take it, each with the name of that input. A plan may have them read it again.
    """

    until: int
    takers: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class OutsideCode:
    """Measurements of code that runs as in plain training, before a piece or after the last.

    Attributes:
        kept_bytes: memory that it holds from its forward to its backward part.
        handed: tensors beside these that it makes for pieces, in bytes, and how long each is there.
        forward_bytes, backward_bytes: most memory of each part, beyond what is in use when it begins.
        gradient_bytes: gradients of parameters that its backward part makes.
        released_bytes: memory kept by earlier code outside that it lets go in its forward part; that of the last
            code is until the forward pass ends.
        passed_bytes: part of `kept_bytes` that goes in the backward part of the piece behind it, as its input.
        freed_output_bytes: outputs of the piece before it that go in its backward part.
        backward_change_bytes: memory in use after its backward part, less that before.
        forward_ms, backward_ms: time of each part.
    """

    kept_bytes: int = 0
    handed: tuple[tuple[int, LetGo], ...] = ()
    forward_bytes: int = 0
    backward_bytes: int = 0
    gradient_bytes: int = 0
    released_bytes: int = 0
    passed_bytes: int = 0
    freed_output_bytes: int = 0
    backward_change_bytes: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One run of a captured graph in a step.

    Attributes:
        profile: of its graph.
        handed_back: gradients of its inputs that are no parameters, and for each the number of the code outside
            that takes it.
        added: gradients beside these, of parameters, too, that autograd adds, right after the piece, to a later
            piece's of the same tensor.
        held: outputs that somebody holds when the backward part has ended, as the caller does.
        gone: outputs that are gone when the forward pass ends, where no plan reads them.
        once: operators that read what code outside changes later, so that they can't be run again.
        avoided: (operator, name) of implementations that read such a value in the backward part.
    """

    profile: Profile
    handed_back: Mapping[int, int]
    added: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    gone: Mapping[int, LetGo] = field(default_factory=dict)
    once: frozenset[int] = frozenset()
    avoided: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class JoinedStep:
    """A step of several pieces as one profile.

    `origin` has the piece of each operator and its index there; nothing for code outside.
    """

    profile: Profile
    pieces: int
    origin: Mapping[int, tuple[int, int]]

    def in_order(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The order in which pieces run the steps of a schedule, each in its own parts.

        Where a schedule has an operator of a piece in the backward part of another, it runs at the beginning of the
        piece's own backward part if it is run again, and else at the end of its forward part. What one reads there
        is not overwritten before.
        """
        graph, turn = self.profile.graph, border(self.profile.graph, steps)
        early: defaultdict[int | None, list[Step]] = defaultdict(list)
        late: defaultdict[int | None, list[Step]] = defaultdict(list)
        begun: set[int] = set()
        ran = {index for index, _ in steps[:turn]}
        kept: list[Step] = []
        for at, step in enumerate(steps):
            piece = self._piece(step)
            if piece is not None and graph.operators[step[0]].family == LOSS:
                begun.add(piece)
            if at < turn or piece is None or piece in begun:
                kept.append(step)
            else:
                (late if step[0] in ran else early)[piece].append(step)
                ran.add(step[0])
        ends = {self._piece(step): at for at, step in enumerate(kept[:turn])}
        ordered: list[Step] = []
        for at, step in enumerate(kept):
            piece = self._piece(step)
            ordered.append(step)
            if at == ends.get(piece):
                ordered += early[piece]
            if piece is not None and graph.operators[step[0]].family == LOSS:
                ordered += late[piece]
        return _sparing(graph, ordered)

    def split(self, steps: Sequence[Step]) -> list[tuple[Step, ...]]:
        """The steps of each piece, of steps that are `in_order`."""
        parts: list[list[Step]] = [[] for _ in range(self.pieces)]
        for index, choice in steps:
            if index in self.origin:
                piece, own = self.origin[index]
                parts[piece].append((own, choice))
        return [tuple(part) for part in parts]

    def _piece(self, step: Step) -> int | None:
        return self.origin[step[0]][0] if step[0] in self.origin else None


def join(
    name: str,
    pieces: Sequence[Piece],
    outside: Sequence[OutsideCode],
    *,
    resident: Resident,
    inputs: Mapping[str, TensorSpec],
    keeps_gradients: bool = False,
) -> JoinedStep:
    """Join pieces, in the order of their forward parts, to one step.

    Args:
        name: of the model.
        pieces: at least one.
        outside: of the code before each piece, and after the last.
        resident, inputs: of the whole step.
        keeps_gradients: autograd keeps gradients of a piece's outputs until its backward part ends, if that is one
            autograd node.
    """
    return _Joiner(pieces, outside, keeps_gradients).joined(name, resident, inputs)


class _Joiner:
    """The operators, costs and values of a joined step in the making."""

    def __init__(self, pieces: Sequence[Piece], outside: Sequence[OutsideCode], keeps_gradients: bool) -> None:
        self.pieces, self.outside, self.keeps_gradients = pieces, outside, keeps_gradients
        self.operators: list[Operator] = []
        self.costs: list[tuple[Cost, ...]] = []
        self.origin: dict[int, tuple[int, int]] = {}
        self.values: list[Value] = []
        self.first: list[int] = []
        """Position of each piece's values among all."""
        for number, piece in enumerate(pieces):
            self.first.append(len(self.values))
            for index, value in enumerate(piece.profile.graph.values):
                kind = value.kind
                if kind is ValueKind.TANGENT or index in piece.added.union(piece.handed_back):
                    kind = ValueKind.GRADIENT
                elif kind is ValueKind.OUTPUT and index not in piece.held:
                    kind = ValueKind.ACTIVATION
                self.values.append(replace(value, name=_named(number, value.name), kind=kind))
        self.passed = [
            self._value(f"outside {number}: passed on", of.passed_bytes, ValueKind.ACTIVATION)
            for number, of in enumerate(outside)
        ]
        self.let_go: list[list[int]] = [[] for _ in outside]
        """Values that go in the forward part of the code outside."""
        self.released: list[list[int]] = [[] for _ in outside]
        """Those of them that earlier code outside makes, by that."""
        kept_bytes = [of.kept_bytes - of.passed_bytes for of in outside]
        for number, of in enumerate(outside):
            for earlier, size in _latest(kept_bytes[:number], of.released_bytes):
                kept_bytes[earlier] -= size
                until = self._value(f"outside {earlier}: until outside {number}", size, ValueKind.ACTIVATION)
                self.released[earlier].append(until)
                self.let_go[number].append(until)
        self.kept = [
            self._value(f"outside {number}: kept", size, ValueKind.ACTIVATION)
            for number, size in enumerate(kept_bytes)
        ]
        self.handed = [
            [self._value(f"outside {number}: handed on", size, ValueKind.ACTIVATION) for size, _ in of.handed]
            for number, of in enumerate(outside)
        ]
        self.taken: dict[tuple[int, str], int] = {}
        """Values that pieces take, by the pieces and the names of their inputs."""
        self.gone: list[set[int]] = [set() for _ in pieces]
        for made, of in zip(self.handed, outside, strict=True):
            for tensor, (_, lasts) in zip(made, of.handed, strict=True):
                self._lasts(tensor, lasts)
        for number, piece in enumerate(pieces[:-1]):  # the output of the last piece is for the loss
            for own, lasts in piece.gone.items():
                self.gone[number].add(own + self.first[number])
                self._lasts(own + self.first[number], lasts)
        self.gradients = [
            self._value(f"outside {number}: gradients of weights", of.gradient_bytes, ValueKind.PARAM_GRAD)
            for number, of in enumerate(outside)
        ]
        self.left: list[int] = []
        """Gradients that backward parts outside leave for an earlier piece, and that none has taken yet."""

    def joined(self, name: str, resident: Resident, inputs: Mapping[str, TensorSpec]) -> JoinedStep:
        for number, of in enumerate(self.outside):
            made_bytes = of.kept_bytes + self._size(self.handed[number])
            workspace_bytes = max(0, of.forward_bytes - made_bytes)
            cost = Cost(latency_ms=of.forward_ms, workspace_bytes=workspace_bytes)
            reads = tuple(self.let_go[number])
            writes = (self.kept[number], self.passed[number], *self.released[number], *self.handed[number])
            self._add_outside(f"outside {number}", cost, Phase.FORWARD, reads, writes)
            if number < len(self.pieces):
                self._add(number, Phase.FORWARD)
        for number in reversed(range(len(self.pieces))):
            self._add(number, Phase.BACKWARD)
        first = self.outside[0]
        workspace_bytes = max(0, first.backward_bytes - first.gradient_bytes)
        cost = Cost(latency_ms=first.backward_ms, workspace_bytes=workspace_bytes)
        reads = (self.kept[0], *self._given_back(0), *self.left)
        self._add_outside("outside 0, backward", cost, Phase.BACKWARD, reads, (self.gradients[0],))
        first_piece = self.pieces[0].profile
        graph = OperatorGraph(
            name=name,
            operators=tuple(self.operators),
            values=tuple(self.values),
            resident=resident,
            inputs=inputs,
            device=first_piece.graph.device,
            autocast=first_piece.graph.autocast,
        )
        profile = replace(first_piece, graph=graph, costs=tuple(self.costs))
        return JoinedStep(profile=profile, pieces=len(self.pieces), origin=self.origin)

    def _lasts(self, value: int, lasts: LetGo) -> None:
        self.let_go[lasts.until].append(value)
        self.taken.update(dict.fromkeys(lasts.takers, value))

    def _value(self, name: str, size_bytes: int, kind: ValueKind) -> int:
        self.values.append(Value(name=name, kind=kind, size_bytes=size_bytes))
        return len(self.values) - 1

    def _add_outside(
        self, name: str, cost: Cost, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]
    ) -> None:
        ways = (Implementation(name="default", reads=tuple(sorted(reads)), writes=writes),)
        self.operators.append(
            Operator(name=name, family=OUTSIDE, phase=phase, implementations=ways, rerunnable=False)
        )
        self.costs.append((cost,))

    def _add(self, number: int, phase: Phase) -> None:
        """Add one part of a piece; the code behind it stands where its loss does."""
        profile = self.pieces[number].profile
        graph = profile.graph
        deliveries = sum(operator.family == DELIVERY for operator in graph.operators)
        tangents = [index for index, value in enumerate(graph.values) if value.kind is ValueKind.TANGENT]
        handed_on = {index for index, value in enumerate(graph.values) if value.kind is ValueKind.OUTPUT}
        for index, (operator, costs) in enumerate(zip(graph.operators, profile.costs, strict=True)):
            if operator.phase is not phase:
                continue
            default = operator.implementations[0]
            ways = tuple(self._moved(number, item, default) for item in operator.implementations)
            once = index in self.pieces[number].once or not handed_on.isdisjoint(operator.writes)
            if operator.family == LOSS:
                way, cost = self._behind(number, ways[0])
                ways, costs = (way,), (cost,)
            elif index == len(graph.operators) - 1:
                held = {self.passed[number]}
                if deliveries < 2 and self.keeps_gradients:  # the first of a chain of nodes returns at once
                    held.update(value + self.first[number] for value in tangents)
                ways = tuple(replace(item, reads=tuple(sorted(held.union(item.reads)))) for item in ways)
            self.origin[len(self.operators)] = number, index
            self.operators.append(
                replace(
                    operator,
                    name=_named(number, operator.name),
                    implementations=ways,
                    rerunnable=operator.rerunnable and not once,
                )
            )
            avoided = self.pieces[number].avoided
            self.costs.append(
                tuple(
                    _AVOIDED if (index, item.name) in avoided else cost
                    for item, cost in zip(ways, costs, strict=True)
                )
            )

    def _behind(self, number: int, loss: Implementation) -> tuple[Implementation, Cost]:
        """The backward part of the code behind a piece: it takes gradients of the pieces after it."""
        given_back = self._given_back(number + 1)
        room_bytes = self._size(loss.writes)
        overwrites = []
        for value in given_back:  # autograd hands them on, mostly
            if self.values[value].size_bytes <= room_bytes:
                room_bytes -= self.values[value].size_bytes
                overwrites.append(value)
        of, kept = self.outside[number + 1], self.kept[number + 1]
        outputs = set(loss.reads) - self.gone[number]
        freed_bytes = of.freed_output_bytes + self._size([kept, *given_back])
        if number < len(self.pieces) - 1:  # gradients of the next piece go once they are added to others
            freed_bytes += self._size(value + self.first[number + 1] for value in self.pieces[number + 1].added)
        new_bytes = of.gradient_bytes + self._size(loss.writes)
        left_bytes = of.backward_change_bytes + freed_bytes - new_bytes
        taken = []
        for value in self.left:
            if left_bytes < 0 < self.values[value].size_bytes:
                left_bytes += self.values[value].size_bytes
                taken.append(value)
        if taken and left_bytes > 0:  # a part of the last one stays
            overwrites.append(taken[-1])
        self.left = [value for value in self.left if value not in taken]
        self.left.append(self._value(f"outside {number + 1}: left", max(0, left_bytes), ValueKind.GRADIENT))
        way = replace(
            loss,
            reads=tuple(sorted({*outputs, *given_back, *taken, kept})),
            writes=(*loss.writes, self.gradients[number + 1], self.left[-1]),
            overwrites=tuple(overwrites),
        )
        workspace_bytes = max(0, of.backward_bytes - self._size(way.writes) + self._size(way.overwrites))
        return way, Cost(latency_ms=of.backward_ms, workspace_bytes=workspace_bytes)

    def _size(self, values: Iterable[int]) -> int:
        return sum(self.values[value].size_bytes for value in values)

    def _given_back(self, outside: int) -> list[int]:
        """Gradients that code outside takes of the pieces behind it."""
        return [
            value + self.first[number]
            for number, piece in enumerate(self.pieces)
            for value, to in piece.handed_back.items()
            if to == outside
        ]

    def _moved(self, number: int, item: Implementation, default: Implementation) -> Implementation:
        by = self.first[number]
        call = item.call or default.call
        taken = () if call is None else (self.taken.get((number, ref.node)) for ref in call.tensors())
        return replace(
            item,
            reads=tuple(
                sorted({value + by for value in item.reads}.union(value for value in taken if value is not None))
            ),
            writes=tuple(value + by for value in item.writes),
            overwrites=tuple(value + by for value in item.overwrites),
            guard=None,
            call=None,
            again=None,
        )


def _sparing(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps, with the default implementation where another overwrites what a later step reads."""
    needed: set[int] = set()
    spared: list[Step] = []
    for index, choice in reversed(steps):
        if index >= len(graph.operators):  # added behind the step, as an optimizer's
            spared.append((index, choice))
            continue
        ways = graph.operators[index].implementations
        taken = 0 if not needed.isdisjoint(ways[choice].overwrites) else choice
        needed.difference_update(ways[taken].writes)
        needed.update(ways[taken].reads)
        spared.append((index, taken))
    return tuple(reversed(spared))


def _latest(sizes: Sequence[int], total: int) -> Iterator[tuple[int, int]]:
    """Positions and parts of sizes that are a total together, the last ones first."""
    for at, size in reversed(list(enumerate(sizes))):
        if part := min(size, total):
            yield at, part
        total -= part


_AVOIDED = Cost(latency_ms=1e9, workspace_bytes=0)
"""Cost of an implementation that no schedule should have."""


def _named(number: int, name: str) -> str:
    return f"piece{number + 1}.{name}"
