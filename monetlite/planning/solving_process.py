"""A process that solves beside training and gives way to it, and hands over each better schedule at once.

It takes and gives files, all in one folder: the request, profiles, the schedule to begin from, and better schedules
in the order in which they were found.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from monetlite.core.child_processes import end_with, give_way, own_environment
from monetlite.core.costs import Profile, load_profile
from monetlite.core.errors import MonetliteError
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule, read_schedule
from monetlite.planning.layouts import solve_layouts
from monetlite.solving.clock import count_own_time

OWN_TIME = 2.0
"""The processor time that it takes for each second of the time limit: a solve has two threads."""
SHARES = 1 / 16, 1 / 4, 1.0
"""Parts of that time for which it solves, in turn, each time from the best schedule so far."""
BETTER = 1e-3
"""Part of a schedule's latency by which another has to be faster to take its place."""
_MODULE, _REQUEST, _START, _LOG = "monetlite.planning.solving_process", "request.json", "start.yaml", "log"


class SolvingProcess:
    """Solve for profiles of one step, as `solve_layouts` does.

    Args:
        profiles, budget, solving, layout: as in `solve_layouts`.
        start: the schedule to better; the first that is handed over may be the same, at its true costs.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        budget: str | int | float,
        solving: SolvingOptions,
        layout: str | None,
        start: Schedule,
    ) -> None:
        # The folder goes with this object, or with the process that it is of: the solver removes it then.
        self._path, self._taken = Path(tempfile.mkdtemp(prefix="monetlite-")), 0
        names = [f"profile_{number}.json" for number in range(len(profiles))]
        for name, profile in zip(names, profiles, strict=True):
            profile.save(self._path / name)
        start.save(self._path / _START)
        request = {
            "profiles": names,
            "budget": budget,
            "solving": asdict(solving),
            "layout": layout,
            "parent": os.getpid(),
        }
        (self._path / _REQUEST).write_text(json.dumps(request, default=int), encoding="utf-8")
        with open(self._path / _LOG, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(self._path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=self._path,
                env=own_environment(),
            )
        weakref.finalize(self, _end, self._process, self._path, os.getpid())
        give_way(self._process)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def better(self) -> Schedule | None:
        """The next better schedule, if there is one by now."""
        path = _better(self._path, self._taken)
        if not path.exists():
            return None
        self._taken += 1
        return read_schedule(path)

    @property
    def failure(self) -> str | None:
        """The last line that it said, if it failed."""
        if not self._process.poll():
            return None
        said = (self._path / _LOG).read_text(errors="replace").strip().splitlines()
        return said[-1] if said else "the solver ended"


def _better(folder: Path, number: int) -> Path:
    return folder / f"better_{number}.yaml"


def _end(process: "subprocess.Popen[bytes]", folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a copy of the process that solves, by `os.fork`
        return
    if process.poll() is None:
        process.terminate()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _solve(folder: Path) -> None:
    """The process's own part."""
    count_own_time()
    request = json.loads((folder / _REQUEST).read_text(encoding="utf-8"))
    end_with(request["parent"], partial(shutil.rmtree, folder, ignore_errors=True))
    profiles = [load_profile(folder / name) for name in request["profiles"]]
    given = SolvingOptions(**request["solving"])
    solving = replace(given, gap=max(given.gap, BETTER))
    best, least_ms, number = read_schedule(folder / _START), math.inf, 0
    for share in SHARES:
        limited = replace(solving, time_limit=share * OWN_TIME * solving.time_limit)
        found = solve_layouts(profiles, request["budget"], limited, layout=request["layout"], starts=[best])
        if found.latency_ms < (1 - BETTER) * least_ms:
            found.save(_better(folder, number))
            best, least_ms, number = found, found.latency_ms, number + 1
        if found.gap <= solving.gap:
            return


if __name__ == "__main__":
    try:
        _solve(Path(sys.argv[1]))
    except MonetliteError as error:
        sys.exit(str(error).splitlines()[0])
