"""Gradients of batch norm and layer norm: pieces of the input, and gradients from the output under a guard.

From the output (Rota Bulò et al., In-Place Activated BatchNorm, CVPR 2018): x̂ = (y − b)/w, so the gradient can
be made from y instead of x. Rounding on the way to y moves x̂ by up to ε·((|x| + |μ|)/σ + |b/w|): by as much as
rounding μ does in either way, and by the bias, and nothing is left of x̂ where w = 0. The guard holds |b/w| to
`MAX_RATIO`; where it fails, a step is run in another way.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from monetlite.core.graph import Argument, Call, Implementation, TensorRef
from monetlite.operators.implementations import TracedKernel, elements, function, name_of, slices, tensor_at
from monetlite.operators.program_calls import GuardFailed

MAX_RATIO = 2.0**9
"""Largest |b/w| for a gradient from the output, in float32."""
MIN_WEIGHT, MAX_WEIGHT = 2.0**-32, 2.0**32
"""Range of |w| for a gradient from the output: w² and 1/w² have to stay well within float32."""
FROM_OUTPUT_TOLERANCE = 1e-4
"""Twice float32's ε times `MAX_RATIO`, as a share of sums in which |x̂| counts as 1 + (|x| + |μ|)/σ."""
MIN_PIECE_BYTES, MIN_PIECES = 2**16, 8
MAX_PIECE_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""Of the input at a time: an eighth of it, in pieces that are worth a call and stay in a CPU's cache, or keep a GPU
busy."""


def piece_bytes(whole_bytes: int, device: str) -> int:
    """Bytes of an input to work on at a time."""
    most = MAX_PIECE_BYTES.get(device, MAX_PIECE_BYTES["cpu"])
    return max(MIN_PIECE_BYTES, min(most, whole_bytes // MIN_PIECES))


def pieces(tensor: Tensor, dimension: int) -> Iterator[slice]:
    """Slices of a dimension, each of about `piece_bytes`."""
    count = tensor.shape[dimension]
    at_a_time = piece_bytes(tensor.nbytes, tensor.device.type) * count // max(1, tensor.nbytes)
    return slices(count, min(count, at_a_time))


def float32_bytes(call: Call) -> int:
    """The size of the second operand, in float32."""
    return 4 * elements(tensor_at(call, 1))


def from_output(
    kernel: TracedKernel,
    run: Callable[..., Any],
    run_over: Callable[..., Any],
    args: tuple[Argument, ...],
    *,
    weight: Argument,
    bias: Argument,
) -> Iterator[Implementation]:
    """A gradient from the output, if weight and bias are there when a step begins, as the guard needs."""
    if _is_resident(weight) and (bias is None or _is_resident(bias)):
        guard = Call(target=name_of(is_invertible), args=(weight, bias), outputs=(None,))
        promises = {"tolerance": FROM_OUTPUT_TOLERANCE, "guard": guard}
        yield from kernel.implement_over("from_output", run, run_over, args, **promises)


def _is_resident(argument: Argument) -> bool:
    return isinstance(argument, TensorRef) and argument.value is None


def require_invertible(operators: list[str], weights: list[Tensor], biases: list[Tensor | None]) -> None:
    """Raise `GuardFailed` with the operators for whose weight and bias `is_invertible` is false.

    All of them are checked at once, in a few launches and one look at the result.
    """
    shifts = [
        torch.zeros_like(weight) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)
    ]
    together = (torch.cat([item.reshape(-1) for item in items]) for items in (weights, shifts))
    if not is_invertible(*together).item():
        each = zip(operators, weights, biases, strict=True)
        raise GuardFailed([name for name, weight, bias in each if not is_invertible(weight, bias).item()])


@function("batch_norm_is_invertible")
def is_invertible(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Tell whether the output of a normalisation gives its input within the tolerance: a 0-d bool tensor."""
    size = weight.abs()
    holds = (size >= MIN_WEIGHT) & (size <= MAX_WEIGHT)
    if bias is not None:
        holds &= bias.abs() <= MAX_RATIO * size
    return holds.all()
