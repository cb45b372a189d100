"""One training step of a model in pieces, recorded: which pieces ran, and what the code between them took."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from monetlite.core.graph import Resident, TensorSpec
from monetlite.core.joining import LetGo, OutsideCode
from monetlite.runtime.captured_piece import CapturedPiece, SizedPiece
from monetlite.tracing.sized_graphs import Limits


@dataclass(frozen=True)
class PieceRun:
    """One run of a piece.

    Attributes:
        captured: the piece that ran.
        sizes: of its inputs, as far as they vary.
        least_sizes: that a plan for it has to serve beside these.
        takers: for each input that has a gradient and is not a parameter, by position, the number of the code
            outside that takes the gradient.
        parameters: ids of the leaves among its inputs, by position.
        added: positions of inputs of both kinds that a later run takes, too: autograd adds their gradients.
        gone: sizes of outputs that are gone when the forward pass ends, and how long they are there.
        held_bytes: sizes of outputs that somebody holds when its backward part has ended.
        changed: positions of the inputs that code behind it changes in place.
        outputs_changed: code behind it changes an output in place.
    """

    captured: CapturedPiece
    sizes: Limits
    takers: dict[int, int]
    parameters: Mapping[int, int]
    added: frozenset[int] = frozenset()
    gone: Mapping[int, LetGo] = field(default_factory=dict)
    held_bytes: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    outputs_changed: bool = False
    least_sizes: Limits = ()

    @property
    def piece(self) -> SizedPiece:
        """The piece at the sizes that it is planned for."""
        return self.captured.at(self.planned_sizes)

    @property
    def planned_sizes(self) -> Limits:
        """The sizes that a plan for it has to serve."""
        return tuple(map(max, self.sizes, self.least_sizes or self.sizes))

    @property
    def as_recorded(self) -> SizedPiece:
        """The piece at the sizes that it ran at."""
        return self.captured.at(self.sizes)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The tensors that a step is given.

    Attributes:
        specs: of the inputs.
        size_bytes: of the inputs, without the rest of their storages.
        resident: memory that is in use when it begins.
    """

    specs: Mapping[str, TensorSpec]
    size_bytes: int
    resident: Resident


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A recorded step.

    Attributes:
        given: what it began with.
        runs: in order.
        planned: numbers of the runs that had a backward part; the others are code outside. Empty where the
            backward parts did not run once each, in the order of one step.
        outside: the code before each of those and after the last.
        in_order: False where that is why.
        growth_bytes: most memory of the step until its backward pass ends, beyond what is in use when it begins.
        seconds: its time; 0 where captures took a part of it, and that of the code outside isn't known either.
        repeats: whether backward parts kept what they read for another pass, or ran for a batch of gradients.
    """

    given: Given
    runs: Sequence[PieceRun]
    planned: Sequence[int] = ()
    outside: Sequence[OutsideCode] = ()
    in_order: bool
    growth_bytes: int
    seconds: float = 0.0
    repeats: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.given.resident.total + self.growth_bytes

    def enlarged(self, factor: float) -> "RecordedStep":
        """The same step, to be planned as if its inputs were so many times as large."""

        def more(size: int) -> int:
            return math.ceil(factor * size)

        runs = [replace(run, least_sizes=tuple(map(more, run.planned_sizes))) for run in self.runs]
        outside = [
            replace(
                of,
                kept_bytes=more(of.kept_bytes),
                handed=tuple((more(size), lasts) for size, lasts in of.handed),
                forward_bytes=more(of.forward_bytes),
                backward_bytes=more(of.backward_bytes),
                released_bytes=more(of.released_bytes),
                passed_bytes=more(of.passed_bytes),
                freed_output_bytes=more(of.freed_output_bytes),
                backward_change_bytes=more(of.backward_change_bytes),
            )
            for of in self.outside
        ]
        resident = replace(self.given.resident, inputs=more(self.given.resident.inputs))
        given = replace(self.given, size_bytes=more(self.given.size_bytes), resident=resident)
        return replace(self, runs=runs, outside=outside, given=given)

    def is_like(self, other: "RecordedStep") -> bool:
        """True if the same pieces ran in the same order."""
        pieces = [[run.captured for run in of.runs] for of in (self, other)]
        return pieces[0] == pieces[1] and list(self.planned) == list(other.planned)

    def covering(self, other: "RecordedStep") -> "RecordedStep":
        """The same step, to be planned for the sizes of another one that is like it, too."""
        pairs = zip(self.runs, other.runs, strict=True)
        return replace(self, runs=[replace(own, least_sizes=its.piece.sizes) for own, its in pairs])

    def runs_as(self, other: "RecordedStep") -> bool:
        """True if the same pieces ran in the same order, on inputs of the same sizes."""
        return self.is_like(other) and [run.sizes for run in self.runs] == [run.sizes for run in other.runs]
