"""Interpolation (`F.interpolate`) of images whose size varies, captured once for all sizes.

Two functions of PyTorch's C++ stand in the way. The one that `F.interpolate` calls computes the size of the result
and calls a kernel; sizes that vary become constants in it. And fake gradients are made of numbers only. Python
functions take the places of both. Where sizes are known, the captured graph is the same.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from monetlite.fx.torch_internals.torch_dispatch import (
    DispatchKey,
    OpOverload,
    PythonKernel,
    decomposition_table,
    faked_by,
    suggest_memory_format,
    traced_as,
)
from monetlite.operators.traits import TRAITS


@contextlib.contextmanager
def interpolated_to_any_size(keys: Sequence[DispatchKey]) -> Iterator[None]:
    """Trace interpolation as its kernels, at sizes that vary, too; `keys` are those of traced functions."""
    packets = [packet for packet in packets_kept_whole() if "vec" in packet.overloads()]
    calls = [traced_as(packet.vec, key, _called(packet)) for packet in packets for key in keys]
    with contextlib.ExitStack() as stack:
        for change in (*calls, _faked_gradients(packets)):
            stack.enter_context(change)
        yield


def packets_kept_whole() -> Iterator[Any]:
    """The operators that torch would take apart; those of interpolation have an overload that computes sizes."""
    return (getattr(torch.ops.aten, name) for name, traits in TRAITS.items() if traits.kept_whole)


def _called(packet: Any) -> PythonKernel:
    """The overload that computes the size of the result."""

    def interpolate(source: torch.Tensor, output_size: Any, *rest: Any) -> Any:
        *corners, factors = rest
        if output_size is None:
            output_size = [_times(size, factor) for size, factor in zip(source.shape[2:], factors, strict=True)]
        return packet.default(source, output_size, *corners, *(factors or [None] * len(output_size)))

    return interpolate


def _times(size: Any, factor: float) -> Any:
    """A size times a factor, rounded down; without rounding, as a symbol, by whole numbers."""
    if factor == int(factor):
        return size * int(factor)
    return torch.sym_int(size * factor)  # type: ignore[no-untyped-call]  # torch has no types for it


def _faked_gradients(packets: Sequence[Any]) -> AbstractContextManager[None]:
    """Make fake gradients of sizes that vary, in the order in which the kernel makes those of small images."""

    def faked(operator: OpOverload) -> PythonKernel:
        def made(gradient: torch.Tensor, output_size: Any, input_size: Any, *rest: Any) -> torch.Tensor:
            small = [2] * gradient.dim()
            asked = torch.empty(small, device="meta").to(memory_format=suggest_memory_format(gradient))
            order = suggest_memory_format(operator(asked, small[2:], small, *rest))
            return torch.empty(input_size, dtype=gradient.dtype, device=gradient.device, memory_format=order)

        return made

    gradients = [getattr(torch.ops.aten, f"{packet.default.__name__.split('.')[0]}_backward") for packet in packets]
    return faked_by(decomposition_table, {item.default: faked(item.default) for item in gradients})
