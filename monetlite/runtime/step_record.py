"""The recording of a training step of a model in pieces (`monetlite.runtime.recorded_step`)."""

import bisect
import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from monetlite.core.joining import LetGo, OutsideCode
from monetlite.fx.torch_internals.torch_aot import may_come_again, when_backward_ends
from monetlite.fx.torch_internals.torch_dispatch import in_batches, watched, weak_storage
from monetlite.fx.torch_internals.torch_dynamo import seconds_captured
from monetlite.profiling.memory_records import MemoryMark, MemoryRecord
from monetlite.runtime.captured_piece import CapturedPiece
from monetlite.runtime.recorded_step import Given, PieceRun, RecordedStep

_LEAF = -1
_FORWARD_ENDS, _BACKWARD_ENDS = "forward pass ends", "backward pass ends"


_Watched: TypeAlias = dict[int, Callable[[], bool]]
"""Functions that tell whether tensors have been changed in place, by the tensors' positions."""


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
        self._serials = itertools.count()
        self._uses: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """The runs that take each tensor, by its autograd node and the output of that, and at which positions.

        That of a leaf is `_LEAF`, and its output the leaf's id.
        """
        self._nodes: dict[int, int] = {}
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
        self._forward_ended = self._in_backward = self._repeats = False
        self._seen: list[tuple[_Watched, _Watched]] = []
        """Inputs and outputs of each run, by position, as they were when it ended."""
        self._made: list[dict[Any, int]] = []
        """Weak references to the storages that each run made for its outputs, and their bytes."""
        self._takers: dict[Any, list[tuple[int, int]]] = {}
        """The runs that take each storage, and at which positions."""
        self._first: dict[Any, int] = {}
        """The run that takes or makes each storage first."""
        self._alive: dict[Any, int] = {}
        """Storages of both that were alive when the last part of a piece began or ended, and their bytes."""
        self._gone: dict[int, dict[Any, int]] = {}
        """Those that went before the forward part of each run; by the number of all, before the pass ends."""
        self._gone_backward: dict[int, dict[Any, int]] = {}
        """Those that went in the backward part of each run."""
        self._freed_outputs: dict[int, int] = {}
        """Bytes of each run's outputs that go in the code between the backward parts after it and its own."""
        self._memory.mark("step")

    def _note(self, parameter: torch.Tensor) -> None:
        self._backward_goes_on()
        self._gradients[id(parameter)] = (self._begun[-1] if self._begun else None), parameter.nbytes

    def _serial(self, node: Any) -> int:
        """A number of an autograd node that does not keep it alive, and with it what it saves."""
        serial: int = node.metadata.setdefault(self._serials, next(self._serials))
        return serial

    def run_begins(self, piece: CapturedPiece, arguments: Sequence[Any]) -> None:
        tensors = [
            (at, item) for at, item in enumerate(arguments) if isinstance(item, torch.Tensor) and item.requires_grad
        ]
        before = len(self._runs) - 1
        nodes = {at: self._serial(item.grad_fn) for at, item in tensors if not item.is_leaf}
        takers = {at: self._nodes.get(node, before) + 1 for at, node in nodes.items()}
        leaves = {at: id(item) for at, item in tensors if item.is_leaf}
        for at, node in nodes.items():
            self._uses.setdefault((node, arguments[at].output_nr), []).append((len(self._runs), at))
        for at, leaf in leaves.items():
            self._uses.setdefault((_LEAF, leaf), []).append((len(self._runs), at))
        if not self._forward_ended:
            self._gone[len(self._runs)] = self._let_go_since()
        self._memory.mark(f"forward {len(self._runs)}")
        self._runs.append(PieceRun(piece, piece.sizes(arguments), takers, leaves))

    def run_ends(self, arguments: Sequence[Any], outputs: Iterable[Any]) -> None:
        """Note the end of a forward part, which may have changed its arguments."""
        number = len(self._runs) - 1
        for item in (*arguments, *outputs):
            node = item.grad_fn if isinstance(item, torch.Tensor) else None
            if node is not None:
                self._nodes.setdefault(self._serial(node), number)
        self._seen.append((_watched(arguments), _watched(outputs)))
        given, made = _storages(arguments), _storages(outputs)
        self._made.append({storage: size for storage, size in made.items() if storage not in given})
        for at, item in enumerate(arguments):
            if isinstance(item, torch.Tensor):
                self._takers.setdefault(weak_storage(item), []).append((number, at))
        for storage in (*given, *made):
            self._first.setdefault(storage, number)
        self._alive = _present(self._alive | given | made)
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
                held = frozenset(_present(self._made[number]).values())
                self._runs[number] = replace(self._runs[number], held_bytes=held)
                self._gone_backward[number] = self._let_go_since()
                self._memory.mark(f"backward {number} ends")
            return
        self._repeats |= may_come_again() or in_batches()
        waiting = [number for number in runs if number not in self._begun]
        if waiting:
            self._backward_goes_on()
            gone = self._let_go_since()
            self._freed_outputs[waiting[-1]] = sum(gone.get(storage, 0) for storage in self._made[waiting[-1]])
            self._begun.append(waiting[-1])
            self._memory.mark(f"backward {waiting[-1]}")

    def _backward_goes_on(self) -> None:
        if not self._in_backward:
            self._in_backward = True
            when_backward_ends(self._backward_ended)  # unless an exception ends it

    def _backward_ended(self) -> None:
        self._in_backward = False
        if self._begun:
            self._memory.mark(_BACKWARD_ENDS, last=len(self._begun) == len(self._runs))

    def _has_captured(self) -> bool:
        return seconds_captured() > self._captured_before

    def _let_go_since(self) -> dict[Any, int]:
        """The storages that have gone since the last part of a piece began or ended, and their bytes."""
        before, self._alive = self._alive, _present(self._alive)
        return {storage: size for storage, size in before.items() if storage not in self._alive}

    def forward_ends(self) -> None:
        """Note the end of the forward pass, with what the code between pieces has changed in place."""
        if self._has_captured():
            gc.collect()  # frames that TorchDynamo leaves behind hold tensors that other steps let go
        self._forward_ended = True
        self._gone[len(self._runs)] = self._let_go_since()
        self._memory.mark(_FORWARD_ENDS)
        for number, seen in enumerate(self._seen):
            arguments, outputs = ([at for at, changed in of.items() if changed()] for of in seen)
            self._runs[number] = replace(
                self._runs[number], changed=frozenset(arguments), outputs_changed=bool(outputs)
            )
        self._seen = []

    def end(self) -> RecordedStep | None:
        """The recorded step; None if it was disturbed, had ended, or had no backward pass that ended."""
        self._memory.mark("end", last=True)
        found = self._memory.end()
        for hook in self._hooks:
            hook.remove()
        if not found or self._in_backward or not (self._begun or self._gradients):
            return None
        marks = {mark.name: (at, mark) for at, mark in enumerate(found)}
        until, ended = marks.get(_BACKWARD_ENDS, (len(found) - 1, found[-1]))
        growth_bytes = max(mark.peak_bytes for mark in found[: until + 1]) - found[0].live_bytes
        planned = sorted(self._begun)
        in_order = self._begun == planned[::-1]
        step = RecordedStep(
            given=self._given,
            runs=self._runs,
            in_order=in_order,
            growth_bytes=growth_bytes,
            repeats=self._repeats,
        )
        if not planned or not in_order:
            return step
        let_go = self._let_go(planned)
        added: dict[int, set[int]] = {}
        for uses in self._uses.values():
            differentiated = [use for use in uses if use[0] in planned]
            for run, at in differentiated:
                if run != differentiated[-1][0]:
                    added.setdefault(run, set()).add(at)
        runs = [
            replace(
                run,
                takers={at: bisect.bisect_left(planned, taker) for at, taker in run.takers.items()},
                added=frozenset(added.get(number, ())),
                gone=self._gone_outputs(number, let_go),
            )
            for number, run in enumerate(self._runs)
        ]
        return replace(
            step,
            runs=runs,
            planned=planned,
            outside=self._outside(planned, let_go, found, marks),
            seconds=0.0 if self._has_captured() else ended.seconds - found[0].seconds,
        )

    def _outside(
        self,
        planned: Sequence[int],
        let_go: Mapping[Any, tuple[int, LetGo]],
        found: Sequence[MemoryMark],
        marks: Mapping[str, tuple[int, MemoryMark]],
    ) -> list[OutsideCode]:
        """The code before each planned run, and after the last."""
        count = len(planned)
        read = frozenset[int]().union(*(run.parameters.values() for run in self._runs))
        gradient_bytes = [0] * (count + 1)
        for parameter, (before, size_bytes) in self._gradients.items():
            if parameter not in read:
                gradient_bytes[count if before is None else planned.index(before)] += size_bytes
        made = {storage for run in planned for storage in self._made[run]}
        handed: list[list[tuple[int, LetGo]]] = [[] for _ in range(count + 1)]
        for storage, (size, lasts) in let_go.items():
            if storage not in made and lasts.takers:
                handed[bisect.bisect_left(planned, self._first[storage])].append((size, lasts))
        let_go_bytes = [
            sum(
                size
                for storage, (size, lasts) in let_go.items()
                if lasts.until == number and (storage in made or lasts.takers)
            )
            for number in range(count + 1)
        ]
        outside = []
        for number, (before, behind) in enumerate(itertools.pairwise([None, *planned, None])):
            begin = "step" if before is None else f"forward {before} ends"
            forward = _stretch(found, marks, begin, _FORWARD_ENDS if behind is None else f"forward {behind}")
            begin = _FORWARD_ENDS if behind is None else f"backward {behind} ends"
            backward = _stretch(found, marks, begin, _BACKWARD_ENDS if before is None else f"backward {before}")
            change_bytes = forward.change_bytes + let_go_bytes[number] - sum(size for size, _ in handed[number])
            kept_bytes = max(0, change_bytes)
            passed_bytes = sum(
                size
                for storage, size in ({} if behind is None else self._gone_backward.get(behind, {})).items()
                if storage not in made and (before is None or self._first[storage] > before)
            )
            outside.append(
                OutsideCode(
                    kept_bytes=kept_bytes,
                    handed=tuple(handed[number]),
                    forward_bytes=forward.growth_bytes,
                    backward_bytes=backward.growth_bytes,
                    gradient_bytes=gradient_bytes[number],
                    released_bytes=max(0, -change_bytes),
                    passed_bytes=min(passed_bytes, kept_bytes),
                    freed_output_bytes=0 if before is None else self._freed_outputs.get(before, 0),
                    backward_change_bytes=backward.change_bytes,
                    # TorchDynamo takes more time between the pieces than it counts.
                    forward_ms=0.0 if self._has_captured() else 1e3 * forward.seconds,
                    backward_ms=1e3 * backward.seconds,
                )
            )
        return outside

    def _let_go(self, planned: Sequence[int]) -> dict[Any, tuple[int, LetGo]]:
        """The storages that are gone when the forward pass ends, their bytes, and how long they are there."""
        found = {}
        for before, storages in self._gone.items():
            for storage, size in storages.items():
                takers = tuple(
                    (planned.index(run), self._runs[run].captured.input_names[at])
                    for run, at in self._takers.get(storage, ())
                    if run in planned
                )
                found[storage] = size, LetGo(until=bisect.bisect_left(planned, before), takers=takers)
        return found

    def _gone_outputs(self, number: int, let_go: Mapping[Any, tuple[int, LetGo]]) -> dict[int, LetGo]:
        """Sizes of a run's outputs of which none is there when the forward pass ends, and how long they are."""
        made = self._made[number]
        there = {size for storage, size in made.items() if storage not in let_go}
        gone: dict[int, LetGo] = {}
        for storage, size in made.items():
            if size not in there:
                lasts, other = let_go[storage][1], gone.get(size, LetGo(until=0))
                gone[size] = LetGo(until=max(lasts.until, other.until), takers=lasts.takers + other.takers)
        return gone


