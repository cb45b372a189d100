"""What a way to train does to a step that plain training doesn't, decided by running both from one seed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from monetlite.checking.comparing import differences, negligible
from monetlite.checking.trainee import Trainee, changed_weights, off_by
from monetlite.operators.random import forked_state

ROUNDING, COARSE_ROUNDING = 1e-3, 5e-2
"""Relative differences that other kernels and other orders of sums may always make; in 16 bits, or TF32."""
NUDGE, COARSE_NUDGE = 1e-6, 1e-2
"""How far off, relatively, weights may be to tell what rounding amounts to in this model."""
SLACK = 10
"""How many times further than with such weights gradients and buffers may be."""
OWN_GRADIENT = 0.02
"""How far, relatively, a loss may change from what its gradient says, beyond what plain training's does."""
STEP = 0.01
"""What part of the loss such a check changes."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step leaves behind, on the CPU."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor


def outcome(trainee: Trainee, seed: int) -> Outcome:
    """Take one step from a seed."""
    found = trainee.snapshot(seed)
    return Outcome(
        loss=found.loss.item(),
        gradients={name: tensor.cpu() for name, tensor in found.gradients.items()},
        buffers={name: tensor.cpu() for name, tensor in found.buffers.items()},
        random_state=found.random_state,
    )


def _largest_difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    least = negligible(expected.values(), ROUNDING)
    return max(differences(expected, found, least).values(), default=0.0)


class Examiner:
    """Compares contenders' steps with plain training's, from one seed and the same buffers."""

    def __init__(self, plain: Trainee, seed: int, *, coarse: bool) -> None:
        self._seed = seed
        self._plain = plain
        self._rounding = COARSE_ROUNDING if coarse else ROUNDING
        self._nudge = COARSE_NUDGE if coarse else NUDGE
        self._pristine = {name: buffer.clone() for name, buffer in plain.model.named_buffers()}
        self._expected = outcome(plain, seed)
        self._twice = outcome(plain, seed)
        """With buffers after a second forward pass over the same batch."""
        self._restore(plain.model)
        self._normalised = {
            f"{name}.{buffer}" if name else buffer
            for name, module in plain.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for buffer, _ in module.named_buffers(recurse=False)
        }

    def examine(self, trainee: Trainee) -> tuple[float, tuple[str, ...]]:
        """The largest difference of a gradient from plain training's, and in words what is otherwise."""
        self._restore(trainee.model)
        found = outcome(trainee, self._seed)
        self._restore(trainee.model)
        largest = self._farthest_gradient(found)
        same_state = torch.equal(self._expected.random_state, found.random_state)
        faults = (
            "" if largest <= self._rounding else self._wrong_gradients(trainee, found, largest),
            self._wrong_buffers(found),
            "" if same_state else "generator left in another state",
        )
        return largest, tuple(fault for fault in faults if fault)

    def _farthest_gradient(self, found: Outcome) -> float:
        expected = self._expected.gradients
        least = negligible(expected.values(), self._rounding)
        return max(differences(expected, found.gradients, least).values(), default=0.0)

    def _wrong_buffers(self, found: Outcome) -> str:
        unequal = self._beyond_rounding(self._moved(self._expected, found))
        moved = self._moved(self._expected, self._nudged) if unequal else {}
        wrong = {name for name, difference in unequal.items() if difference > SLACK * moved.get(name, 0.0)}
        if not wrong:
            return ""
        from_twice = self._beyond_rounding(self._moved(self._twice, found))
        what = "statistics" if self._normalised.issuperset(wrong) else "buffers"
        return f"other {what}" if wrong & from_twice.keys() else f"{what} updated twice"

    def _moved(self, expected: Outcome, found: Outcome) -> dict[str, float]:
        """How far each buffer is; those that are next to nothing beside the largest, on the scale of that."""
        floating = (buffer for buffer in self._expected.buffers.values() if buffer.is_floating_point())
        return differences(expected.buffers, found.buffers, negligible(floating, self._rounding))

    def _beyond_rounding(self, of: dict[str, float]) -> dict[str, float]:
        return {name: difference for name, difference in of.items() if difference > self._rounding}

    def _wrong_gradients(self, trainee: Trainee, found: Outcome, largest: float) -> str:
        """Other random numbers than plain training's are one thing; a gradient that isn't the loss's is another."""
        if not abs(self._change_of_loss(trainee, found) - self._own_gradient) <= OWN_GRADIENT:
            return "wrong gradients: not those of its own loss"
        if largest <= SLACK * self._sensitivity:
            return ""
        draws = not torch.equal(self._random_state_before(), self._expected.random_state)
        return "other dropout masks" if draws else "other gradients"

    @functools.cached_property
    def _own_gradient(self) -> float:
        return self._change_of_loss(self._plain, self._expected)

    @functools.cached_property
    def _nudged(self) -> Outcome:
        """Plain training's step when every weight is off by rounding, up or down."""
        return self._after(self._plain, off_by(self._nudge, self._seed))

    @functools.cached_property
    def _sensitivity(self) -> float:
        """How far its gradients move then."""
        return self._farthest_gradient(self._nudged)

    def _change_of_loss(self, trainee: Trainee, found: Outcome) -> float:
        """How much the loss changes along its gradient, over what the gradient says: 1 if that is right."""
        along = {
            name: found.gradients[name] for name, _ in trainee.model.named_parameters() if name in found.gradients
        }
        squared = sum(gradient.double().square().sum().item() for gradient in along.values())
        if not squared > 0:
            return 0.0
        distance = STEP * abs(found.loss) / squared

        def loss_at(signed_distance: float) -> float:
            def moved(name: str, weights: torch.Tensor) -> torch.Tensor:
                return weights.add(along[name], alpha=signed_distance) if name in along else weights

            return self._after(trainee, moved).loss

        return (loss_at(distance) - loss_at(-distance)) / (2 * distance * squared)

    def _after(self, trainee: Trainee, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Outcome:
        """The outcome of a step from weights that are changed, and are as they were afterwards."""
        self._restore(trainee.model)
        with changed_weights(trainee.model, change):
            return outcome(trainee, self._seed)

    def _random_state_before(self) -> torch.Tensor:
        """The generator's state where the step begins."""
        with forked_state(self._plain.device):
            torch.manual_seed(self._seed)
            return torch.cuda.get_rng_state() if self._plain.device == "cuda" else torch.get_rng_state()

    def _restore(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in self._pristine:
                    buffer.copy_(self._pristine[name])


__all__ = ["Examiner", "Outcome", "outcome"]
