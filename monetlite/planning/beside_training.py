"""A schedule within seconds of a step's capture, and a better one beside training.

`first` takes the costs of the default operators, from one run each, and solves for two seconds. Costs that the
cache has are exact.

`advance` is called between two steps, when nothing else runs: there it measures every implementation, a while at a
time. Then a process of low priority solves beside training.

If `first` finds nothing that fits, it measures and solves until something does, as waiting would.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.graph import OperatorGraph
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule, Status, read_schedule
from monetlite.planning.budgets import solve_layouts
from monetlite.planning.pipeline import measured_here, price, with_additions
from monetlite.profiling.measured import Measurement

ROUGH_SECONDS, FIRST_SECONDS = 2.5, 2.0
"""Time for the first costs, and for the first schedule."""
NICENESS = 10
"""Of the process that solves beside training: it gets a tenth of a core that training wants, too."""
PATIENCE = 2.0
"""Its time limit, as a multiple of what was asked for."""


class PlanningBesideTraining:
    """The search for a schedule of a step that is trained meanwhile.

    Args:
        graphs: the captured step, by layout of its images.
        budget: as in `monetlite.optimize`.
        pricing, solving: options.

    Attributes:
        finished: nothing better will come.
        told: lines for people about how it went, which the reader removes.
    """

    def __init__(
        self,
        graphs: Mapping[str, OperatorGraph],
        budget: str | int | float,
        pricing: PricingOptions,
        solving: SolvingOptions,
    ) -> None:
        self._budget, self._pricing, self._solving = budget, pricing, solving
        self._graphs = list(graphs.values())
        measured = [measured_here(graph, pricing) for graph in self._graphs]
        self._measurements = [
            Measurement(graph, device, tolerance=solving.tolerance)
            for graph, device in zip(self._graphs, measured, strict=True)
            if device is not None
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._seconds = 0.0
        self.finished = False
        self.told: list[str] = []

    def first(self) -> Schedule:
        """A schedule to begin with.

        Raises:
            Those of `monetlite.optimize`.
        """
        rough = [item.rough_profile(ROUGH_SECONDS / len(self._measurements)) for item in self._measurements]
        complete = all(item.known for item in self._measurements)
        profiles = [with_additions(item, self._pricing) for item in rough] or self._estimated()
        quick = replace(self._solving, time_limit=min(FIRST_SECONDS, self._solving.time_limit))
        try:
            schedule = solve_layouts(profiles, self._budget, quick, layout=self._pricing.layout)
        except InfeasibleBudget:
            self._measure()
            self.finished = True
            return solve_layouts(self._complete(), self._budget, self._solving, layout=self._pricing.layout)
        self.finished = complete and schedule.status is Status.OPTIMAL
        return schedule

    def advance(self, seconds: float) -> Schedule | None:
        """Go on for so many seconds, while no step runs; the better schedule, once there is one."""
        if self.finished:
            return None
        if self._process is None:
            if not all(item.done == item.total for item in self._measurements):
                self._measure(seconds)
                return None
            self._start()
            return None
        return None if self._process.poll() is None else self._result()

    def _measure(self, seconds: float = float("inf")) -> None:
        began = time.monotonic()
        for item in self._measurements:
            item.run(max(0.0, seconds - (time.monotonic() - began)))
        self._seconds += time.monotonic() - began
        if all(item.done == item.total for item in self._measurements):
            calls = sum(item.total for item in self._measurements)
            self.told.append(f"measured {calls} operators in {self._seconds:.1f} s")

    def _estimated(self) -> list[Profile]:
        return [price(graph, self._pricing, self._solving) for graph in self._graphs]

    def _complete(self) -> list[Profile]:
        measured = [with_additions(item.profile(), self._pricing) for item in self._measurements]
        return measured or self._estimated()

    def _start(self) -> None:
        """Begin to solve, in a process that takes and gives files."""
        self._folder = tempfile.TemporaryDirectory(prefix="monetlite-")
        folder = Path(self._folder.name)
        paths = [folder / f"{number}.json" for number in range(len(self._graphs))]
        for path, profile in zip(paths, self._complete(), strict=True):
            profile.save(path)
        solving = self._solving
        command = [sys.executable, "-m", "monetlite", "solve", "--budget", _as_text(self._budget)]
        command += [word for path in paths for word in ("--profile", str(path))]
        command += ["--time-limit", str(PATIENCE * solving.time_limit), "--solver", solving.solver]
        command += ["--tolerance", str(solving.tolerance), "--implementations", solving.implementations]
        command += ["--seed", str(solving.seed), "--output", str(folder / "schedule.yaml")]
        if self._pricing.layout is not None:
            command += ["--layout", self._pricing.layout]
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, cwd=folder
            )
        weakref.finalize(self, _end, self._process)
        if hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def _result(self) -> Schedule | None:
        assert self._process is not None
        assert self._folder is not None
        self.finished = True
        folder = Path(self._folder.name)
        try:
            if self._process.returncode == 0:
                return read_schedule(folder / "schedule.yaml")
            said = (folder / "log").read_text(errors="replace").strip().splitlines()
            self.told.append(f"no better plan was found: {said[-1] if said else 'the solver ended'}")
            return None
        finally:
            self._folder.cleanup()


def _as_text(budget: str | int | float) -> str:
    return budget if isinstance(budget, str) else f"{int(budget)}B"


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()
