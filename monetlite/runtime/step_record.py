"""One training step of a model in pieces, recorded: which pieces ran, and what the code between them took."""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from monetlite.core.graph import Resident, TensorSpec
from monetlite.core.joining import OutsideCode
from monetlite.fx.torch_internals.torch_aot import when_backward_ends
from monetlite.fx.torch_internals.torch_dispatch import change_counter, changes_in_place, storage_key, weak_storage
from monetlite.fx.torch_internals.torch_dynamo import seconds_captured
from monetlite.profiling.memory_use import MemoryMark, MemoryRecord
from monetlite.runtime.captured_piece import CapturedPiece, SizedPiece
from monetlite.tracing.sized_graphs import Limits


class _Watched:
    """A tensor that is watched for changes in place, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = change_counter(tensor)
        self._count = changes_in_place(self._counter)

    @property
    def has_changed(self) -> bool:
        return changes_in_place(self._counter) != self._count


_Versions: TypeAlias = dict[int, _Watched]


@dataclass(frozen=True)
class PieceRun:
    """One run of a piece.

    Attributes:
        captured: the piece that ran.
        sizes: of its inputs, as far as they vary.
        least_sizes: that a plan for it has to serve beside these.
        takers: for each input that has a gradient and is not a parameter, by position, the number of the code
            outside that takes the gradient.
        added: positions of those of them whose tensor a later run takes, too: autograd adds their gradients.
        parameters: ids of the leaves among its inputs.
        gone_bytes: sizes of outputs that are gone when the backward pass begins.
        held_bytes: sizes of outputs that somebody holds when its backward part has ended.
        changed: positions of the inputs that code behind it changes in place.
        outputs_changed: code behind it changes an output in place.
    """

    captured: CapturedPiece
    sizes: Limits
    takers: dict[int, int]
    parameters: frozenset[int]
    added: frozenset[int] = frozenset()
    gone_bytes: frozenset[int] = frozenset()
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
        conclusive: True if a backward pass ran, in the order of one step.
        inputs_let_go_bytes: inputs of pieces, made outside, that are gone when the backward pass begins. Another
            plan may read them again.
        growth_bytes: most memory of the step, beyond what is in use when it begins.
        seconds: its time; `capture_seconds` of it went into captures.
    """

    given: Given
    runs: Sequence[PieceRun]
    planned: Sequence[int] = ()
    outside: Sequence[OutsideCode] = ()
    in_order: bool
    conclusive: bool
    growth_bytes: int
    seconds: float = 0.0
    capture_seconds: float = 0.0
    inputs_let_go_bytes: int = 0

    def outside_as_run(self) -> Sequence[OutsideCode]:
        """The code outside by a plan that reads no inputs that are gone in the backward pass, as in this step."""
        last = self.outside[-1]
        released_bytes = last.released_bytes + self.inputs_let_go_bytes
        return [*self.outside[:-1], replace(last, released_bytes=released_bytes)]

    def enlarged(self, factor: float) -> "RecordedStep":
        """The same step, to be planned as if its inputs were so many times as large."""

        def more(size: int) -> int:
            return math.ceil(factor * size)

        runs = [replace(run, least_sizes=tuple(map(more, run.planned_sizes))) for run in self.runs]
        outside = [
            replace(
                of,
                kept_bytes=more(of.kept_bytes),
                forward_bytes=more(of.forward_bytes),
                backward_bytes=more(of.backward_bytes),
                released_bytes=more(of.released_bytes),
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


class StepRecord:
    """A record in the making, from the beginning of a step to the end of its backward pass.

    Where only some of the pieces have had their backward parts by then, it goes on until the next step.

    Args:
        device: `"cpu"` or `"cuda"`.
        parameters: of the model.
        given: what the step begins with.

    Raises:
        RuntimeError: torch's profiler is in use, or another step is recorded.
    """

    def __init__(self, device: str, parameters: Iterable[torch.Tensor], given: Given) -> None:
        self._memory, self._given = MemoryRecord(device), given
        self._captured_before = seconds_captured()
        self._runs: list[PieceRun] = []
        self._uses: dict[tuple[Any, int], list[tuple[int, int]]] = {}
        """The runs that take each tensor, by its autograd node and the output of that, and at which positions."""
        self._nodes: dict[Any, int] = {}
        """The run that each autograd node is of."""
        self._begun: list[int] = []
        """Runs whose backward parts have begun."""
        self._gradients: dict[int, tuple[int | None, int]] = {}
        """For each parameter, by id, the run before whose backward part its gradient came; and its bytes."""
        self._hooks = [
            item.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]  # torch has no types for it
            for item in parameters
            if item.requires_grad and item.is_leaf
        ]
        self._used: list[list[tuple[int, int]]] = []
        self._forward_ended = False
        self._seen: list[tuple[_Versions, _Versions]] = []
        """Inputs and outputs of each run, by position, as they were when it ended."""
        self._outputs: list[list[tuple[Any, int]]] = []
        """Weak references to the storages that each run made for its outputs, and their bytes."""
        self._passed: dict[int, tuple[Any, int]] = {}
        """The same of all inputs of runs, by the storages' keys."""
        self._alive: list[tuple[Any, int]] = []
        """Those of both that were alive when the last part of a piece ended."""
        self._freed_outputs: dict[int, int] = {}
        """Bytes of each run's outputs that go in the code between the backward parts after it and its own."""
        self._let_go_bytes = self._inputs_let_go_bytes = 0
        """Bytes of those that were not when the first backward part began; and of those that no piece made."""
        self._memory.mark("step")

    def _note(self, parameter: torch.Tensor) -> None:
        self._gradients[id(parameter)] = (self._begun[-1] if self._begun else None), parameter.nbytes

    def run_begins(self, piece: CapturedPiece, arguments: Sequence[Any]) -> None:
        tensors = [
            (at, item) for at, item in enumerate(arguments) if isinstance(item, torch.Tensor) and item.requires_grad
        ]
        before = len(self._runs) - 1
        takers = {at: self._nodes.get(item.grad_fn, before) + 1 for at, item in tensors if not item.is_leaf}
        leaves = frozenset(id(item) for _, item in tensors if item.is_leaf)
        for at in takers:
            node = (arguments[at].grad_fn, arguments[at].output_nr)
            self._uses.setdefault(node, []).append((len(self._runs), at))
        self._memory.mark(f"forward {len(self._runs)}")
        self._runs.append(PieceRun(piece, piece.sizes(arguments), takers, leaves))

    def run_ends(self, arguments: Iterable[Any], outputs: Iterable[Any]) -> None:
        """Note the end of a forward part, which may have changed its arguments."""
        number = len(self._runs) - 1
        for item in (*arguments, *outputs):
            node = item.grad_fn if isinstance(item, torch.Tensor) else None
            if node is not None:
                self._nodes.setdefault(node, number)
        self._seen.append((_versions(arguments), _versions(outputs)))
        given, made = _storages(arguments), _storages(outputs)
        self._outputs.append([made[key] for key in made.keys() - given.keys()])
        self._passed |= given
        self._note_what_is_alive()
        self._memory.mark(f"forward {number} ends")

    def backward(self, piece: CapturedPiece, ends: bool) -> None:
        """Note that a backward part of a captured piece begins, that of its last run without one; or that it ends.

        Gradients that the forward pass itself asks for are part of it.
        """
        if not self._forward_ended:
            return
        runs = [number for number, run in enumerate(self._runs) if run.captured is piece]
        if ends:
            begun = [number for number in self._begun if number in runs]
            if begun:
                number = begun[-1]
                held = frozenset(size for storage, size in self._outputs[number] if not storage.expired())
                self._runs[number] = replace(self._runs[number], held_bytes=held)
                self._note_what_is_alive()
                self._memory.mark(f"backward {number} ends")
            return
        waiting = [number for number in runs if number not in self._begun]
        if waiting:
            if not self._begun:
                when_backward_ends(self._backward_ended)
            self._note_what_is_gone(waiting[-1])
            self._begun.append(waiting[-1])
            self._memory.mark(f"backward {waiting[-1]}")

    def _backward_ended(self) -> None:
        if len(self._begun) == len(self._runs):
            self._memory.mark("end", last=True)

    def _note_what_is_alive(self) -> None:
        passed = itertools.chain(self._passed.values(), *self._outputs)
        self._alive = [item for item in dict(passed).items() if not item[0].expired()]

    def _note_what_is_gone(self, number: int) -> None:
        """Note what is gone when the backward part of a run begins."""
        gone = {storage: size for storage, size in self._alive if storage.expired()}
        self._freed_outputs[number] = sum(size for storage, size in self._outputs[number] if storage in gone)
        if self._begun:
            return
        made = {storage for of in self._outputs for storage, _ in of}
        self._let_go_bytes = sum(gone.values())
        self._inputs_let_go_bytes = sum(size for storage, size in gone.items() if storage not in made)
        for run, of in enumerate(self._outputs):
            others = {size for storage, size in of if storage not in gone}
            sizes = frozenset(size for storage, size in of if storage in gone) - others
            self._runs[run] = replace(self._runs[run], gone_bytes=sizes)

    def forward_ends(self) -> None:
        """Note the end of the forward pass, with what the code between pieces has changed in place."""
        self._forward_ended = True
        for number, seen in enumerate(self._seen):
            arguments, outputs = ([at for at, item in of.items() if item.has_changed] for of in seen)
            self._runs[number] = replace(
                self._runs[number], changed=frozenset(arguments), outputs_changed=bool(outputs)
            )
        self._seen = []
        self._used = list(self._uses.values())
        self._uses = {}
        self._nodes = {}  # which would keep the step's activations alive if its backward pass never came

    def end(self) -> RecordedStep | None:
        """The recorded step; None if it was disturbed, or had ended."""
        self._memory.mark("end", last=True)
        found = self._memory.end()
        for hook in self._hooks:
            hook.remove()
        if not found:
            return None
        growth_bytes = max(mark.peak_bytes for mark in found) - found[0].live_bytes
        marks = {mark.name: (at, mark) for at, mark in enumerate(found[:-1])}
        planned = sorted(self._begun)
        in_order = self._begun == planned[::-1]
        conclusive = in_order and bool(self._gradients)
        if not planned or not in_order:
            return RecordedStep(
                given=self._given,
                runs=self._runs,
                in_order=in_order,
                conclusive=conclusive,
                growth_bytes=growth_bytes,
            )
        count = len(planned)
        read = frozenset[int]().union(*(run.parameters for run in self._runs))
        gradient_bytes = [0] * (count + 1)
        for parameter, (before, size_bytes) in self._gradients.items():
            if parameter not in read:
                gradient_bytes[count if before is None else planned.index(before)] += size_bytes
        outside = []
        for number, (before, behind) in enumerate(itertools.pairwise([None, *planned, None])):
            begin = "step" if before is None else f"forward {before} ends"
            released_bytes = 0
            if behind is None:
                forward, kept_bytes = RecordedStretch(), 0
                backward = _stretch(found, marks, begin, f"backward {before}")
                released_bytes = max(0, -backward.change_bytes - self._let_go_bytes)
            else:
                forward = _stretch(found, marks, begin, f"forward {behind}")
                kept_bytes = max(0, forward.change_bytes)
                backward = _stretch(found, marks, f"backward {behind} ends", f"backward {before}")
            outside.append(
                OutsideCode(
                    kept_bytes=kept_bytes,
                    forward_bytes=forward.growth_bytes,
                    backward_bytes=backward.growth_bytes,
                    gradient_bytes=gradient_bytes[number],
                    released_bytes=released_bytes,
                    freed_output_bytes=0 if before is None else self._freed_outputs.get(before, 0),
                    backward_change_bytes=backward.change_bytes,
                    forward_ms=1e3 * forward.seconds,
                    backward_ms=1e3 * backward.seconds,
                )
            )
        seconds = found[-2].seconds - found[0].seconds
        added: dict[int, set[int]] = {}
        for uses in self._used:
            differentiated = [use for use in uses if use[0] in planned]
            for run, at in differentiated:
                if run != differentiated[-1][0]:
                    added.setdefault(run, set()).add(at)
        runs = [
            replace(
                run,
                takers={at: bisect.bisect_left(planned, taker) for at, taker in run.takers.items()},
                added=frozenset(added.get(number, ())),
            )
            for number, run in enumerate(self._runs)
        ]
        return RecordedStep(
            given=self._given,
            runs=runs,
            planned=planned,
            outside=outside,
            in_order=in_order,
            conclusive=conclusive,
            growth_bytes=growth_bytes,
            seconds=seconds,
            capture_seconds=seconds_captured() - self._captured_before,
            inputs_let_go_bytes=self._inputs_let_go_bytes,
        )


@dataclass(frozen=True)
class RecordedStretch:
    """Memory and time between two marks: how much is in use in the end, at most, beyond the beginning."""

    change_bytes: int = 0
    growth_bytes: int = 0
    seconds: float = 0.0


def _storages(tensors: Iterable[Any]) -> dict[int, tuple[Any, int]]:
    """Weak references to the storages of tensors, and their bytes, by key."""
    found = [item for item in tensors if isinstance(item, torch.Tensor)]
    return {storage_key(item): (weak_storage(item), item.untyped_storage().nbytes()) for item in found}


def _versions(tensors: Iterable[Any]) -> _Versions:
    return {at: _Watched(item) for at, item in enumerate(tensors) if isinstance(item, torch.Tensor)}


def _stretch(
    found: Sequence[MemoryMark], marks: dict[str, tuple[int, MemoryMark]], begin: str, end: str
) -> RecordedStretch:
    if begin not in marks or end not in marks:
        return RecordedStretch()
    (first, start), (last, stop) = marks[begin], marks[end]
    peak_bytes = max((mark.peak_bytes for mark in found[first + 1 : last + 1]), default=start.live_bytes)
    return RecordedStretch(
        change_bytes=stop.live_bytes - start.live_bytes,
        growth_bytes=max(0, peak_bytes - start.live_bytes),
        seconds=max(0.0, stop.seconds - start.seconds),
    )
