"""Train PyTorch models within a memory budget, by schedules that are solved for.

    schedule = monetlite.optimize(model, example_inputs, budget="6GB")
    model = monetlite.MONeTWrapper(model, schedule)

Heavy imports happen where they are used: running a shared schedule needs torch and YAML alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monetlite.core.errors import MonetliteError

if TYPE_CHECKING:
    from monetlite.checking.comparison import compare
    from monetlite.checking.verification import verify
    from monetlite.core.costs import load_profile
    from monetlite.core.schedule import Schedule
    from monetlite.core.simulate import simulate
    from monetlite.planning.budgets import solve, sweep
    from monetlite.planning.pipeline import optimize
    from monetlite.planning.pricing import profile
    from monetlite.runtime.reserved_memory import limit_reserved
    from monetlite.runtime.wrapper import MONeTWrapper
    from monetlite.tracing import trace
    from monetlite.zoo import load_schedule

__version__ = "0.1.0"

_HOME = {
    "MONeTWrapper": "monetlite.runtime",
    "Schedule": "monetlite.core.schedule",
    "compare": "monetlite.checking.comparison",
    "limit_reserved": "monetlite.runtime",
    "load_profile": "monetlite.core.costs",
    "load_schedule": "monetlite.zoo",
    "optimize": "monetlite.planning.pipeline",
    "simulate": "monetlite.core.simulate",
    "profile": "monetlite.planning.pricing",
    "solve": "monetlite.planning.budgets",
    "sweep": "monetlite.planning.budgets",
    "trace": "monetlite.tracing",
    "verify": "monetlite.checking.verification",
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
