"""What `monetlite measure` finds, as data: no torch, no printing."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    INFERENCE = "inference"
    """The forward pass in evaluation mode, without gradients."""
    TRAINING = "training"
    """Forward, loss and backward in training mode, and the optimizer's step if there is one."""


_TELLING_SHARE = 0.2
"""Of the peak, what has to be due to the batch before larger ones are predicted from it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device before the model is on it.

    Attributes:
        device: `cpu` or `cuda`; environment: its name, and the versions that matter.
        total_bytes: its memory; None where that can't be known.
        available_bytes: what this process could still take of it, once the device was started.
        process_bytes: what the process held by then (CPU); None where the system won't say.
        context_bytes: what starting the device took of its memory (CUDA), as nvidia-smi counts it.
    """

    device: str
    environment: Mapping[str, str]
    total_bytes: int | None
    available_bytes: int | None
    process_bytes: int | None = None
    context_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What memory grew by while something ran, and by how much more at its highest: of the process for a model on
    the CPU, of the allocator's tensors on CUDA."""

    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Building the model on the device, with inputs of the smallest batch.

    `times_ms` has a build for each batch size; the other figures are of the first. `growth` is None where the
    system won't say.
    """

    times_ms: tuple[float, ...]
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    growth: Growth | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one run.

    Attributes:
        peak_bytes: the most that tensors take at once: weights, inputs, optimizer state, and all that the run
            allocates.
        resident_bytes: of those, what is there before the run: parameters, buffers, inputs, optimizer state.
        reserved_bytes: what the allocator took from the device for them (CUDA).
        in_use_bytes: on the CPU, the process at its highest, Python and libraries included; on CUDA, what the
            device reports in use afterwards, by everybody. None where the system won't say.
    """

    peak_bytes: int
    resident_bytes: int
    reserved_bytes: int | None = None
    in_use_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One batch size in one mode. `memory` is None, and there are no times, where memory did not suffice.

    `tried` is False where a smaller batch had run out of memory already.
    """

    mode: Mode
    batch: int
    memory: Memory | None = None
    times_ms: tuple[float, ...] = ()
    tried: bool = True

    @property
    def out_of_memory(self) -> bool:
        return self.tried and self.memory is None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.batch / self.median_ms if self.median_ms > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """Peak memory as `fixed_bytes` and so much for each sample, through the two largest batches that ran.

    `deviation` is how far the smaller ones are off it, at most, as a fraction of their peaks.
    """

    bytes_per_sample: float
    fixed_bytes: float
    batches: tuple[int, int]
    deviation: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """A model on a device, at several batch sizes.

    `runs` has every batch of a mode in ascending order, mode by mode. `loading` is None if not even the smallest
    batch's inputs and the model fit. `labels_left_out` says whether inference ran without the labels.
    """

    model: str
    description: str
    place: Place
    loading: Loading | None
    runs: tuple[Run, ...]
    optimizer: str | None = None
    autocast: str | None = None
    labels_left_out: bool = False

    def of(self, mode: Mode) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.mode is mode)

    @property
    def modes(self) -> tuple[Mode, ...]:
        return tuple(dict.fromkeys(run.mode for run in self.runs))


def fit(runs: Sequence[Run]) -> Line | None:
    """The line through the peaks of the two largest batches that ran; None for fewer than two.

    Each operator's memory is a straight line in the batch, and the peak is the largest of them: it can only get
    steeper. So a line through all batches would promise more than one through the last two.
    """
    points = [(run.batch, run.memory.peak_bytes) for run in runs if run.memory is not None]
    if len(points) < 2:
        return None
    (batch, peak_bytes), (larger, larger_bytes) = points[-2:]
    slope = (larger_bytes - peak_bytes) / (larger - batch)
    fixed = peak_bytes - slope * batch
    return Line(
        bytes_per_sample=slope,
        fixed_bytes=fixed,
        batches=(batch, larger),
        deviation=max(abs(fixed + slope * each - there) / there for each, there in points),
    )


def tells_enough(line: Line) -> bool:
    """Whether the batches make up enough of the peak for the line to hold beyond them.

    While weights, gradients and the optimizer's step are nearly all there is, the operator that will set the peak
    at larger batches doesn't show yet.
    """
    grown = line.bytes_per_sample * line.batches[1]
    return grown >= _TELLING_SHARE * (grown + line.fixed_bytes)


def largest_batch(line: Line, runs: Sequence[Run], available_bytes: int) -> int | None:
    """The largest batch that memory would hold by a line, never contradicting what ran or ran out of memory.

    What an allocator reserves beyond the peak is taken to grow with it. None if the line doesn't tell.
    """
    if not tells_enough(line):
        return None
    ran = [run for run in runs if run.memory is not None]
    last = ran[-1].memory
    assert last is not None, "a line is through batches that ran"
    usable = available_bytes * last.peak_bytes / max(last.peak_bytes, last.reserved_bytes or 0)
    most = math.floor((usable - line.fixed_bytes) / line.bytes_per_sample)
    most = min([most, *(run.batch - 1 for run in runs if run.out_of_memory)])
    return max(most, ran[-1].batch)


__all__ = [
    "Growth",
    "Line",
    "Loading",
    "Measurements",
    "Memory",
    "Mode",
    "Place",
    "Run",
    "fit",
    "largest_batch",
    "tells_enough",
]
