"""Faults of a way to train: what its step does otherwise than plain training's, from the same seed and buffers."""

import functools
from collections.abc import Mapping

import torch

from monetlite.checking.step_differences import SLACK, Reference, StepDifferences
from monetlite.checking.trainee import Snapshot, Trainee

ROUNDING, COARSE_ROUNDING = 1e-3, 5e-2
"""Relative differences that other kernels and other orders of sums may always make; in 16 bits, or TF32."""
NUDGE, COARSE_NUDGE = 1e-6, 1e-2
"""Relative change of the weights that shows the effect of rounding in this model."""
OWN_GRADIENT = 0.02
"""Relative difference allowed between a loss's change and what its gradient says, beyond plain training's."""
LOSS_CHANGE = 0.01
"""Fraction of the loss that such a check changes."""


class Examiner:
    """Compares contenders' steps with plain training's."""

    def __init__(self, plain: Trainee, seed: int, *, coarse: bool) -> None:
        self.reference = Reference(plain, seed)
        self._rounding = COARSE_ROUNDING if coarse else ROUNDING
        self._nudge = COARSE_NUDGE if coarse else NUDGE
        self.reference.restore(plain.model)

    def examine(self, trainee: Trainee) -> tuple[float, tuple[str, ...]]:
        """The largest difference of a gradient from plain training's, and the faults in words."""
        found = self.reference.take(trainee)
        self.reference.restore(trainee.model)
        moved = self.reference.compare(found, self._rounding)
        faults = (
            self._gradient_fault(trainee, found, moved),
            self._buffer_fault(found, moved),
            "" if moved.random_state else "generator left in another state",
        )
        return moved.largest_of_gradients, tuple(fault for fault in faults if fault)

    def _gradient_fault(self, trainee: Trainee, found: Snapshot, moved: StepDifferences) -> str:
        """Other random numbers than plain training's are one thing; a gradient that isn't the loss's is another."""
        largest = moved.largest_of_gradients
        if largest <= self._rounding:
            return ""
        if not abs(self._change_of_loss(trainee, found) - self._own_gradient) <= OWN_GRADIENT:
            return "wrong gradients: not those of its own loss"
        if largest <= SLACK * self._nudged.largest_of_gradients:
            return ""
        return "other dropout masks" if self.reference.expected.drew else "other gradients"

    def _buffer_fault(self, found: Snapshot, moved: StepDifferences) -> str:
        unequal = self._beyond_rounding(moved.buffers)
        wrong = {name for name in unequal if moved.buffers[name] > SLACK * self._nudged.buffers.get(name, 0.0)}
        if not wrong:
            return ""
        kind = "statistics" if wrong <= self._normalised else "buffers"
        from_twice = self._beyond_rounding(self.reference.compare(found, self._rounding, self._twice).buffers)
        return f"other {kind}" if wrong & from_twice else f"{kind} updated twice"

    def _beyond_rounding(self, of: Mapping[str, float]) -> set[str]:
        return {name for name, difference in of.items() if difference > self._rounding}

    @functools.cached_property
    def _normalised(self) -> set[str]:
        """Names of the buffers of normalisations."""
        return {
            f"{name}.{buffer}" if name else buffer
            for name, module in self.reference.plain.model.named_modules()
            if hasattr(module, "running_mean")
            for buffer, _ in module.named_buffers(recurse=False)
        }

    @functools.cached_property
    def _twice(self) -> Snapshot:
        """Plain training's second step over the same batch."""
        self.reference.take(self.reference.plain)
        return self.reference.plain.snapshot(self.reference.seed)

    @functools.cached_property
    def _nudged(self) -> StepDifferences:
        return self.reference.nudged(self._nudge, self._rounding)

    @functools.cached_property
    def _own_gradient(self) -> float:
        return self._change_of_loss(self.reference.plain, self.reference.expected)

    def _change_of_loss(self, trainee: Trainee, found: Snapshot) -> float:
        """Change of the loss along its gradient, over what the gradient says: 1 if that is right."""
        along = {
            name: found.gradients[name] for name, _ in trainee.model.named_parameters() if name in found.gradients
        }
        squared = sum(gradient.double().square().sum().item() for gradient in along.values())
        if not squared > 0:
            return 0.0
        distance = LOSS_CHANGE * abs(found.loss.item()) / squared

        def loss_at(signed_distance: float) -> float:
            def moved(name: str, weights: torch.Tensor) -> torch.Tensor:
                return weights.add(along[name], alpha=signed_distance) if name in along else weights

            return self.reference.take(trainee, moved).loss.item()

        return (loss_at(distance) - loss_at(-distance)) / (2 * distance * squared)
