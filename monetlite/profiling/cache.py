"""Measured costs on disk, so that a call is measured once on a machine, not once a model."""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from monetlite.core.costs import Cost
from monetlite.core.errors import ScheduleFileError
from monetlite.core.files.atomic import write_atomically

VERSION = 6
SAVE_SECONDS = 20.0
"""How much measuring may be lost."""
_log = logging.getLogger(__name__)


class CostCache:
    """Costs by call signature, for one environment. `save` writes what has been added.

    The folder is what `MONETLITE_CACHE` names, or the platform's cache folder. Where platformdirs is not there to
    say which that is, as on a machine that only measures, nothing is kept.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        key = hashlib.sha256(json.dumps([VERSION, dict(environment)], sort_keys=True).encode()).hexdigest()[:16]
        folder = os.environ.get("MONETLITE_CACHE") or _platform_folder()
        self.path = Path(folder) / "costs" / f"{key}.json" if folder else None
        self._environment = dict(environment)
        self._costs = self._load()
        self._changed = False
        self._saved = time.monotonic()

    def get(self, signature: str) -> Cost | None:
        found = self._costs.get(signature)
        return None if found is None else Cost(latency_ms=found[0], workspace_bytes=int(found[1]))

    def put(self, signature: str, cost: Cost) -> None:
        """Add a cost; what has been added is written now and then, for a run that is killed."""
        self._costs[signature] = (cost.latency_ms, cost.workspace_bytes)
        self._changed = True
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def forget(self, signatures: Iterable[str]) -> None:
        for signature in signatures:
            self._costs.pop(signature, None)
            self._changed = True

    def save(self) -> None:
        """Write the cache; a folder that can't be written costs the next run its time, and nothing else."""
        self._saved = time.monotonic()
        if not self._changed or self.path is None:
            return
        text = json.dumps({"environment": self._environment, "costs": self._costs})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text)
            self._changed = False
        except (OSError, ScheduleFileError) as error:
            _log.warning("measured costs could not be kept in %s: %s", self.path, error)

    def _load(self) -> dict[str, tuple[float, float]]:
        if self.path is None:
            return {}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            costs = {str(key): (float(item[0]), float(item[1])) for key, item in data["costs"].items()}
            if not all(math.isfinite(number) and number >= 0 for item in costs.values() for number in item):
                raise ValueError("a cost is not a number, or negative")
            return costs
        except FileNotFoundError:
            return {}
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            _log.warning("measured costs in %s can't be read (%s) and will be measured again", self.path, error)
            return {}


def _platform_folder() -> str | None:
    """The platform's folder for caches; None, said once in the log, where platformdirs is not installed."""
    try:
        import platformdirs
    except ImportError:
        _log.warning("measured costs are not kept: install platformdirs, or name a folder in MONETLITE_CACHE")
        return None
    return platformdirs.user_cache_dir("monetlite")
