"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def close_matches(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A phrase to end an error with: `; did you mean a, b?`, or nothing.

    Args:
        name: as a person wrote it.
        known: names that there are.
        prefix: put before each suggestion.

    >>> close_matches("resnet5", ["resnet50", "vgg16"])
    '; did you mean resnet50?'
    """
    matches = difflib.get_close_matches(name.lower(), list(known), n=4, cutoff=0.6)
    return did_you_mean(prefix + match for match in matches)


def did_you_mean(names: Iterable[str]) -> str:
    """A phrase to end an error with, that suggests names; nothing without any."""
    suggested = ", ".join(names)
    return f"; did you mean {suggested}?" if suggested else ""
