"""What figures depend on: the hardware, the versions, and the commit where the package is in a checkout."""

import platform
import subprocess
from pathlib import Path

import monetlite
from monetlite.profiling.meters import meter_for


def environment(device: str) -> dict[str, str]:
    """The device's name, its threads, and the versions of torch, Python and monetlite."""
    found = {
        **meter_for(device).environment(),
        "python": platform.python_version(),
        "monetlite": monetlite.__version__,
    }
    if commit := _commit(Path(monetlite.__file__).parent.parent):
        found["commit"] = commit
    return found


def _commit(folder: Path) -> str:
    """The commit of a checkout; empty for what is not one."""
    if not (folder / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


__all__ = ["environment"]
