"""Preparation of compiled code (`compiled`): from numba's cache, or compiled once by a process of its own.

Compiling takes ten seconds or more of one core. In another process it does not hold up the threads of this one,
and can be left alone when the time is up: it goes on, and the next solve finds its result.
"""

import contextlib
import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numba

from monetlite.core.announcing import warn
from monetlite.core.child_processes import give_way, own_environment
from monetlite.core.costs import Profile, ProfileKind
from monetlite.core.graph import OperatorGraph, Resident
from monetlite.solving.annealing import compiled
from monetlite.solving.annealing.compiled import AnnealingCost
from monetlite.solving.annealing.flat_problem import flatten, keep_everything
from monetlite.solving.annealing.runs import AnnealingRun, Workspace
from monetlite.solving.clock import now
from monetlite.solving.problem import Problem

_COMMAND = "import gc; gc.disable(); from monetlite.solving.annealing.compiling import fill_cache; fill_cache()"
COMPILING_SECONDS = 60.0
"""The most time that a solve waits for its code. A busy machine may take longer: then it solves without."""
_compiling: "subprocess.Popen[bytes] | None" = None
_starting = threading.Lock()
"""Held while that process is looked for or started: several threads of a solve need it at once."""
_loaded = False
"""True once this process has the code."""


def fill_cache() -> None:
    """Compile everything into numba's cache.

    Raises:
        OSError: it can't be kept there.
    """
    _use_everything()
    marker = _marker()
    if marker is not None:
        with contextlib.suppress(OSError):
            marker.write_text(_fingerprint(), encoding="utf-8")


def load() -> None:
    """Compile everything, or load what was compiled. What can't be kept (a full disk) serves this process."""
    global _loaded
    unkept: OSError | None = None
    for left in reversed(range(len(vars(compiled)))):
        try:
            _use_everything()
            break
        except OSError as error:  # One more function is compiled, and not compiled again.
            if not left:
                raise
            unkept = error
    _loaded = True
    if unkept is not None:
        warn(f"each process compiles the search, as numba can't keep it: {unkept}")


def _use_everything() -> None:
    # Compiling depends on types alone: nothing at all will do.
    graph = OperatorGraph(name="empty", operators=(), values=(), resident=Resident())
    flat = flatten(Problem.of(Profile(graph=graph, device="", kind=ProfileKind.ESTIMATED, costs=())))
    workspace = Workspace(flat, 0)
    run = AnnealingRun(keep_everything(flat), AnnealingCost(budget_bytes=1), (1.0, 0.1), (1.0, 2.0), 1)
    workspace.advance(run, 1.0, lambda: False)
    workspace.steps(run.choices, 1)


def ensure_compiled(deadline: float, should_stop: Callable[[], bool] = lambda: False) -> bool:
    """Prepare compiled code by a deadline (of `clock.now`); False if time was too short.

    Where numba has nothing in its cache, another process compiles; it is left to itself when time is up.
    """
    if is_ready() or compiled.cache_folder() is None:  # where nothing is kept, no other process can help
        load()
        return True
    process = _compiler()
    while process.poll() is None:
        if now() >= deadline or should_stop():
            give_way(process)
            return False
        time.sleep(0.05)
    load()
    return True


def await_compiled(tell: Callable[[str], None]) -> None:
    """Prepare compiled code, for a minute at most: once on a machine, and not what a solve's time limit is for.

    `tell` is given a line if that takes time.
    """
    if not is_ready():
        tell(announcement())
        ensure_compiled(now() + COMPILING_SECONDS)


def begin_compiling() -> None:
    """Have another process compile, if numba has nothing in its cache, while this one does something else."""
    if not is_ready() and compiled.cache_folder() is not None:
        _compiler()


def _compiler() -> "subprocess.Popen[bytes]":
    """The process that compiles: the one that an earlier solve left behind, if it is still at it."""
    global _compiling
    with _starting:
        if _compiling is None or _compiling.poll() is not None:
            _compiling = subprocess.Popen(
                [sys.executable, "-c", _COMMAND],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=own_environment(),
            )
        return _compiling


def still_compiling() -> bool:
    """True while a process that was started to compile is at it."""
    return _compiling is not None and _compiling.poll() is None


def announcement() -> str:
    """A line that tells of compiling."""
    if compiled.cache_folder() is not None:
        return "compiling the search, once on this machine"
    return "compiling the search, as each process does: numba has no folder to keep it (NUMBA_CACHE_DIR names one)"


def is_ready() -> bool:
    """True if this process has the code, or numba's cache, for the source as it is, and this version of numba."""
    marker = _marker()
    try:
        return _loaded or (marker is not None and marker.read_text(encoding="utf-8") == _fingerprint())
    except OSError:
        return False


def _marker() -> Path | None:
    """The file beside numba's own that says what was compiled there last."""
    folder = compiled.cache_folder()
    return None if folder is None else folder / "compiled.ready"


def _fingerprint() -> str:
    source = hashlib.sha256(Path(compiled.__file__).read_bytes()).hexdigest()
    return f"{source} numba {numba.__version__} Python {sys.version_info.major}.{sys.version_info.minor}"
