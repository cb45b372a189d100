"""Which cases of a test run every time, and which where there is time (`MONETLITE_THOROUGH=1`)."""

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases of a parametrized test, of which only the chosen ones run every time."""
    return [case if case in chosen else _rarely(case) for case in cases]


def _rarely(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
