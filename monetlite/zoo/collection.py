"""Collections of schedule files: what they are called, what the index lists, and what `zoo:resnet50@6GB` finds.

A collection is a folder with a folder for each device in it, and an index.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from monetlite.core.command_lines import command_line
from monetlite.core.costs import ProfileKind
from monetlite.core.devices import find_device
from monetlite.core.errors import DeviceError, ScheduleFileError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.documents import common_fields, plain_data, read_document
from monetlite.core.files.plain_data import Document, dump_yaml, load_yaml
from monetlite.core.schedule import Schedule, read_schedule
from monetlite.core.source import ModelSource
from monetlite.core.spelling import close_matches, did_you_mean
from monetlite.core.units import MAX_INTEGER, Amount, Positive, check_budget, format_bytes, parse_budget

PREFIX = "zoo:"
INDEX = "index.yaml"
_FILE = r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,150}/(?=.{1,151}\Z)[A-Za-z0-9][A-Za-z0-9._+-]*\.yaml\Z"
"""A path in a collection: nothing that leads elsewhere, or that some file system refuses."""
_QUERY = re.compile(r"(?:(?P<device>[^/@]+)/)?(?P<model>[^/@]+)(?:@(?P<budget>[^/@]+))?")


class ZooEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule file of a collection, in the few figures by which people choose.

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
    kind: ProfileKind
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
        """The name that `zoo:` takes for exactly this one."""
        return self.file.removesuffix(".yaml")

    def data(self) -> dict[str, Any]:
        """Plain data for an index."""
        return msgspec.structs.asdict(self)


class ZooIndex(Document, frozen=True, kw_only=True, tag="monetlite-zoo"):
    """The index of a collection."""

    CALLED, MADE_BY = "collection's index", "`monetlite zoo add`"

    entries: tuple[ZooEntry, ...]


def entry_of(schedule: Schedule, file: str) -> ZooEntry:
    """Make the entry of a schedule.

    Raises:
        ScheduleFileError: it doesn't say how its model is built, or its figures are beyond those of an index.
    """
    source = _source(schedule)
    figures = {
        "file": file,
        "model": source.model,
        "batch": source.batch,
        "sizes": _sizes(source),
        "overhead": round(schedule.overhead, 6),
        "gap": round(schedule.gap, 6),
        "seconds": round(schedule.seconds, 1),
    }
    try:
        return msgspec.convert(common_fields(ZooEntry, schedule) | figures, ZooEntry)
    except msgspec.ValidationError as error:
        raise ScheduleFileError(f"{file} can't be listed in a collection: {error}") from None


def file_name(schedule: Schedule) -> str:
    """Name a schedule's file in a collection: `DEVICE/MODEL_BATCH_BUDGET.yaml`.

    Sizes other than the batch follow it where the model has several; so do an optimizer, an autocast and a
    tolerance, if any.
    """
    source = _source(schedule)
    usual = source.input_size == (224, 224)
    parts = [
        source.model.replace(":", "-"),
        str(source.batch) if usual else _sizes(source).replace("×", "x").replace("²", "sq"),
        format_bytes(schedule.budget_bytes).replace(" ", ""),
        *filter(None, (source.dtype, schedule.autocast, schedule.optimizer)),
        *(["accumulate"] if schedule.accumulate else []),
        *(["step-in-backward"] if schedule.step_in_backward else []),
        *([f"within{schedule.tolerance:g}"] if schedule.tolerance else []),
    ]
    name = f"{schedule.device}/{'_'.join(parts)}.yaml"
    if re.search(_FILE, name) is None:
        raise ScheduleFileError(f"{name!r:.120} is no name for a file: the device, dtype or optimizer is none")
    return name


def _source(schedule: Schedule) -> ModelSource:
    if schedule.source is None:
        raise ScheduleFileError(
            f"the schedule of {schedule.name} doesn't say how to build the model: only those of built-in, hf:, "
            "timm: and torchvision: models, solved by `monetlite solve`, can be shared by name"
        )
    return schedule.source


def _sizes(source: ModelSource) -> str:
    if source.input_size is not None:
        height, width = source.input_size
        return f"{source.batch}×{height}²" if height == width else f"{source.batch}×{height}×{width}"
    return f"{source.batch}×{source.sequence_length}" if source.sequence_length is not None else str(source.batch)


@dataclass(frozen=True)
class Shelf:
    """The schedule files under a folder, which has a folder for each device in it."""

    folder: Path

    def entries(self) -> tuple[ZooEntry, ...]:
        """Read the index: entries sorted by model, device and budget.

        Raises:
            ScheduleFileError: the index is missing or malformed.
        """
        if not (self.folder / INDEX).exists():
            raise ScheduleFileError(
                f"there is no collection in {self.folder}; "
                f"`monetlite zoo add FILE --folder {self.folder}` begins one"
            )
        return read_document(load_yaml(self.folder / INDEX, ZooIndex), ZooIndex).entries

    def load(self, entry: ZooEntry) -> Schedule:
        """Read the schedule of an entry; errors as in `monetlite.load_schedule`."""
        return read_schedule(self.folder / entry.file)

    def files(self) -> tuple[str, ...]:
        """List the schedule files that are there, indexed or not."""
        return tuple(sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob("*/*.yaml")))

    def add(self, schedule: Schedule) -> ZooEntry:
        """Write a schedule under its name, and list it in the index. One of that name is replaced.

        Raises:
            ScheduleFileError: it can't be shared by name, the index can't be read, or the folder can't be written.
        """
        file = file_name(schedule)
        entry = entry_of(schedule, file)
        known = self.entries() if (self.folder / INDEX).exists() else ()
        target = self.folder / file
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScheduleFileError(f"{target.parent} can't be made: {error.strerror}") from error
        schedule.save(target)
        self.write_index([*(item for item in known if item.file != file), entry])
        return entry

    def write_index(self, entries: Iterable[ZooEntry]) -> None:
        """Write the index, atomically."""
        ordered = sorted(
            entries, key=lambda item: (item.model, item.device, item.batch, item.tolerance, -item.budget_bytes)
        )
        header = "The schedule files of this folder. Written by `monetlite zoo add` and scripts/make_zoo.py."
        write_atomically(self.folder / INDEX, dump_yaml(plain_data(ZooIndex(entries=tuple(ordered))), header))

    def indexed_again(self) -> tuple[ZooEntry, ...]:
        """Make the entries that the index should list, from the files themselves.

        Raises:
            ScheduleFileError: a file can't be read, or can't be shared by name.
        """
        return tuple(entry_of(read_schedule(self.folder / file), file) for file in self.files())

    def stale(self) -> bool:
        """Compare the index with the files: true if they differ, or the index can't be read."""
        try:
            listed = set(self.entries())
        except ScheduleFileError:
            return True
        return listed != set(self.indexed_again())


