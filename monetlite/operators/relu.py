"""ReLU: its gradient from the output, from the input, or from one bit an element.

`threshold_backward` passes the gradient on except where its second operand is at most zero. relu(x) ≤ 0
exactly where x ≤ 0, and a NaN stays a NaN, so the mask is the same from either, bit for bit. Which of the three
is in memory at that point is for the solver to choose.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from monetlite.core.graph import Implementation, TensorRef
from monetlite.fx.calls import spec_of
from monetlite.fx.storages import base
from monetlite.operators.elementwise import in_place
from monetlite.operators.kernel import Kernel, is_dense, same_layout
from monetlite.operators.packing import (
    Outside,
    masked_gradient,
    masked_gradient_,
    pack,
    packed_bytes,
    workspace_bytes,
)
from monetlite.operators.registry import Intermediate, alternatives_for, function, intermediates_for, name_of

_BACKWARD = "aten.threshold_backward.default"
_FORWARD = "aten.relu.default"


@alternatives_for(_BACKWARD)
def backward_from_input(kernel: Kernel) -> Iterator[Implementation]:
    """`threshold_backward` with the input of the ReLU in place of its output."""
    gradient, output, threshold = kernel.call.args
    if threshold != 0 or not isinstance(output, TensorRef) or output.value is None:
        return
    forward = kernel.writer_call(output.value)
    if forward is None or forward.target != _FORWARD:
        return
    source = forward.args[0]
    if not isinstance(source, TensorRef) or source.value is None or source.spec.shape != output.spec.shape:
        return
    from_input = kernel.implement("from_input", args=(gradient, source, threshold))
    yield from_input
    assert from_input.call is not None
    for implementation in in_place(replace(kernel, call=from_input.call)):
        yield replace(implementation, name="from_input_inplace")


@intermediates_for(_BACKWARD)
def mask(node: fx.Node) -> Iterator[Intermediate]:
    """Where the gradient stops, as one bit an element."""
    gradient, output, threshold = node.args
    assert isinstance(gradient, fx.Node)
    assert isinstance(output, fx.Node)
    layout = spec_of(output.meta["val"])
    if threshold != 0 or not is_dense(layout) or not same_layout(layout, spec_of(gradient.meta["val"])):
        return
    strides = list(layout.stride)
    ways = [("default", (output, strides))]
    computed = base(output)
    source = computed.args[0] if str(computed.target) == _FORWARD else None
    if isinstance(source, fx.Node) and same_layout(spec_of(source.meta["val"]), layout):
        ways.append(("from_input", (source, strides)))
    elements = output.meta["val"].numel()
    yield Intermediate(
        name="mask", function=relu_mask, ways=tuple(ways), shape=(packed_bytes(elements),), dtype="uint8"
    )


@alternatives_for(_BACKWARD)
def backward_from_mask(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient where the packed mask lets it pass."""
    if "mask" in kernel.intermediates:
        yield from masked_by(kernel, kernel.intermediates["mask"])


def masked_by(kernel: Kernel, blocked: TensorRef) -> Iterator[Implementation]:
    """The gradient that is a kernel's first argument, with zeros where a packed mask has ones."""
    gradient = kernel.call.args[0]
    assert isinstance(gradient, TensorRef)
    args = (gradient, blocked, gradient.spec.stride)
    yield kernel.implement("from_mask", target=name_of(masked_gradient), args=args, kwargs=())
    if overwrites := kernel.over(gradient):
        yield kernel.implement(
            "from_mask_inplace",
            target=name_of(masked_gradient_),
            args=args,
            kwargs=(),
            overwrites=overwrites,
        )


@function("relu_mask", workspace_bytes=workspace_bytes)
def relu_mask(source: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Where a ReLU's gradient stops: one bit for each element of its input or output, a uint8 tensor.

    The bits are in the order of a storage with these strides.
    """
    return pack(source, strides, Outside(0.0))
