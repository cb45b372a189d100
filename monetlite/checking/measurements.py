"""Results of `monetlite measure`, and predictions from them. Without torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

_MIN_BATCH_SHARE = 0.2
"""Least share of the peak that has to be due to the batch before larger batches are predicted from it."""


class Mode(StrEnum):
    INFERENCE = "inference"
    """The forward pass in evaluation mode, without gradients."""
    TRAINING = "training"
    """Forward, loss and backward in training mode, and the optimizer's step if there is one."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of one training step, or of one forward pass, in bytes.

    Attributes:
        peak_bytes: most that tensors and workspaces take at once, as asked for. A block of the CUDA allocator may
            be larger than its tensor, by up to a megabyte without expandable segments.
        resident_bytes: the part of it that is there before the step: parameters, buffers, inputs, optimizer state.
        reserved_bytes: what the CUDA allocator took from the GPU for the peak; None on a CPU.
        in_use_bytes: on a CPU, the process at its highest, Python and libraries included; on CUDA, what the GPU
            reports in use after the step, other programs included. None where it is not known.
    """

    peak_bytes: int
    resident_bytes: int
    reserved_bytes: int | None = None
    in_use_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device before the model is on it.

    Attributes:
        device: `cpu` or `cuda`. environment: its name, and the versions that matter.
        total_bytes: its memory. available_bytes: what this process can still take of it once the device is started.
        process_bytes: memory of the process by then (CPU).
        context_bytes: memory that starting the device took (CUDA), as nvidia-smi counts it.
            Each size is None where the system does not say.
    """

    device: str
    environment: Mapping[str, str]
    total_bytes: int | None
    available_bytes: int | None
    process_bytes: int | None = None
    context_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Growth of memory while something ran, at the end and at its highest.

    It is the process's on the CPU, and that of the allocator's tensors on CUDA.
    """

    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Building the model on the device, with inputs of the smallest batch.

    `times_ms` has a build for each batch size; the other figures are of the first. `growth` is None where the
    system does not say.
    """

    times_ms: tuple[float, ...]
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    growth: Growth | None


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """One batch size in one mode. Where memory did not suffice, `memory` is None and there are no times.

    `tried` is False where a smaller batch had run out of memory already.
    """

    mode: Mode
    batch: int
    memory: StepMemory | None = None
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
class Measurements:
    """A model on a device, at several batch sizes.

    `runs` has every batch of a mode in ascending order, mode by mode. `loading` is None if the model and the
    smallest batch's inputs don't fit. `labels_left_out` tells whether inference ran without the labels.
    """

    model: str
    description: str
    place: Place
    loading: Loading | None
    runs: tuple[BatchRun, ...]
    optimizer: str | None = None
    autocast: str | None = None
    labels_left_out: bool = False

    def of(self, mode: Mode) -> tuple[BatchRun, ...]:
        return tuple(run for run in self.runs if run.mode is mode)

    @property
    def modes(self) -> tuple[Mode, ...]:
        return tuple(dict.fromkeys(run.mode for run in self.runs))


@dataclass(frozen=True, kw_only=True)
class Line:
    """Peak memory as a straight line in the batch, through the two largest batches that ran.

    `deviation` is the largest distance of a smaller batch from it, as a fraction of its peak.
    """

    bytes_per_sample: float
    fixed_bytes: float
    batches: tuple[int, int]
    deviation: float


def fit(runs: Sequence[BatchRun]) -> Line | None:
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
    """Tell whether the batches make up enough of the peak for the line to hold beyond them.

    While weights, gradients and the optimizer's step are nearly all of it, the operator that will set the peak at
    larger batches doesn't show yet.
    """
    grown = line.bytes_per_sample * line.batches[1]
    return grown >= _MIN_BATCH_SHARE * (grown + line.fixed_bytes)


def largest_batch(line: Line, runs: Sequence[BatchRun], available_bytes: int) -> int | None:
    """The largest batch that memory holds by a line, in agreement with what ran and what ran out of memory.

    Reserved memory is taken to grow with the peak. None if the line doesn't tell enough.
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
