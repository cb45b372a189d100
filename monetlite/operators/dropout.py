"""Dropout: rounded as in plain training, in place; its gradient from one bit an element or a generator's state.

`native_dropout` keeps a byte for each element to say which it kept. One bit says as much; and so does the state
that the generator was in, from which the same mask can be drawn again, without the input.

On a CPU, plain training multiplies by 1 / (1 − p) rounded as a division of tensors rounds it, in the tensor's own
type; `native_dropout`, which captured graphs have in its place, by the nearest number to it. For a quarter of all
probabilities, and most in 16 bits, these differ.
"""

import struct
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from monetlite.core.graph import Implementation, TensorRef
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.operators import triton_kernels
from monetlite.operators.implementations import (
    PREFIX,
    Intermediate,
    TracedKernel,
    alternatives_for,
    function,
    function_pair,
    intermediates_for,
    name_of,
)
from monetlite.operators.packing import by_mask, in_order, mask_of, out_of_order, pack, workspace_bytes
from monetlite.operators.random import REPLAY
from monetlite.operators.strides import is_whole, same_layout
from monetlite.operators.triton_kernels import launch_over_mask

_NATIVE = torch.ops.aten.native_dropout.default
_FORWARD = "aten.native_dropout.default"
_BACKWARD = "aten.native_dropout_backward.default"
_ROUNDED_ONCE = frozenset({"float32", "float64"})
"""Types in which scaling after masking rounds as one operator would."""


def round_as_plain_training(graph: fx.Graph) -> None:
    """In a graph captured on a CPU, put a dropout that rounds as eager mode's where `native_dropout` does not."""
    for node in list(graph.nodes):
        if node.target is not _NATIVE or node.kwargs:
            continue
        source, probability, training = node.args
        kept = next((user for user in node.users if user.args[1] == 1), None)
        if not draws(probability, training) or node.meta["val"][0].device.type != "cpu":
            continue
        scale = _scale(node.meta["val"][0].dtype, probability)
        if scale == _native_scale(node.meta["val"][0].dtype, probability):
            continue
        node.target, node.args = dropout, (source, probability)
        for user in () if kept is None else list(kept.users):
            if str(user.target) == _BACKWARD:
                user.args = (*user.args[:2], scale)


def scale_of(node: fx.Node) -> float:
    """The factor by which a dropout of a graph that has been through `round_as_plain_training` scales."""
    dtype, probability = node.meta["val"][0].dtype, node.args[1]
    assert isinstance(probability, float)
    return (_scale if node.target is dropout else _native_scale)(dtype, probability)


def draws(probability: object, training: object = True) -> bool:
    """Tell whether a dropout draws a mask, rather than keeping or dropping everything."""
    return training is True and isinstance(probability, float) and 0 < probability < 1


def _scale(dtype: torch.dtype, probability: float) -> float:
    """The factor of plain training on a CPU."""
    with without_modes():
        return float(torch.ones((), dtype=dtype).div_(1 - probability).item())


def _native_scale(dtype: torch.dtype, probability: float) -> float:
    """The factor of `native_dropout` on a CPU, where a scalar takes part in float32, if not in float64."""
    exact = 1 / (1 - probability)
    return exact if dtype is torch.float64 else struct.unpack("f", struct.pack("f", exact))[0]


