"""Train PyTorch models within a memory budget, by schedules that are solved for.

    schedule = monetlite.optimize(model, example_inputs, budget="6GB")
    model = monetlite.within(model, schedule)

Heavy imports happen where they are used: running a shared schedule needs torch, PyYAML and msgspec alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from monetlite.core.errors import MonetliteError

if TYPE_CHECKING:  # for type checkers and editors; `x as x` exports a name
    from monetlite.checking.comparison.runner import compare as compare
    from monetlite.checking.verification import verify as verify
    from monetlite.core.costs import load_profile as load_profile
    from monetlite.core.schedule import Schedule as Schedule
    from monetlite.core.simulate import simulate as simulate
    from monetlite.planning.budgets import solve as solve
    from monetlite.planning.budgets import sweep as sweep
    from monetlite.planning.compile_budget import compile_within as compile_within
    from monetlite.planning.pipeline import optimize as optimize
    from monetlite.planning.pipeline import profile as profile
    from monetlite.runtime.backward_updates import step_in_backward as step_in_backward
    from monetlite.runtime.in_place import release as release
    from monetlite.runtime.in_place import schedule_of as schedule_of
    from monetlite.runtime.in_place import within as within
    from monetlite.runtime.reserved_memory import limit_reserved as limit_reserved
    from monetlite.runtime.wrapper import MONeTWrapper as MONeTWrapper
    from monetlite.tracing import trace as trace
    from monetlite.zoo.collection import load_schedule as load_schedule

__version__ = "0.1.0"

_HOME = {
    "MONeTWrapper": "monetlite.runtime.wrapper",
    "Schedule": "monetlite.core.schedule",
    "compare": "monetlite.checking.comparison.runner",
    "compile_within": "monetlite.planning.compile_budget",
    "limit_reserved": "monetlite.runtime.reserved_memory",
    "load_profile": "monetlite.core.costs",
    "load_schedule": "monetlite.zoo.collection",
    "optimize": "monetlite.planning.pipeline",
    "profile": "monetlite.planning.pipeline",
    "release": "monetlite.runtime.in_place",
    "schedule_of": "monetlite.runtime.in_place",
    "simulate": "monetlite.core.simulate",
    "solve": "monetlite.planning.budgets",
    "step_in_backward": "monetlite.runtime.backward_updates",
    "sweep": "monetlite.planning.budgets",
    "trace": "monetlite.tracing",
    "verify": "monetlite.checking.verification",
    "within": "monetlite.runtime.in_place",
}
"""Modules of the public names, which are imported when they are first used."""

__all__ = ["MonetliteError", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'monetlite' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
