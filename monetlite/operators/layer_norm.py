"""Layer norm: its gradient over the gradient that comes in, and from the output.

The normalisation is y = x̂·w + b with x̂ = (x − μ)/σ for each row (Ba et al., arXiv:1607.06450). From the output,
x̂ = (y − b)/w; as with batch norm, that is sound while |b/w| is moderate, which a guard checks.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from monetlite.core.graph import Call, Implementation
from monetlite.operators.implementations import TracedKernel, alternatives_for, function, function_pair
from monetlite.operators.normalization import float32_bytes, from_output, piece_bytes, pieces
from monetlite.operators.strides import is_contiguous


@alternatives_for("aten.native_layer_norm_backward.default")
def backward(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient over the one that comes in, from the input or from the output."""
    gradient, source, shape, _, deviation, weight, bias, mask = kernel.args
    if not mask[0] or not is_contiguous(gradient.spec) or not is_contiguous(source.spec):
        return
    if overwrites := kernel.over(gradient):
        yield kernel.implement("inplace", backward_, overwrites=overwrites, devices=("cpu",))
    found = kernel.normalization(source, deviation, "aten.native_layer_norm.default")
    if found is None or source.spec.dtype != "float32":
        return
    _, output = found
    if is_contiguous(output.spec) and 0 not in output.spec.shape:
        args = (gradient, output, shape, deviation, weight, bias, mask)
        yield from from_output(kernel, backward_from_output, backward_from_output_, args, weight=weight, bias=bias)


@function("layer_norm_backward_")
def backward_(gradient: Tensor, source: Tensor, shape: list[int], *rest: Any) -> tuple[Tensor | None, ...]:
    """Gradients of layer norm for (input, weight, bias); the input's over the gradient that comes in.

    Those for weight and bias are sums over all rows and come first; then each row's own. `rest` is mean, 1/σ,
    weight, bias, and which of the three gradients are wanted.
    """
    mean, deviation, weight, bias, mask = rest
    run = torch.ops.aten.native_layer_norm_backward.default
    for_weight = for_bias = None
    if mask[1] or mask[2]:
        wanted = [False, mask[1], mask[2]]
        _, for_weight, for_bias = run(gradient, source, shape, mean, deviation, weight, bias, wanted)
    length, (into, incoming) = _rows(shape, gradient, source)
    means, deviations = mean.reshape(-1, 1), deviation.reshape(-1, 1)
    parameters = [None if item is None else item.reshape(-1) for item in (weight, bias)]
    for some in pieces(into, 0):
        made, _, _ = run(
            into[some], incoming[some], [length], means[some], deviations[some], *parameters, [True, False, False]
        )
        into[some].copy_(made)
        del made  # before the next one is
    return gradient, for_weight if mask[1] else None, for_bias if mask[2] else None


def _workspace_bytes(call: Call) -> int:
    """A piece of a float32 input on a GPU: normalised, on the way there, and its gradient."""
    return 3 * piece_bytes(float32_bytes(call), "cuda")


def _launches(call: Call) -> int:
    return 10 * -(-float32_bytes(call) // piece_bytes(float32_bytes(call), "cuda"))


def _from_output(
    result: Tensor, gradient: Tensor, output: Tensor, shape: list[int], *rest: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of layer norm for (input, weight, bias) from its output. Sound where `is_invertible`.

    `rest` is 1/σ, weight, bias, and which of the three gradients are wanted.
    """
    deviation, weight, bias, mask = rest
    length, (into, incoming, outgoing) = _rows(shape, result, gradient, output)
    deviations = deviation.reshape(-1, 1)
    sums: list[Tensor | None] = [None, None]
    flat_weight, flat_bias = weight.reshape(-1), None if bias is None else bias.reshape(-1)
    for some in pieces(into, 0):
        normalized = (
            outgoing[some] / flat_weight if flat_bias is None else (outgoing[some] - flat_bias) / flat_weight
        )
        zero, one = torch.zeros_like(deviations[some]), torch.ones_like(deviations[some])
        made, *parts = torch.ops.aten.native_layer_norm_backward.default(
            incoming[some], normalized, [length], zero, one, flat_weight, flat_bias, mask
        )
        torch.mul(made, deviations[some], out=into[some])
        del normalized, made  # before the next ones are
        sums = [part if total is None else total.add_(part) for total, part in zip(sums, parts, strict=True)]
    for_weight, for_bias = (
        total.view_as(weight) if wanted and total is not None else None
        for total, wanted in zip(sums, mask[1:], strict=True)
    )
    return result, for_weight, for_bias


backward_from_output, backward_from_output_ = function_pair(
    _from_output,
    "layer_norm_backward_from_output",
    limit="normalization",
    passes=2.0,
    workspace_bytes=_workspace_bytes,
    launches=_launches,
)


def _rows(shape: list[int], *tensors: Tensor) -> tuple[int, list[Tensor]]:
    """Tensors whose last dimensions are normalised together, as rows: (their length, tensors of rows)."""
    length = math.prod(shape)
    return length, [tensor.view(tensor.numel() // max(1, length), length) for tensor in tensors]
