"""Operators whose results PyTorch returns in storages that are larger than they need.

The mean of a loss's elements is put where those were, and returned with all of their memory: of two megabytes, say,
for one number, which a step would hold for as long as the number. A copy lets go of them.
"""

from collections.abc import Callable
from typing import Any

import torch

_BULKY = frozenset(
    {
        "aten.mse_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.binary_cross_entropy.default",
        "aten.soft_margin_loss.default",
        "aten.col2im.default",
    }
)


def compacting(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What to run for a call's target: the function itself, or one whose result has the memory that it needs."""
    if target not in _BULKY:
        return function

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = function(*args, **kwargs)
        return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made

    run.__name__ = run.__qualname__ = f"compact_{target.split('.')[1]}"  # by which generated code calls it
    return run


__all__ = ["compacting"]
