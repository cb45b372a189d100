"""A model with its inputs, and the helpers that build one."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from monetlite.core.errors import ModelError
from monetlite.core.source import Dtype, ModelSource, is_shareable

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_ELEMENTS = 2**59
"""Numbers of eight bytes in the largest tensor that torch can have."""
DEFAULT_BATCH = 32
"""The batch where neither the person nor the model's paper names one."""


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model in training mode with inputs for one training step.

    Attributes:
        name: the specification it was built from, in its canonical spelling.
        model: the module. It returns a loss, or outputs whose loss the person computes outside.
        example_inputs: positional arguments as a tuple, or keyword arguments as a dict.
        batch: the size of the inputs' first dimension.
        description: one line for people: the model, its parameters, the inputs, what it returns.
        source: what to build the same from elsewhere; None for a person's own code and files.
    """

    name: str
    model: "nn.Module"
    example_inputs: "tuple[Any, ...] | dict[str, Any]"
    batch: int
    description: str
    source: ModelSource | None = None


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a model beside its name. None leaves the choice to the model."""

    batch: int | None = None
    input_size: tuple[int, int] | None = None
    """Height and width of an image, in pixels."""
    dtype: "torch.dtype | None" = None
    """Type of parameters and floating-point inputs. None keeps the one that the model is built with."""
    sequence_length: int | None = None
    """Tokens of each sequence."""
    meta: bool = False
    """Build on torch's meta device: shapes and dtypes without memory."""

    def __post_init__(self) -> None:
        sizes = {"batch": self.batch, "sequence_length": self.sequence_length}
        if self.input_size is not None:
            sizes |= {"input height": self.input_size[0], "input width": self.input_size[1]}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ModelError(f"{name} is {size}; give a positive number")

    def device(self) -> contextlib.AbstractContextManager[object]:
        """The context to build in: the meta device if it was asked for, else whatever is in force."""
        import torch

        return torch.device("meta") if self.meta else contextlib.nullcontext()

    def image(self, spec: str, channels: int, default_batch: int, default_size: tuple[int, int]) -> "torch.Tensor":
        """A batch of images (N, `channels`, H, W) of standard normal pixels; the model takes nothing else."""
        import torch

        if self.sequence_length is not None:
            raise ModelError(f"{spec} takes images, not sequences; drop the sequence length")
        height, width = self.input_size or default_size
        shape = self.batch or default_batch, channels, height, width
        if math.prod(shape) > MAX_ELEMENTS:
            raise ModelError(f"{spec} can't take {'×'.join(map(str, shape))} images: no tensor has so many numbers")
        with self.device():
            return torch.randn(shape, dtype=self.dtype)


def finish(
    name: str,
    model: "nn.Module",
    example_inputs: "tuple[Any, ...] | dict[str, Any]",
    options: BuildOptions,
    *,
    title: str,
    returns: str,
) -> BuiltModel:
    """Convert to the dtype asked for, set training mode and describe.

    Raises:
        ModelError: lazy parameters, or no tensor of at least one dimension among the inputs, so no batch.
    """
    import torch

    from monetlite.fx.torch_internals.torch_pytree import tree_map_only

    if any(torch.nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(f"{name} has lazy parameters without a shape; call the model once before returning it")
    if options.dtype is not None:
        model = model.to(options.dtype)
        example_inputs = tree_map_only(
            torch.Tensor,
            lambda item: item.to(options.dtype) if item.is_floating_point() else item,
            example_inputs,
        )
    model.train()
    tensors = [(label, tensor) for label, tensor in _named_tensors(example_inputs) if tensor.dim() > 0]
    if not tensors:
        raise ModelError(f"{name}: the example inputs hold no tensor with a batch dimension; return at least one")
    source = None
    if is_shareable(name):
        images = next((tensor.shape for _, tensor in tensors if tensor.dim() == 4), None)
        tokens = next((tensor.shape for _, tensor in tensors if tensor.dim() == 2), None)
        source = ModelSource(
            model=name,
            batch=int(tensors[0][1].shape[0]),
            input_size=None if images is None else (int(images[2]), int(images[3])),
            sequence_length=None if images is not None or tokens is None else int(tokens[1]),
            dtype=None if options.dtype is None else cast(Dtype, str(options.dtype).removeprefix("torch.")),
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    count = f"{parameters / 1e6:.1f} M" if parameters >= 10**6 else f"{parameters:,}"
    inputs = ", ".join(
        f"{label}{'×'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
        for label, tensor in tensors
    )
    return BuiltModel(
        name=name,
        model=model,
        example_inputs=example_inputs,
        batch=int(tensors[0][1].shape[0]),
        description=f"{title}: {count} parameters; input {inputs}; returns {returns}",
        source=source,
    )


def _named_tensors(item: Any, label: str = "") -> "Iterator[tuple[str, torch.Tensor]]":
    import torch

    if isinstance(item, torch.Tensor):
        yield f"{label} " if label else "", item
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _named_tensors(value, str(key))
    elif isinstance(item, tuple | list):
        for value in item:
            yield from _named_tensors(value, label)
