"""What a result is made of: for each of its elements, the sum of the magnitudes of the terms on the way to it.

Rounding moves a sum by a share of this, whatever the order and however much of the sum cancels.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from monetlite.core.graph import Call
from monetlite.operators import resolve


def magnitudes(call: Call, arguments: list[Any], keywords: dict[str, Any]) -> list[torch.Tensor]:
    """The sums for each result of a call that somebody reads, as float64 and in the result's shape."""
    family = call.target.split(".")[1]
    assert family in _BY_KERNEL, f"say in _BY_KERNEL what a tolerance of {family} is a share of"
    made = _BY_KERNEL[family](*arguments, **keywords)
    return [item for item, name in zip(made, call.outputs, strict=True) if name is not None]


def _convolution(*arguments: Any) -> list[torch.Tensor]:
    return _sums(lambda *operands: (torch.ops.aten.convolution.default(*operands, *arguments[3:]),), *arguments[:3])


def _convolution_backward(*arguments: Any) -> list[torch.Tensor | None]:
    run = torch.ops.aten.convolution_backward.default
    return _sums(lambda *operands: run(*operands, *arguments[3:]), *arguments[:3])


def _sums(run: Callable[..., Any], first: torch.Tensor, *others: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Sums of products of the first operand with the others; infinite where a term is not finite.

    The zeros around an image are no terms, so operands that are not finite are counted apart.
    """
    operands = [first, *others]
    clean, wrong, one, zero = (
        [None if item is None else make(item.float()) for item in operands]
        for make in (
            lambda item: item.abs().nan_to_num(0, 0, 0),
            lambda item: (~item.isfinite()).float(),
            torch.ones_like,
            torch.zeros_like,
        )
    )
    counted = ((wrong[0], *one[1:]), (one[0], *wrong[1:]))
    otherwise = ((zero[0], *one[1:]), (one[0], *zero[1:]))
    runs = [run(*item) for item in (clean, *counted, *otherwise)]
    return [
        None if sums is None else sums.double().masked_fill(first + others > first_0 + others_0, torch.inf)
        for sums, first, others, first_0, others_0 in zip(*runs, strict=True)
    ]


def _batch_norm_backward(gradient, source, weight, _mean, _variance, mean, deviation, training, _eps, mask):
    """(g − Σg/n − x̂·Σ(g·x̂)/n)·w/σ, and the sums themselves; every term with its magnitude."""
    shape = [1, -1, *[1] * (source.dim() - 2)]
    together = [0, *range(2, source.dim())]
    gradient, deviation = gradient.double().abs(), deviation.double().view(shape)
    factor = deviation if weight is None else weight.double().abs().view(shape) * deviation
    normalized = _normalized(source, mean.view(shape), deviation)
    of_source = _of_source(gradient, normalized, factor, together)
    return [_largest(item) for item in (of_source, (gradient * normalized).sum(together), gradient.sum(together))]


def _layer_norm_backward(gradient, source, shape, mean, deviation, weight, bias, mask):
    """The same for each row, with the weight inside of the sums; those for weight and bias are over all rows."""
    together = list(range(-len(shape), 0))
    rows = list(range(source.dim() - len(shape)))
    gradient, deviation = gradient.double().abs(), deviation.double()
    normalized = _normalized(source, mean, deviation)
    scaled = gradient if weight is None else gradient * weight.double().abs()
    of_source = _of_source(scaled, normalized, deviation, together)
    products = gradient * normalized
    of_weight, of_bias = (products.sum(rows), gradient.sum(rows)) if rows else (products, gradient)
    return [_largest(item) for item in (of_source, of_weight, of_bias)]


def _normalized(source, mean, deviation):
    """1 + (|x| + |μ|)/σ for |x̂|, where x̂ = (x − μ)/σ.

    That much may cancel, and μ is rounded in any case; and x̂ is of the order of one, except where everything that
    is normalised together is the same.
    """
    return 1 + (source.double().abs() + mean.double().abs()) * deviation


def _of_source(gradient, normalized, factor, together):
    count = max(1, math.prod(gradient.shape[dimension] for dimension in together))
    products = (gradient * normalized).sum(together, keepdim=True)
    return (gradient + gradient.sum(together, keepdim=True) / count + normalized * products / count) * factor


def _largest(sums):
    """The largest of the sums that are finite, for all of them: what a normalisation's tolerance is a share of."""
    finite = sums.isfinite()
    return torch.where(finite, sums[finite].amax(), sums) if finite.any() else sums


def _gradient(gradient, source, *_rest, **_keywords):
    """The derivative of GELU and SiLU is at most 1.13; that of what is not finite is not, or may not be."""
    return [gradient.double().abs() + 0 * source.double()]


def _row_chain(*arguments):
    """The largest element of each result: norms keep rows of a chain of the order of one."""
    made = resolve("monetlite.row_chain")(*arguments)
    return [
        None if item is None else torch.full_like(item, item.abs().amax(), dtype=torch.float64) for item in made
    ]


_BY_KERNEL = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "gelu_backward": _gradient,
    "silu_backward": _gradient,
    "row_chain": _row_chain,
}