@dataclass(frozen=True)
class RecordedStretch:
    """Memory and time between two marks: how much is in use in the end, at most, beyond the beginning."""

    change_bytes: int = 0
    growth_bytes: int = 0
    seconds: float = 0.0


def _storages(tensors: Iterable[Any]) -> dict[Any, int]:
    """Weak references to the storages of tensors, and their bytes."""
    found = [item for item in tensors if isinstance(item, torch.Tensor)]
    return {weak_storage(item): item.untyped_storage().nbytes() for item in found}


def _present(storages: Mapping[Any, int]) -> dict[Any, int]:
    return {storage: size for storage, size in storages.items() if not storage.expired()}


def _watched(tensors: Iterable[Any]) -> _Watched:
    return {at: watched(item) for at, item in enumerate(tensors) if isinstance(item, torch.Tensor)}


def _stretch(
    found: Sequence[MemoryMark], marks: Mapping[str, tuple[int, MemoryMark]], begin: str, end: str
) -> RecordedStretch:
    if begin not in marks or end not in marks:
        return RecordedStretch()
    (first, start), (last, stop) = marks[begin], marks[end]
    if last < first:  # not recorded
        return RecordedStretch()
    peak_bytes = max((mark.peak_bytes for mark in found[first + 1 : last + 1]), default=start.live_bytes)
    return RecordedStretch(
        change_bytes=stop.live_bytes - start.live_bytes,
        growth_bytes=max(0, peak_bytes - start.live_bytes),
        seconds=max(0.0, stop.seconds - start.seconds),
    )
