"""What `zoo:resnet50@6GB` means: the fastest schedule of a collection that fits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from monetlite.core.errors import MonetliteError, ScheduleFileError
from monetlite.core.schedule import Schedule, read_schedule
from monetlite.core.units import format_bytes, parse_budget
from monetlite.zoo.entries import Entry
from monetlite.zoo.shelf import Shelf, shipped

PREFIX = "zoo:"
_QUERY = re.compile(r"(?:(?P<device>[^/@]+)/)?(?P<model>[^/@]+)(?:@(?P<budget>[^/@]+))?")


@dataclass(frozen=True, kw_only=True)
class Query:
    """What to look for; None where anything will do."""

    model: str | None = None
    device: str | None = None
    budget: str | None = None
    batch: int | None = None


def find(text: str, shelf: Shelf | None = None) -> Schedule:
    """The schedule that a name stands for.

    Args:
        text: `zoo:MODEL@BUDGET`, `zoo:DEVICE/MODEL@BUDGET`, or `zoo:DEVICE/NAME` of one file. The budget is that
            of the whole step; of the files that keep within it, the fastest is taken. Without a device, one
            for this machine's GPU if there is any, else for whichever device the collection has. Only schedules
            that make the same bits as plain training are found by their budget; others, by their names.
        shelf: where to look; by default in the collection that comes along.

    Raises:
        ScheduleFileError: nothing of that name, or nothing that fits; says what there is.
        BudgetError: the budget can't be read.
    """
    shelf = shelf or shipped()
    return shelf.load(find_entry(text, shelf))


def find_entry(text: str, shelf: Shelf) -> Entry:
    """The entry of the schedule that a name stands for; see `find`."""
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
    of_model = matching(entries, Query(model=query["model"]))
    if not of_model:
        known = ", ".join(sorted({entry.model for entry in entries}))
        raise ScheduleFileError(f"{text}: no schedules of {query['model']!r:.80}; there are {known}")
    there = matching(of_model, Query(device=query["device"]))
    if not there:
        known = ", ".join(sorted({entry.device for entry in of_model}))
        raise ScheduleFileError(f"{text}: none for {query['device']!r:.80}; there are schedules for {known}")
    if query["device"] is None:
        there = matching(there, Query(device=_this_device())) or there
    fitting = matching(there, Query(budget=query["budget"]))
    if not fitting:
        least = min(there, key=lambda entry: entry.peak_bytes)
        raise ScheduleFileError(
            f"{text}: nothing fits; the smallest peak is {format_bytes(least.peak_bytes)} ({least.name}, "
            f"{least.sizes}). Solve one: monetlite solve --model {least.model} --budget {query['budget']}"
        )
    exact = [entry for entry in fitting if entry.tolerance == 0]
    if not exact:
        other = min(fitting, key=lambda entry: (entry.overhead, entry.peak_bytes))
        raise ScheduleFileError(
            f"{text}: what fits doesn't make the same bits as plain training; {PREFIX}{other.name} is within "
            f"{other.tolerance:g} ({format_bytes(other.peak_bytes)}, {other.overhead:+.1%}). Name it to have it"
        )
    return min(exact, key=lambda entry: (entry.overhead, entry.peak_bytes))


def matching(entries: Sequence[Entry], query: Query) -> tuple[Entry, ...]:
    """The entries that a query lets through.

    A model matches with or without its family (`gpt2` is `hf:gpt2`), case and hyphens aside; a device by any of
    its names; a budget, if the peak is within it; a batch, if the schedule serves it.
    """
    return tuple(entry for entry in entries if _matches(entry, query))


def _matches(entry: Entry, query: Query) -> bool:
    if query.model is not None and _plain(query.model) not in (_plain(entry.model), _plain(_bare(entry.model))):
        return False
    if query.device is not None and _device(query.device) != entry.device:
        return False
    if query.batch is not None and entry.batch < query.batch:
        return False
    return query.budget is None or entry.peak_bytes <= parse_budget(query.budget, entry.plain_peak_bytes)


def _bare(model: str) -> str:
    return model.rpartition(":")[2]


def _plain(model: str) -> str:
    return re.sub(r"[-_ ]", "", model.lower())


def _device(name: str) -> str:
    """A device's own name, by whatever name; as it stands where it is not known."""
    from monetlite.core.devices import find_device

    try:
        return find_device(name).name
    except MonetliteError:
        return name


def _this_device() -> str | None:
    import torch

    return _device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def load_schedule(path: str | PathLike[str]) -> Schedule:
    """Read a schedule file, or find one in the collection that comes along: `"zoo:resnet50@6GB"`.

    Nothing in a file is executed; what it names is checked against the model later.

    Args:
        path: of the file; or `zoo:MODEL@BUDGET`, `zoo:DEVICE/MODEL@BUDGET` (see `monetlite zoo list`).

    Raises:
        ScheduleFileError: the file is missing, truncated, malformed, or of another version, and says where; or
            the collection has nothing of that name, or nothing that fits.
    """
    if isinstance(path, str) and path.startswith("zoo:"):
        return find(path)
    return read_schedule(path)


__all__ = ["PREFIX", "Query", "find", "find_entry", "matching"]
