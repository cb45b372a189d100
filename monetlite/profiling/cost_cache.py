"""Measured costs on disk: a call is measured once on a machine, not once for each model.

Costs that were measured while other programs ran are too large, and would mislead every later solve: a call that
waits for a core waits a whole time slice of the other program, 30 ms instead of 0.06. So the slowest known costs
are checked again, once in a process.
"""

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from monetlite.core.costs import Cost
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.units import Amount

VERSION = 9
SAVE_SECONDS = 20.0
"""Most measuring time that is lost when a process is killed."""
CHECKED = 16
"""Number of known calls that are measured again: the slowest, where those that had to wait come first."""
SLOW_MS = 1.0
"""Faster calls are not checked: waiting for another program takes longer."""
DISTURBED = 2 / 3
"""A known cost is too large if the call now takes less than this fraction of it."""
MIN_DISTURBED = 2
"""Number of costs that must be too large before all are distrusted: one alone may be chance."""

_checked: set[str] = set()
"""Calls whose costs were found to hold in this process."""
_log = logging.getLogger(__name__)


class _CacheFile(msgspec.Struct):
    costs: dict[str, Annotated[list[Amount], Meta(min_length=2, max_length=3)]]
    """Latency, workspace and, on a GPU, the host's time."""


class CostCache:
    """Costs by call signature, for one environment. `save` writes what has been added.

    The folder is what `MONETLITE_CACHE` names, or the platform's cache folder. Without platformdirs, which knows
    the latter, nothing is kept.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        key = hashlib.sha256(json.dumps([VERSION, dict(environment)], sort_keys=True).encode()).hexdigest()[:16]
        folder = os.environ.get("MONETLITE_CACHE") or _platform_folder()
        self.path = Path(folder) / "costs" / f"{key}.json" if folder else None
        self._environment = dict(environment)
        self._costs = self._load()
        self._added: dict[str, list[float]] = {}
        self._forgotten: set[str] = set()
        self._saved = time.monotonic()

    def get(self, signature: str) -> Cost | None:
        found = self._costs.get(signature)
        if found is None:
            return None
        latency_ms, workspace_bytes, *host_ms = found
        return Cost(latency_ms=latency_ms, workspace_bytes=int(workspace_bytes), host_ms=sum(host_ms))

    def put(self, signature: str, cost: Cost) -> None:
        """Add a cost. The file is written every `SAVE_SECONDS`."""
        found = [cost.latency_ms, cost.workspace_bytes, *[cost.host_ms] * (cost.host_ms > 0)]
        self._costs[signature] = self._added[signature] = found
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def forget(self, signatures: Iterable[str]) -> None:
        for signature in signatures:
            self._forgotten.add(signature)
            self._costs.pop(signature, None)
            self._added.pop(signature, None)

    def save(self) -> None:
        """Write the cache, with what other processes have written. What can't be written is measured again."""
        self._saved = time.monotonic()
        if not (self._added or self._forgotten) or self.path is None:
            return
        written = {key: cost for key, cost in self._load().items() if key not in self._forgotten}
        content = json.dumps({"environment": self._environment, "costs": written | self._added})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, content)
            self._added, self._forgotten = {}, set()
        except (OSError, ScheduleFileError) as error:
            _warn_once(f"measured costs could not be kept in {self.path}: {error}")

    def _load(self) -> dict[str, list[float]]:
        if self.path is None:
            return {}
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_CacheFile).costs
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            _warn_once(f"measured costs in {self.path} can't be read ({error}) and will be measured again")
            return {}


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def measured_while_disturbed(known: Mapping[str, Cost], latency_ms: Callable[[str], float]) -> bool:
    """Tell whether known costs are too large, by measuring the slowest again.

    Args:
        known: costs by call signature.
        latency_ms: measures a call, by its signature.
    """
    slowest = sorted(known, key=lambda signature: known[signature].latency_ms, reverse=True)[:CHECKED]
    disturbed = 0
    for signature in slowest:
        known_ms = known[signature].latency_ms
        if signature in _checked or known_ms < SLOW_MS:
            continue
        if latency_ms(signature) >= DISTURBED * known_ms:
            _checked.add(signature)
        elif (disturbed := disturbed + 1) == MIN_DISTURBED:
            return True
    return False


def _platform_folder() -> str | None:
    """The platform's folder for caches; None without platformdirs."""
    try:
        import platformdirs
    except ImportError:
        _log.warning("measured costs are not kept: install platformdirs, or name a folder in MONETLITE_CACHE")
        return None
    return platformdirs.user_cache_dir("monetlite")
