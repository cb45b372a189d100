"""Strides of fake tensors where a dimension is one.

Any stride leads to the same elements there, and torch's fake tensors have others than real ones. But kernels choose
by strides whether images are in channels-last order. Rows of a batch of one that become images, as after attention
in a decoder, would be taken for such: a group norm would not copy them, as plain training does, and then fail.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from monetlite.fx.torch_internals.torch_dispatch import (
    DispatchKey,
    OpOverload,
    PythonKernel,
    faked_by,
    python_kernel,
    special_fake_functions,
    traced_as,
)
from monetlite.fx.torch_internals.torch_symbols import same_sizes
from monetlite.fx.view_strides import strides_of_view

_BINARY = [getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")]


@contextlib.contextmanager
def ones_laid_out_as_real() -> Iterator[None]:
    """Make fake tensors as real ones are where a dimension is one, for the time of a block."""

    def special(function: PythonKernel) -> PythonKernel:
        @functools.wraps(function)
        def made(mode: Any, operator: OpOverload, source: torch.Tensor, *shape: Any, **kwargs: Any) -> torch.Tensor:
            return _as_real_view(source, function(mode, operator, source, *shape, **kwargs))

        return made

    def traced(operator: OpOverload) -> AbstractContextManager[None]:
        function = python_kernel(operator, DispatchKey.Meta)
        assert function is not None

        @functools.wraps(function)
        def made(source: torch.Tensor, *shape: Any) -> torch.Tensor:
            return _as_real_view(source, function(source, *shape))

        return traced_as(operator, DispatchKey.Meta, made)

    def with_number(_mode: Any, _operator: OpOverload, *args: Any, **_kwargs: Any) -> Any:
        made = _with_number(args)
        return NotImplemented if made is None else made

    view, unsafe = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default
    views = {item: special(special_fake_functions[item]) for item in (view, unsafe)}
    with (
        faked_by(special_fake_functions, views | dict.fromkeys(_BINARY, with_number)),
        traced(view),
        traced(unsafe),
    ):
        yield


def _has_ones(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 1 for size in tensor.shape)


def _as_real_view(source: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """View whose dimensions of one are laid out as a kernel's.

    Views in the same shape are AOTAutograd's. It expects gradients of outputs to be laid out as these, and copies
    others: they stay as the outputs are.
    """
    if not _has_ones(view) or same_sizes(view.shape, source.shape):
        return view
    strides = strides_of_view(view.shape, view.stride(), source)
    return view if same_sizes(view.stride(), strides) else view.as_strided(view.shape, strides)


def _with_number(args: Sequence[Any]) -> torch.Tensor | None:
    """Result of a binary kernel of images and a number, where ones among the sizes make a difference; else None.

    Fake results are in channels-last order where the strides can be read as that. A kernel keeps the strides, as
    for tensors of several shapes.
    """
    tensors = [item for item in args if isinstance(item, torch.Tensor) and item.dim()]
    if len(tensors) != 1:
        return None
    (images,) = tensors
    numbers = all(isinstance(item, (int, float)) for item in args if item is not images)
    differs = numbers and images.dim() == 4 and _has_ones(images) and images.is_floating_point()
    return torch.add(images, images.new_empty(1)) if differs else None