def shipped() -> Shelf:
    """The collection that comes with monetlite.

    Raises:
        ScheduleFileError: the installation is without it.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "schedules", package.parent / "schedules"):
        if (folder / INDEX).is_file():
            return Shelf(folder)
    raise ScheduleFileError(f"this installation has no schedules beside {package}; install monetlite again")


def matching(
    entries: Iterable[ZooEntry],
    *,
    model: str | None = None,
    device: str | None = None,
    budget: str | None = None,
    batch: int | None = None,
) -> list[ZooEntry]:
    """Select entries; None where anything will do.

    A model matches with or without its family (`gpt2` is `hf:gpt2`), case and hyphens aside; a device by any of its
    names; a budget, if the peak is within it; a batch, if the schedule serves it.
    """
    return [
        entry
        for entry in entries
        if (model is None or _plain(model) in (_plain(entry.model), _plain(entry.model.rpartition(":")[2])))
        and (device is None or _device(device) == entry.device)
        and (batch is None or batch <= entry.batch)
        and (budget is None or entry.peak_bytes <= parse_budget(budget, entry.plain_peak_bytes))
    ]


def fastest(entries: Iterable[ZooEntry]) -> ZooEntry:
    """Pick the entry with the least overhead."""
    return min(entries, key=lambda entry: (entry.overhead, entry.peak_bytes))


def find_entry(text: str, shelf: Shelf) -> ZooEntry:
    """Find the schedule that a name stands for.

    Args:
        text: `zoo:MODEL@BUDGET`, `zoo:DEVICE/MODEL@BUDGET`, or `zoo:DEVICE/NAME` of one file. The budget is that
            of the whole step; of the files that keep within it, the fastest is taken. Without a device, one
            for this machine's GPU if there is any, else for whichever device the collection has. Only schedules
            that make the same bits as plain training are found by their budget; others, by their names.
        shelf: where to look.

    Raises:
        ScheduleFileError: nothing of that name, or nothing that fits; says what there is.
        BudgetError: the budget can't be read.
    """
    entries = shelf.entries()
    wanted = text.removeprefix(PREFIX)
    for entry in entries:
        if wanted in (entry.name, entry.file):
            return entry
    query = _QUERY.fullmatch(wanted)
    if query is None:
        raise ScheduleFileError(
            f"{text!r:.100} names no schedule; write zoo:resnet50@6GB, or zoo:DEVICE/resnet50@6GB"
        )
    if query["budget"] is not None:
        check_budget(query["budget"])
    of_model = matching(entries, model=query["model"])
    if not of_model:
        known = known_models(query["model"], entries)
        raise ScheduleFileError(f"{text}: no schedules of {query['model']!r:.80}; there are {known}")
    there = matching(of_model, device=query["device"])
    if not there:
        devices = sorted({entry.device for entry in of_model})
        near = close_matches(query["device"], devices)
        raise ScheduleFileError(
            f"{text}: none for {query['device']!r:.80}; there are schedules for {', '.join(devices)}{near}"
        )
    if query["device"] is None and len({entry.device for entry in there}) > 1:
        there = matching(there, device=_this_device()) or there
    fitting = matching(there, budget=query["budget"])
    if not fitting:
        least = min(there, key=lambda entry: entry.peak_bytes)
        options = {
            **vars(_source(shelf.load(least))),
            "budget": query["budget"],
            "device": least.device,
            "optimizer": least.optimizer,
            "autocast": least.autocast or None,
            "tolerance": least.tolerance or None,
        }
        raise ScheduleFileError(
            f"{text}: nothing fits; the smallest peak is {format_bytes(least.peak_bytes)} ({least.name}, "
            f"{least.sizes}). Solve one: {command_line('solve', options)}"
        )
    exact = [entry for entry in fitting if entry.tolerance == 0]
    if not exact:
        other = fastest(fitting)
        raise ScheduleFileError(
            f"{text}: what fits doesn't make the same bits as plain training; {PREFIX}{other.name} is within "
            f"{other.tolerance:g} ({format_bytes(other.peak_bytes)}, {other.overhead:+.1%}). Name it to have it"
        )
    return fastest(exact)


def known_models(wanted: str, entries: Iterable[ZooEntry]) -> str:
    """The models of a collection, for a message, and those of them that come close to a name."""
    models = sorted({entry.model for entry in entries})
    near = close_matches(wanted, {*models, *(model.rpartition(":")[2] for model in models)})
    return f"{', '.join(models)}{near}"


def load_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule file, or find one in the collection that comes along: `"zoo:resnet50@6GB"`.

    Nothing in a file is executed; what it names is checked against the model later.

    Args:
        path: of the file; or `zoo:MODEL@BUDGET`, `zoo:DEVICE/MODEL@BUDGET` (see `monetlite zoo list`).

    Raises:
        ScheduleFileError: no path; or the file is missing, truncated, malformed, or of another version, and says
            where; or the collection has nothing of that name, or nothing that fits.
    """
    if not isinstance(path, (str, PathLike)):
        raise ScheduleFileError(
            f"give a monetlite.Schedule, the path of its file, or a name such as zoo:resnet50@6GB, not {path!r:.80}"
        )
    if isinstance(path, str) and path.startswith(PREFIX):
        return find(path)
    if not os.path.lexists(path):
        raise ScheduleFileError(f"{path} can't be read: there is no such file{_similar(os.fspath(path))}")
    return read_schedule(path)


def _similar(path: str) -> str:
    """A suggestion for a schedule that is not there: a name in the collection, or another file of the folder."""
    if _QUERY.fullmatch(path) and "@" in path:
        return f"; did you mean {PREFIX}{path}?"
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        files = [item for item in os.listdir(folder or ".") if item.endswith((".yaml", ".yml"))]
        named = {os.path.splitext(item)[0].lower(): item for item in files}
        near = difflib.get_close_matches(os.path.splitext(name)[0].lower(), named, n=4)
        return did_you_mean(os.path.join(folder, named[stem]) for stem in near)
    return ""


def find(text: str, shelf: Shelf | None = None) -> Schedule:
    """Read the schedule that a name stands for; see `find_entry`."""
    shelf = shelf or shipped()
    return shelf.load(find_entry(text, shelf))


def _plain(model: str) -> str:
    return re.sub(r"[-_ ]", "", model.lower())


def _device(name: str) -> str:
    """A device's own name, by whatever name; as it stands where it is not known."""
    try:
        return find_device(name).name
    except DeviceError:
        return name


def _this_device() -> str | None:
    import torch

    return _device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
