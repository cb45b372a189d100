"""Writing a file so that it is either what it was or complete, whatever happens in between."""

import contextlib
import os
import tempfile
from os import PathLike
from pathlib import Path

from monetlite.core.errors import ScheduleFileError


def write_atomically(path: str | PathLike[str], content: str | bytes) -> None:
    """Write text (in UTF-8) or bytes to a file through a temporary file beside it. A symbolic link stays one.

    Raises:
        ScheduleFileError: the file can't be written (no such folder, no permission, disk full, a device or a
            pipe in its place); what was at `path` is unchanged, and no temporary file is left.
    """
    target = Path(path)
    temporary = ""
    try:
        target = Path(os.path.realpath(target))
        if target.exists() and not target.is_file():
            raise ScheduleFileError(f"{target} can't be written: it is not a regular file")
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScheduleFileError(
            f"{target} can't be written: {reason}; what was there before is unchanged"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _mode(target: Path) -> int:
    """Permissions of the file that is replaced, or those a new file would get."""
    with contextlib.suppress(OSError):
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
