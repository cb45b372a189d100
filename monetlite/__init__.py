"""Train PyTorch models within a memory budget, by schedules that are solved for.

    schedule = monetlite.optimize(model, example_inputs, budget="6GB")
    model = monetlite.MONeTWrapper(model, schedule)

Heavy imports happen where they are used: running a shared schedule needs torch and YAML alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monetlite.errors import MonetliteError

if TYPE_CHECKING:
    from monetlite.api import optimize, profile, solve, sweep
    from monetlite.comparison import compare
    from monetlite.files import load_schedule
    from monetlite.files.profiles import load_profile
    from monetlite.runtime.limit import limit_reserved
    from monetlite.runtime.verify import verify
    from monetlite.runtime.wrapper import MONeTWrapper
    from monetlite.schedule import Schedule, simulate
    from monetlite.tracing import trace

__version__ = "0.1.0"

_HOME = {
    "MONeTWrapper": "monetlite.runtime",
    "Schedule": "monetlite.schedule",
    "compare": "monetlite.comparison",
    "limit_reserved": "monetlite.runtime",
    "load_profile": "monetlite.files.profiles",
    "load_schedule": "monetlite.files",
    "optimize": "monetlite.api",
    "profile": "monetlite.api",
    "simulate": "monetlite.schedule",
    "solve": "monetlite.api",
    "sweep": "monetlite.api",
    "trace": "monetlite.tracing",
    "verify": "monetlite.runtime",
}

__all__ = [
    "MONeTWrapper",
    "MonetliteError",
    "Schedule",
    "compare",
    "limit_reserved",
    "load_profile",
    "load_schedule",
    "optimize",
    "profile",
    "simulate",
    "solve",
    "sweep",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'monetlite' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
