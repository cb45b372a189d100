"""A collection of schedule files: a folder for each device, and an index of what is in them."""

from collections.abc import Iterable
from pathlib import Path

from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.files.documents import Document, plain_data, read_document
from monetlite.core.files.plain_data import dump_yaml, load_yaml
from monetlite.core.schedule import Schedule, read_schedule
from monetlite.zoo.entries import Entry, entry_of, file_name

INDEX = "index.yaml"


class ZooIndex(Document, frozen=True, kw_only=True, tag="monetlite-zoo"):
    """The index of a collection."""

    entries: tuple[Entry, ...]


class Shelf:
    """The schedule files under a folder.

    Args:
        folder: with a folder for each device in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> tuple[Entry, ...]:
        """What the index lists, sorted by model, device and budget.

        Raises:
            ScheduleFileError: the index is missing or malformed.
        """
        return read_document(load_yaml(self.folder / INDEX), ZooIndex).entries

    def load(self, entry: Entry) -> Schedule:
        """The schedule of an entry.

        Raises:
            ScheduleFileError: as `monetlite.load_schedule`.
        """
        return read_schedule(self.folder / entry.file)

    def files(self) -> tuple[str, ...]:
        """The schedule files that are there, indexed or not."""
        return tuple(sorted(path.relative_to(self.folder).as_posix() for path in self.folder.glob("*/*.yaml")))

    def add(self, schedule: Schedule) -> Entry:
        """Put a schedule where it belongs, and list it in the index; one of that name is replaced.

        Raises:
            ScheduleFileError: it can't be shared by name, or the folder can't be written.
        """
        file = file_name(schedule)
        target = self.folder / file
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScheduleFileError(f"{target.parent} can't be made: {error.strerror}") from error
        schedule.save(target)
        entry = entry_of(schedule, file)
        known = self.entries() if (self.folder / INDEX).exists() else ()
        self.write_index([*(item for item in known if item.file != file), entry])
        return entry

    def write_index(self, entries: Iterable[Entry]) -> None:
        """Write the index, atomically.

        Raises:
            ScheduleFileError: it can't be written.
        """
        ordered = sorted(
            entries, key=lambda item: (item.model, item.device, item.batch, item.tolerance, -item.budget_bytes)
        )
        index = plain_data(ZooIndex(entries=tuple(ordered)))
        header = "The schedule files of this folder. Written by `monetlite zoo add` and scripts/make_zoo.py."
        write_atomically(self.folder / INDEX, dump_yaml(index, header))

    def indexed_again(self) -> tuple[Entry, ...]:
        """What the index should list, from the files themselves.

        Raises:
            ScheduleFileError: a file can't be read, or can't be shared by name.
        """
        return tuple(entry_of(read_schedule(self.folder / file), file) for file in self.files())

    def stale(self) -> bool:
        """Whether the index is not that of the files.

        Raises:
            ScheduleFileError: as `indexed_again`, and as `entries`.
        """
        return set(self.entries()) != set(self.indexed_again())


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


__all__ = ["INDEX", "Shelf", "shipped"]
