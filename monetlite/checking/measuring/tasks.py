"""What is measured: a forward pass, or a step of training."""

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monetlite.checking.measuring.results import Mode
from monetlite.checking.trainee import default_loss
from monetlite.profiling.step_additions import make_optimizer
from monetlite.tracing.build import Inputs, resident_bytes, split_inputs

if TYPE_CHECKING:
    from monetlite.models import BuiltModel

_LEARNING_RATE = 1e-6
"""Steps are real but small, so that the numbers of a long measurement stay numbers."""


class Task:
    """One mode of a model, to be run as often as one likes: each run leaves what it found.

    `labels_left_out` says whether it runs on the inputs without their labels, as inference has none.
    """

    def __init__(
        self, built: "BuiltModel", mode: Mode, *, device: str, optimizer: str | None, autocast: str | None
    ) -> None:
        self._model, self._mode, self._device = built.model, mode, device
        self._autocast = getattr(torch, autocast) if autocast else None
        self.labels_left_out = mode is Mode.INFERENCE and _runs_without_labels(built.model, built.example_inputs)
        inputs = built.example_inputs
        if self.labels_left_out and isinstance(inputs, dict):
            inputs = {name: item for name, item in inputs.items() if name != "labels"}
        self._args, self._kwargs = split_inputs(inputs)
        self._tensors = [item for item in pytree.tree_leaves(inputs) if isinstance(item, torch.Tensor)]
        self._optimizer = None
        if mode is Mode.TRAINING and optimizer is not None:
            self._optimizer = make_optimizer(optimizer, built.model.parameters(), _LEARNING_RATE)
        self._model.train(mode is Mode.TRAINING)

    def run(self) -> None:
        """A forward pass, or a step of training from no gradients to no gradients."""
        if self._mode is Mode.INFERENCE:
            with torch.no_grad(), self._casting():
                self._model(*self._args, **self._kwargs)
            return
        with self._casting():
            output = self._model(*self._args, **self._kwargs)  # held to the end of the step, as in a loop
            loss = default_loss(output)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        if self._optimizer is not None:
            self._optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for tensor in (*self._model.parameters(), *self._tensors):
            if tensor.is_leaf:
                tensor.grad = None

    def resident_bytes(self) -> int:
        """What is there when a run begins: parameters, buffers, inputs, and the optimizer's state."""
        state = [] if self._optimizer is None else pytree.tree_leaves(list(self._optimizer.state.values()))
        return resident_bytes(self._model, [*self._tensors, *state]).total

    def _casting(self) -> torch.autocast:
        return torch.autocast(self._device, self._autocast, enabled=self._autocast is not None)


def _runs_without_labels(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a model that computes its loss from `labels` can also do without."""
    if not isinstance(inputs, dict) or "labels" not in inputs:
        return False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False  # transformers makes the decoder's inputs of them
    labels = inspect.signature(model.forward).parameters.get("labels")
    return labels is not None and labels.default is None


__all__ = ["Task"]