@function("dropout", like=lambda call: replace(call, target=_FORWARD, args=(*call.args, True)), random=True)
def dropout(source: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Dropout as plain training rounds it: (the result, the kept elements as a bool tensor)."""
    if source.device.type != "cpu":
        made: tuple[Tensor, Tensor] = _NATIVE(source, probability, True)
        return made
    kept = torch.empty_like(source, dtype=torch.bool).bernoulli_(1 - probability)
    return source.mul(kept).mul_(_scale(source.dtype, probability)), kept


@alternatives_for(_FORWARD, PREFIX + "dropout")
def in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The result over the input."""
    source, probability, *rest = kernel.args
    overwrites = kernel.over(source)
    if overwrites and draws(probability, *rest) and source.spec.dtype in _ROUNDED_ONCE:
        args = (source, probability)
        yield kernel.implement("inplace", dropout_, args=args, overwrites=overwrites, devices=("cpu",))


@function("dropout_", random=True)
def dropout_(source: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Dropout over its input, with the numbers that plain training draws on a CPU.

    Returns (the result, the kept elements as a bool tensor).
    """
    kept = torch.empty_like(source, dtype=torch.bool).bernoulli_(1 - probability)
    return source.mul_(kept).mul_(_scale(source.dtype, probability)), kept


@alternatives_for(_BACKWARD)
def backward_in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient of dropout over the gradient that comes in."""
    gradient = kernel.args[0]
    overwrites = kernel.over(gradient)
    if overwrites and gradient.spec.dtype in _ROUNDED_ONCE:
        yield kernel.implement("inplace", dropout_backward_, overwrites=overwrites)


@function("dropout_backward_")
def dropout_backward_(gradient: Tensor, kept: Tensor, scale: float) -> Tensor:
    """gradient · kept · scale, written over the gradient."""
    return gradient.mul_(kept).mul_(scale)


@intermediates_for(_BACKWARD)
def packed(gradient: fx.Node, kept: fx.Node, _: float) -> Iterator[Intermediate]:
    """The kept elements, as one bit an element."""
    yield from mask_of(gradient, dropout_mask, default=kept)


@alternatives_for(_BACKWARD)
def backward_from_mask(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient from the packed mask."""
    if mask := kernel.intermediates.get("mask"):
        gradient, _, scale = kernel.args
        args = (gradient, mask, gradient.spec.stride, scale)
        yield from kernel.implement_over("from_mask", dropout_backward_from_mask, dropout_backward_from_mask_, args)


@alternatives_for(_BACKWARD)
def backward_from_state(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient from a mask that is drawn again: dropout of the gradient, with the numbers of the input's."""
    gradient, kept, _ = kernel.args
    writer = None if kept.value is None else kernel.writer(kept.value)
    if writer is None or (forward := writer.call) is None:
        return
    drawn = writer.again
    if drawn is None or drawn.target != REPLAY:
        return
    if forward.target not in (_FORWARD, name_of(dropout)):
        return
    state, device, *_ = drawn.args
    source, probability, *rest = forward.args
    if not draws(probability, *rest):
        return
    assert isinstance(source, TensorRef)
    assert isinstance(probability, float)
    # CUDA's dropout rounds 1 − p before it divides, as plain training's on a CPU, and its gradient does not.
    dtype = getattr(torch, gradient.spec.dtype)
    same_scale = _scale(dtype, probability) == _native_scale(dtype, probability)
    # A tensor's first address decides how many numbers a thread of CUDA's draws at a time, and so which it gets.
    aligned = is_whole(kernel.values, source) and is_whole(kernel.values, gradient)
    if gradient.spec.dtype in _ROUNDED_ONCE and same_layout(source.spec, gradient.spec):
        yield kernel.implement(
            "from_state",
            REPLAY,
            args=(state, device, name_of(dropout_in_order), gradient, gradient.spec.stride, probability),
            outputs=(*kernel.call.outputs, None),
            devices=() if aligned and same_scale else ("cpu",),
        )


@function("dropout_in_order", random=True)
def dropout_in_order(source: Tensor, strides: list[int], probability: float) -> tuple[Tensor, Tensor]:
    """Dropout with the numbers that are drawn for a tensor with these strides."""
    return dropout(out_of_order(in_order(source, strides), source.shape, strides), probability)


@function("dropout_mask", workspace_bytes=workspace_bytes)
def dropout_mask(kept: Tensor, strides: list[int]) -> Tensor:
    """The elements that dropout kept, a bool tensor, as one bit an element: a uint8 tensor.

    The bits are in the order of a storage with these strides.
    """
    return pack(kept, strides)


def _from_mask(result: Tensor, gradient: Tensor, mask: Tensor, strides: list[int], scale: float) -> Tensor:
    """gradient · kept · scale, from the kept elements as a mask that is packed in the order of these strides."""

    def fused(flat: Tensor, result: Tensor) -> None:
        launch_over_mask(triton_kernels.scaled, mask, flat, mask, result, flat.numel(), float(scale))

    def write_piece(piece: Tensor, kept: Tensor) -> None:
        piece.copy_(torch.ops.aten.native_dropout_backward.default(piece, kept, scale))

    return by_mask(result, gradient, mask, strides, fused, write_piece)


dropout_backward_from_mask, dropout_backward_from_mask_ = function_pair(
    _from_mask, "dropout_backward_from_mask", passes=1.3, workspace_bytes=workspace_bytes
)
