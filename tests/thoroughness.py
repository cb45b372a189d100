"""Which cases of a test run every time, and which where there is time (`MONETLITE_THOROUGH=1`)."""

import os
from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cases of a parametrized test, of which only the chosen ones run every time."""
    return [case if case in chosen else _rarely(case) for case in cases]


def _rarely(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)


def some(count: int) -> int:
    """Number of examples of a test that draws them: all where there is time, and a third of them every time."""
    return count if "MONETLITE_THOROUGH" in os.environ else count // 3
