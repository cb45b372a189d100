"""Strides of fake tensors where a dimension is one.

Any stride leads to the same elements there, and torch's fake tensors have others than real ones. But kernels choose
by strides whether images are in channels-last order. Rows of a batch of one that become images, as after attention
in a decoder, would be taken for such: a group norm would not copy them, as plain training does, and then fail.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from monetlite.fx.torch_internals.torch_dispatch import (
    DispatchKey,
    OpOverload,
    PythonKernel,
    faked_by,
    python_kernel,
    quick_fake_functions,
    special_fake_functions,
    traced_as,
)
from monetlite.fx.torch_internals.torch_symbols import same_sizes

_aten = torch.ops.aten


@contextlib.contextmanager
def ones_laid_out_as_real() -> Iterator[None]:
    """Make fake tensors as real ones are where a dimension is one, for the time of a block."""

    def special(function: PythonKernel) -> PythonKernel:
        @functools.wraps(function)
        def made(mode: Any, operator: OpOverload, source: torch.Tensor, *shape: Any, **kwargs: Any) -> torch.Tensor:
            return _as_real_view(source, function(mode, operator, source, *shape, **kwargs))

        return made

    def python(function: PythonKernel) -> PythonKernel:
        @functools.wraps(function)
        def made(source: torch.Tensor, *shape: Any) -> torch.Tensor:
            return _as_real_view(source, function(source, *shape))

        return made

    def quick(function: PythonKernel) -> PythonKernel:
        @functools.wraps(function)
        def made(mode: Any, *args: Any, **kwargs: Any) -> Any:
            with mode:
                product = _with_number(args)
            return function(mode, *args, **kwargs) if product is None else product

        return made

    def product(_mode: Any, _operator: OpOverload, *args: Any, **_kwargs: Any) -> Any:
        made = _with_number(args)
        return NotImplemented if made is None else made

    view, unsafe = _aten.view.default, _aten._unsafe_view.default
    kernels = [kernel for item in (view, unsafe) if (kernel := python_kernel(item, DispatchKey.Meta)) is not None]
    binary = [_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor]
    views = {item: special(special_fake_functions[item]) for item in (view, unsafe)}
    with (
        faked_by(special_fake_functions, views | dict.fromkeys(binary, product)),
        faked_by(quick_fake_functions, {item: quick(quick_fake_functions[item]) for item in binary}),
        traced_as(view, DispatchKey.Meta, python(kernels[0])),
        traced_as(unsafe, DispatchKey.Meta, python(kernels[1])),
    ):
        yield


def _has_ones(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, int) and size == 1 for size in tensor.shape)


def _as_real_view(source: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """View whose dimensions of one go on from those after them, as in ATen's `computeStride`."""
    if not _has_ones(view):
        return view
    strides, following = list(view.stride()), source.stride()[-1] if source.dim() else 1
    for at in reversed(range(view.dim())):
        if isinstance(view.shape[at], int) and view.shape[at] == 1:
            strides[at] = following
        following = view.shape[at] * strides[at]
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
