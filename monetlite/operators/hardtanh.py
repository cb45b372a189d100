"""Hardtanh and ReLU6: their gradient from the output, or from one bit an element.

`hardtanh_backward` stops the gradient where the input is at most the lower bound or at least the upper one;
the output is on a bound exactly there, as long as the bounds are numbers of its type. What becomes of the gradient
of a NaN depends, on a CPU, on where in the storage it is: torch's vectorised loops stop it and the rest doesn't. A
mask never stops it.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from monetlite.core.graph import Implementation, TensorRef
from monetlite.fx.calls import spec_of
from monetlite.operators.elementwise import in_place
from monetlite.operators.kernel import Kernel, is_dense, same_layout
from monetlite.operators.packing import Outside, pack, packed_bytes, workspace_bytes
from monetlite.operators.registry import Intermediate, alternatives_for, function, intermediates_for
from monetlite.operators.relu import masked_by

_BACKWARD = "aten.hardtanh_backward.default"
_FORWARD = "aten.hardtanh.default"


@intermediates_for(_BACKWARD)
def mask(node: fx.Node) -> Iterator[Intermediate]:
    """Where the gradient stops, as one bit an element."""
    gradient, source, low, high = node.args
    assert isinstance(gradient, fx.Node)
    assert isinstance(source, fx.Node)
    layout = spec_of(source.meta["val"])
    if not is_dense(layout) or not same_layout(layout, spec_of(gradient.meta["val"])):
        return
    if not _representable(layout.dtype, low, high):
        return
    strides = list(layout.stride)
    ways = [("default", (source, strides, low, high))]
    output = _output(source, low, high)
    if output is not None and same_layout(spec_of(output.meta["val"]), layout):
        ways.append(("from_output", (output, strides, low, high)))
    elements = source.meta["val"].numel()
    yield Intermediate(
        name="mask", function=hardtanh_mask, ways=tuple(ways), shape=(packed_bytes(elements),), dtype="uint8"
    )


def _output(source: fx.Node, low: object, high: object) -> fx.Node | None:
    """The node that clamps `source` to the same bounds."""
    return next(
        (user for user in source.users if str(user.target) == _FORWARD and user.args == (source, low, high)),
        None,
    )


def _representable(dtype: str, *bounds: object) -> bool:
    """Whether a type has the bounds as they are: kernels compare in float32, where half precision's are others."""
    digits = {"bfloat16": 8, "float16": 11}.get(dtype)
    return digits is None or all(
        isinstance(bound, (int, float)) and math.ldexp(math.frexp(bound)[0], digits).is_integer()
        for bound in bounds
    )


@alternatives_for(_BACKWARD)
def backward_from_mask(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient where the packed mask lets it pass."""
    if "mask" in kernel.intermediates:
        yield from masked_by(kernel, kernel.intermediates["mask"])


@alternatives_for(_BACKWARD)
def backward_from_output(kernel: Kernel) -> Iterator[Implementation]:
    """`hardtanh_backward` with the output in place of the input."""
    gradient, source, *bounds = kernel.call.args
    assert isinstance(source, TensorRef)
    forward = kernel.reader(source, _FORWARD)
    if forward is None or list(forward.args[1:]) != bounds or not _representable(source.spec.dtype, *bounds):
        return
    output = kernel.reference(forward.outputs[0])
    if output is None or output.spec.shape != source.spec.shape:
        return
    from_output = kernel.implement("from_output", args=(gradient, output, *bounds))
    yield from_output
    assert from_output.call is not None
    for implementation in in_place(replace(kernel, call=from_output.call)):
        yield replace(implementation, name="from_output_inplace")


@function("hardtanh_mask", workspace_bytes=workspace_bytes)
def hardtanh_mask(source: torch.Tensor, strides: list[int], low: float, high: float) -> torch.Tensor:
    """Where a hardtanh's gradient stops: one bit for each element of its input or output, a uint8 tensor.

    The bits are in the order of a storage with these strides.
    """
    return pack(source, strides, Outside(low, high))
