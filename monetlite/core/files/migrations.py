"""Schedule files of earlier versions, brought forward one version at a time."""

from collections.abc import Callable, Mapping
from typing import Any

VERSION = 2
"""What is written now."""


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Version 2 says how the model can be built again, and has a digest of each operator; both may be missing."""
    return {**data, "source": None, "operator_digests": None}


_STEPS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""From each version to the one after it."""


def migrate(data: dict[str, Any]) -> dict[str, Any]:
    """The same file as this version writes it, if its version is one that is known."""
    while (step := _STEPS.get(_version(data))) is not None:
        data = {**step(data), "version": _version(data) + 1}
    return data


def _version(data: dict[str, Any]) -> int:
    version = data.get("version")
    return version if isinstance(version, int) and not isinstance(version, bool) else -1


__all__ = ["VERSION", "migrate"]
