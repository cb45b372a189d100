"""ReLU, hardtanh and ReLU6: their gradients from the output, from the input, or from one bit an element.

`threshold_backward` passes the gradient on except where its second operand is at most zero. relu(x) ≤ 0
exactly where x ≤ 0, and a NaN stays a NaN, so the mask is the same from either, bit for bit.

`hardtanh_backward` stops the gradient where the input is at most the lower bound or at least the upper one;
the output is on a bound exactly there, as long as the bounds are numbers of its type. What becomes of the gradient
of a NaN depends, on a CPU, on where in the storage it is: torch's vectorised loops stop it and the rest doesn't. A
mask never stops it.
"""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from monetlite.core.graph import Implementation
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.storages import base
from monetlite.operators.elementwise import with_in_place
from monetlite.operators.implementations import (
    Intermediate,
    TracedKernel,
    alternatives_for,
    function,
    intermediates_for,
    tensor_at,
)
from monetlite.operators.packing import mask_of, masked_gradient, masked_gradient_, pack, workspace_bytes

_RELU, _RELU_BACKWARD = "aten.relu.default", "aten.threshold_backward.default"
_HARDTANH, _HARDTANH_BACKWARD = "aten.hardtanh.default", "aten.hardtanh_backward.default"


@alternatives_for(_RELU_BACKWARD)
def relu_from_input(kernel: TracedKernel) -> Iterator[Implementation]:
    """`threshold_backward` with the input of the ReLU in place of its output."""
    gradient, output, threshold = kernel.args
    forward = kernel.computed_by(output)
    if threshold != 0 or forward is None or forward.target != _RELU:
        return
    source = tensor_at(forward, 0)
    if source.value is not None and source.spec.shape == output.spec.shape:
        yield from with_in_place(kernel, kernel.implement("from_input", args=(gradient, source, threshold)))


@intermediates_for(_RELU_BACKWARD)
def relu_bits(gradient: fx.Node, output: fx.Node, threshold: float) -> Iterator[Intermediate]:
    """The elements that stop the gradient, as one bit each."""
    if threshold == 0:
        computed = base(output)
        source: Any = computed.args[0] if str(computed.target) == _RELU else None
        yield from mask_of(gradient, relu_mask, default=output, from_input=source)


@intermediates_for(_HARDTANH_BACKWARD)
def hardtanh_bits(gradient: fx.Node, source: fx.Node, *bounds: float) -> Iterator[Intermediate]:
    """The elements that stop the gradient, as one bit each."""
    if _representable(spec_of(source.meta["val"]).dtype, *bounds):
        same = (user for user in source.users if str(user.target) == _HARDTANH and user.args == (source, *bounds))
        yield from mask_of(gradient, hardtanh_mask, *bounds, default=source, from_output=next(same, None))


def _representable(dtype: str, *bounds: float) -> bool:
    """Tell whether a type has the bounds as they are: kernels compare in float32, half precision may round them."""
    digits = {"bfloat16": 8, "float16": 11}.get(dtype)
    return digits is None or all(math.ldexp(math.frexp(bound)[0], digits).is_integer() for bound in bounds)


@alternatives_for(_RELU_BACKWARD, _HARDTANH_BACKWARD)
def backward_from_mask(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient where the packed mask lets it pass."""
    if mask := kernel.intermediates.get("mask"):
        args = (kernel.args[0], mask, kernel.args[0].spec.stride)
        yield from kernel.implement_over("from_mask", masked_gradient, masked_gradient_, args)


@alternatives_for(_HARDTANH_BACKWARD)
def hardtanh_from_output(kernel: TracedKernel) -> Iterator[Implementation]:
    """`hardtanh_backward` with the output in place of the input."""
    gradient, source, *bounds = kernel.args
    found = kernel.reader(source, _HARDTANH)
    if found is None or list(found[0].args[1:]) != bounds or not _representable(source.spec.dtype, *bounds):
        return
    _, output = found
    if output.spec.shape == source.spec.shape:
        yield from with_in_place(kernel, kernel.implement("from_output", args=(gradient, output, *bounds)))


@function("relu_mask", workspace_bytes=workspace_bytes)
def relu_mask(source: Tensor, strides: list[int]) -> Tensor:
    """The elements that stop a ReLU's gradient: one bit for each of its input or output, a uint8 tensor.

    The bits are in the order of a storage with these strides.
    """
    return pack(source, strides, 0.0)


@function("hardtanh_mask", workspace_bytes=workspace_bytes)
def hardtanh_mask(source: Tensor, strides: list[int], low: float, high: float) -> Tensor:
    """The elements that stop a hardtanh's gradient, as `relu_mask` has them."""
    return pack(source, strides, low, high)
