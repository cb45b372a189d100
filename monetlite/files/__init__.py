"""Schedules to and from disk: YAML, read safely, written atomically."""

from os import PathLike
from typing import TYPE_CHECKING

from monetlite.files.schedules import load_schedule as load_file
from monetlite.files.schedules import save_schedule

if TYPE_CHECKING:
    from monetlite.schedule import Schedule


def load_schedule(path: str | PathLike[str]) -> "Schedule":
    """Read a schedule file, or find one in the collection that comes along: `"zoo:resnet50@6GB"`.

    Nothing in a file is executed; what it names is checked against the model later.

    Args:
        path: of the file; or `zoo:MODEL@BUDGET`, `zoo:DEVICE/MODEL@BUDGET` (see `monetlite zoo list`).

    Raises:
        ScheduleFileError: the file is missing, truncated, malformed, or of another version, and says where; or
            the collection has nothing of that name, or nothing that fits.
    """
    if isinstance(path, str) and path.startswith("zoo:"):
        from monetlite.zoo.queries import find

        return find(path)
    return load_file(path)


__all__ = ["load_file", "load_schedule", "save_schedule"]
