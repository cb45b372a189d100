"""Operators whose results PyTorch returns in storages that are larger than they need.

The mean of a loss's elements is put where those were, and returned with all of their memory: of two megabytes, say,
for one number, which a step would hold for as long as the number. A copy lets go of them.
"""

from collections.abc import Callable
from typing import Any

import torch

from monetlite.operators.traits import aten_name, traits_of


def compacting(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What to run for a call's target: the function itself, or one whose result has the memory that it needs."""
    if not traits_of(target).larger_storages:
        return function

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = function(*args, **kwargs)
        return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made

    run.__name__ = run.__qualname__ = f"compact_{aten_name(target)}"  # by which generated code calls it
    return run


__all__ = ["compacting"]
