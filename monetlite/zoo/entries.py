"""One schedule file of a collection, in the few figures by which people choose."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from monetlite.core.errors import ScheduleFileError
from monetlite.core.schedule import Schedule
from monetlite.core.units import MAX_INTEGER, Amount, Positive, format_bytes

_FILE = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,150}/(?=.{1,151}\Z)[A-Za-z0-9][A-Za-z0-9._+-]*\.yaml\Z"
"""A path in a collection: nothing that leads elsewhere, or that some file system refuses."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a collection.

    Attributes:
        file: its path in the collection, with slashes: `DEVICE/MODEL_BATCH_BUDGET.yaml`.
        model: as `--model` takes it; sizes: batch and input, for people (`184×224²`, `8×1024`).
        batch: the largest that the schedule serves.
        device, kind: what its costs are of, and whether they were measured or estimated.
        budget_bytes, peak_bytes, plain_peak_bytes: of the whole step.
        overhead: predicted step time over plain training's, less one. gap: see `Schedule.gap`.
        seconds: how long it was solved for.
    """

    file: Annotated[str, Meta(pattern=_FILE, title="DEVICE/NAME.yaml")]
    model: str
    sizes: str
    batch: Positive
    device: str
    kind: str
    budget_bytes: Positive
    peak_bytes: Positive
    plain_peak_bytes: Positive
    overhead: Annotated[float, Meta(ge=-1, le=MAX_INTEGER)]
    gap: Amount
    seconds: Amount
    optimizer: str | None = None
    autocast: str = ""
    tolerance: Amount = 0.0

    @property
    def name(self) -> str:
        """What `zoo:` takes for exactly this one."""
        return self.file.removesuffix(".yaml")

    def data(self) -> dict[str, Any]:
        """Plain data for an index."""
        return msgspec.structs.asdict(self)


def is_inside(file: str) -> bool:
    """Whether a name is that of a file in a device's folder: no way out of the collection."""
    return re.search(_FILE, file) is not None


def entry_of(schedule: Schedule, file: str) -> Entry:
    """The figures of a schedule.

    Raises:
        ScheduleFileError: it doesn't say what model it is of, in a way that others can build it again.
    """
    source = _source(schedule)
    return Entry(
        file=file,
        model=source.model,
        sizes=_sizes(schedule),
        batch=source.batch,
        device=schedule.device,
        kind=schedule.kind,
        budget_bytes=schedule.budget_bytes,
        peak_bytes=schedule.peak_bytes,
        plain_peak_bytes=schedule.plain_peak_bytes,
        overhead=round(schedule.overhead, 6),
        gap=round(schedule.gap, 6),
        seconds=round(schedule.seconds, 1),
        optimizer=schedule.optimizer,
        autocast=schedule.autocast,
        tolerance=schedule.tolerance,
    )


def file_name(schedule: Schedule) -> str:
    """Where a schedule belongs in a collection: `DEVICE/MODEL_BATCH_BUDGET.yaml`.

    Sizes other than the batch follow it where the model has several; so do an optimizer, an autocast and a
    tolerance, if any.

    Raises:
        ScheduleFileError: as `entry_of`.
    """
    source = _source(schedule)
    parts = [source.model.replace(":", "-"), _sizes(schedule).replace("×", "x").replace("²", "sq")]
    if source.input_size == (224, 224):
        parts[1] = str(source.batch)
    parts.append(format_bytes(schedule.budget_bytes).replace(" ", ""))
    parts += [part for part in (source.dtype, schedule.autocast, schedule.optimizer) if part]
    if schedule.accumulate:
        parts.append("accumulate")
    if schedule.tolerance:
        parts.append(f"within{schedule.tolerance:g}")
    name = f"{schedule.device}/{'_'.join(parts)}.yaml"
    if not is_inside(name):
        raise ScheduleFileError(f"{name!r:.120} is no name for a file: the device, dtype or optimizer is none")
    return name


def _source(schedule: Schedule) -> Any:
    if schedule.source is None:
        raise ScheduleFileError(
            f"the schedule of {schedule.name} doesn't say how to build the model: only those of built-in, hf:, "
            "timm: and torchvision: models, solved by `monetlite solve`, can be shared by name"
        )
    return schedule.source


def _sizes(schedule: Schedule) -> str:
    source = _source(schedule)
    if source.input_size is not None:
        height, width = source.input_size
        return f"{source.batch}×{height}²" if height == width else f"{source.batch}×{height}×{width}"
    return f"{source.batch}×{source.sequence_length}" if source.sequence_length is not None else str(source.batch)


__all__ = ["Entry", "entry_of", "file_name", "is_inside"]
