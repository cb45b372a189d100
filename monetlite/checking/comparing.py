"""How far tensors are from what they should be."""

from collections.abc import Iterable, Mapping

import torch

MISSING = float("inf")
"""The difference of a tensor that is there in one step and not in the other, or has another shape."""

REORDERED_SUMS = 1e-6
"""Largest relative difference of a gradient that capturing a model, which orders some sums anew, can make."""
SLACK = 10
"""How many times further a schedule may be than plain training with weights that are off by its tolerance, or than
plain training is from itself."""
NEGLIGIBLE = 1e-3
"""Gradients this small beside the model's largest are compared on that scale where sums are reordered: those that
cancel to nothing (of a weight in front of a normalisation) are rounding errors in plain training too."""


def difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest magnitude, or over `least` where that is more.

    0 says that both have the same numbers, those that are not a number in the same places included.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return MISSING
    if torch.equal(expected, found):
        return 0.0
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    expected, found = expected.double(), found.double()
    worst = (expected - found).abs().max().item()
    largest = max(expected.abs().max().item(), least)
    if worst != worst:
        return 0.0 if torch.equal(expected.nan_to_num(), found.nan_to_num()) else MISSING
    return worst / largest if largest > 0 else worst


def differences(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], least: float = 0.0
) -> dict[str, float]:
    """The difference of each tensor; one that is only in one of both is `MISSING`."""
    return {
        name: difference(expected[name], found[name], least) if name in expected and name in found else MISSING
        for name in (*expected, *(name for name in found if name not in expected))
    }


def negligible(tensors: Iterable[torch.Tensor], tolerance: float) -> float:
    """What is next to nothing beside some tensors' largest number, where a tolerance allows for rounding."""
    if tolerance <= REORDERED_SUMS:
        return 0.0
    return NEGLIGIBLE * max((item.double().abs().max().item() for item in tensors if item.numel()), default=0.0)


__all__ = ["MISSING", "REORDERED_SUMS", "SLACK", "difference", "differences", "negligible"]
