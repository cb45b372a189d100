"""Differences of a step's results from plain training's."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from monetlite.checking.trainee import Snapshot, Trainee, changed_weights, off_by

MISSING = float("inf")
"""Difference of a tensor, or a finite number of it, that only one of two steps has, or that has another shape."""
CAPTURE_DIFFERENCE = 1e-6
"""Largest relative difference of a gradient that capturing a model can make: it orders some sums anew."""
ROUNDINGS = 2
"""The same of gradients in 16 bits: steps between two numbers of their dtype."""
SLACK = 10
"""Factor that is allowed over the differences of plain training from itself: of two steps, or of one from weights
that are off by a tolerance."""
NEGLIGIBLE = 1e-3
"""Tensors this small beside the model's largest are compared on that scale where sums are reordered: gradients that
cancel to nothing (of a weight in front of a normalisation) are rounding errors in plain training too."""


PIECE = 2**18
"""Elements of a tensor that are compared at a time."""


@dataclass(frozen=True, kw_only=True)
class StepDifferences:
    """Differences of a step's results from plain training's: the largest absolute one over the largest magnitude.

    Attributes:
        gradients: for each parameter and input with a gradient.
        buffers: for each of the module's buffers after the step.
        loss: of the loss.
        random_state: True if the generator is left as plain training leaves it.
    """

    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    loss: float
    random_state: bool

    @property
    def differences(self) -> dict[str, float]:
        """Everything that differs, by name, the largest difference first."""
        everything = {"the loss": self.loss, **self.gradients, **self.buffers}
        differing = [(name, difference) for name, difference in everything.items() if difference > 0]
        return dict(sorted(differing, key=lambda item: -item[1]))

    @property
    def largest_difference(self) -> float:
        return max(self.differences.values(), default=0.0)

    @property
    def largest_of_gradients(self) -> float:
        return max(self.gradients.values(), default=0.0)


class Reference:
    """A step of plain training from one seed, with which other steps are compared.

    `expected` is its result. Every step that it takes begins with the same buffers.
    """

    def __init__(self, plain: Trainee, seed: int) -> None:
        self.plain, self.seed = plain, seed
        self._buffers = {name: buffer.detach().clone() for name, buffer in plain.model.named_buffers()}
        self.expected = plain.snapshot(seed)

    def take(self, trainee: Trainee, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None) -> Snapshot:
        """Take a step of a trainee, from weights that are changed meanwhile."""
        self.restore(trainee.model)
        with changed_weights(trainee.model, change) if change else contextlib.nullcontext():
            return trainee.snapshot(self.seed)

    def restore(self, model: nn.Module) -> None:
        """Set a model's buffers to those that the reference began with."""
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])

    def compare(self, found: Snapshot, tolerance: float = 0.0, other: Snapshot | None = None) -> StepDifferences:
        """Compare a step's results with the expected ones, or with those of another step of plain training.

        With a tolerance that allows for rounding, negligible gradients are compared on the scale of the largest,
        and so are negligible buffers.
        """
        expected = other or self.expected
        least_gradient = negligible(self.expected.gradients.values(), tolerance)
        floating = (buffer for buffer in self.expected.buffers.values() if buffer.is_floating_point())
        return StepDifferences(
            gradients=differences(expected.gradients, found.gradients, least_gradient),
            buffers=differences(expected.buffers, found.buffers, negligible(floating, tolerance)),
            loss=difference(expected.loss, found.loss),
            random_state=torch.equal(expected.random_state, found.random_state),
        )

    @property
    def reordered_sums(self) -> float:
        """Largest relative difference that adding up in another order can make, in the dtypes of the gradients."""
        dtypes = {item.dtype for item in self.expected.gradients.values()}
        return max([CAPTURE_DIFFERENCE, *(ROUNDINGS * torch.finfo(dtype).eps for dtype in dtypes)])

    def nudged(self, fraction: float, tolerance: float) -> StepDifferences:
        """Differences of plain training's step from itself when every weight is off by a fraction, up or down."""
        return self.compare(self.take(self.plain, off_by(fraction, self.seed)), tolerance)


def difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest finite magnitude, or over `least` where that is more.

    Numbers that are the same, infinite or not a number in both, do not differ; one that is so in only one of them
    is `MISSING`.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return MISSING
    if torch.equal(expected, found):
        return 0.0
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    worst = _largest(map(_distances, _pieces(expected), _pieces(found)))
    if not math.isfinite(worst):
        return MISSING
    largest = max(_magnitude(expected), least)
    return worst / largest if largest > 0 else worst


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's numbers in float64, some at a time: all at once take many times a large gradient's memory."""
    return (piece.double() for piece in torch.split(tensor.flatten(), PIECE))


def _distances(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    same = (expected == found) | (expected.isnan() & found.isnan())
    return (expected - found).abs().masked_fill(same, 0.0)


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 if none is finite."""
    return _largest(piece.abs().nan_to_num(0.0, posinf=0.0) for piece in _pieces(tensor))


def _largest(pieces: Iterable[torch.Tensor]) -> float:
    """The largest number of some tensors; NaN if one of them has one."""
    return torch.stack([piece.max() for piece in pieces]).max().item()


def differences(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], least: float = 0.0
) -> dict[str, float]:
    """The difference of each tensor; `MISSING` for one that only one of both has."""
    return {
        name: difference(expected[name], found[name], least) if name in expected and name in found else MISSING
        for name in dict.fromkeys((*expected, *found))
    }


def negligible(tensors: Iterable[torch.Tensor], tolerance: float) -> float:
    """Magnitude that is negligible beside the largest of some tensors; 0 if the tolerance allows no rounding."""
    if tolerance <= CAPTURE_DIFFERENCE:
        return 0.0
    return NEGLIGIBLE * max((_magnitude(item) for item in tensors if item.numel()), default=0.0)
