"""Batch norm's gradient: over the gradient that comes in, and from the output.

From the output (Rota Bulò et al., In-Place Activated BatchNorm, CVPR 2018): x̂ = (y − b)/w, so the gradient can
be made from y instead of x. Rounding on the way to y moves x̂ by up to ε·((|x| + |μ|)/σ + |b/w|): by as much as
rounding μ does in either way, and by the bias, and nothing is left of x̂ where w = 0. The guard holds |b/w| to
`LARGEST_RATIO`; where it fails, a step is run in another way.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeGuard

import torch

from monetlite.core.graph import Argument, Call, Implementation, TensorRef
from monetlite.operators.batch_norm import BY_CUDNN, FUNCTIONAL, NO_STATISTICS, along
from monetlite.operators.guards import GuardFailed
from monetlite.operators.kernel import Kernel, is_contiguous
from monetlite.operators.registry import alternatives_for, function, name_of

_BACKWARD = "aten.native_batch_norm_backward.default"
_BACKWARD_BY_CUDNN = "aten.batch_norm_backward.default"

LARGEST_RATIO = 2.0**9
"""The most that |b/w| may be for a gradient from the output, in float32."""
SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-32, 2.0**32
"""What |w| may be for a gradient from the output: w² and 1/w² have to stay well within float32."""
FROM_OUTPUT_TOLERANCE = 1e-4
"""Twice float32's ε times `LARGEST_RATIO`, as a share of sums in which |x̂| counts as 1 + (|x| + |μ|)/σ."""
_LEAST_BYTES, _FEWEST_CHUNKS = 2**16, 8
_MOST_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""Of the input at a time, in place: an eighth of it, in pieces that are worth a call: that stay in a CPU's cache,
or keep a GPU busy.
"""


@alternatives_for(_BACKWARD, _BACKWARD_BY_CUDNN)
def backward(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient from the input or from the output; into new memory, or over the gradient that comes in."""
    gradient, source, weight, _, _, mean, deviation, training, eps, mask = kernel.call.args[:10]
    if training is not True or not isinstance(mask, tuple) or not isinstance(gradient, TensorRef):
        return
    assert isinstance(source, TensorRef)
    args: tuple[Argument, ...] = (gradient, source, weight, mean, deviation, eps, mask)
    overwrites = kernel.over(gradient) if mask[0] else ()
    # Batches of single points go through a kernel for whole pixels, whose sums depend on the number of channels.
    by_channels = (
        is_contiguous(gradient.spec) and is_contiguous(source.spec) and math.prod(source.spec.shape[2:]) > 1
    )
    if overwrites:
        if by_channels:
            yield kernel.implement(
                "inplace", target=name_of(backward_by_channels_), args=args, overwrites=overwrites, devices=("cpu",)
            )
        if source.spec.dtype == "float32":
            yield kernel.implement(
                "inplace_by_samples",
                target=name_of(backward_by_samples_),
                args=args,
                overwrites=overwrites,
                tolerance=1e-5,
            )
    forward = kernel.reader(source, FUNCTIONAL, NO_STATISTICS, BY_CUDNN)
    output = None if forward is None else kernel.reference(forward.outputs[0])
    if forward is None or output is None or output.spec.dtype != "float32":
        return
    bias = forward.args[2]
    if not is_resident(weight) or not (bias is None or is_resident(bias)):
        return
    guard = Call(target=name_of(is_invertible), args=(weight, bias), outputs=(None,))
    args = (gradient, output, weight, bias, deviation, eps, mask)
    yield kernel.implement(
        "from_output",
        target=name_of(backward_from_output),
        args=args,
        tolerance=FROM_OUTPUT_TOLERANCE,
        guard=guard,
    )
    if overwrites:
        yield kernel.implement(
            "from_output_inplace",
            target=name_of(backward_from_output_),
            args=args,
            overwrites=overwrites,
            tolerance=FROM_OUTPUT_TOLERANCE,
            guard=guard,
        )


def reading_the_batch(call: Call) -> Call:
    """A call that reads no running statistics, where the gradient's kernel is handed them and reads the batch's.

    Which kernel runs depends on whether there are any and on their type, so the batch's take their places. A
    running mean that is kept for the gradient could not be changed by another step in between.
    """
    if call.target not in (_BACKWARD, _BACKWARD_BY_CUDNN):
        return call
    running, batch, training = call.args[3:5], call.args[5:7], call.args[7]
    if training is not True or not all(map(_alike, running, batch)):
        return call
    return replace(call, args=(*call.args[:3], *batch, *call.args[5:]))


def _alike(one: Argument, other: Argument) -> bool:
    return isinstance(one, TensorRef) and isinstance(other, TensorRef) and one.spec == other.spec


def is_resident(argument: Argument) -> TypeGuard[TensorRef]:
    """Whether an argument is a tensor that is there when a step begins, as guards need."""
    return isinstance(argument, TensorRef) and argument.value is None


def require_invertible(
    operators: list[str], weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> None:
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
def is_invertible(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Whether the input of a batch norm can be had from its output with `FROM_OUTPUT_TOLERANCE`: a 0-d bool."""
    size = weight.abs()
    holds = (size >= SMALLEST_WEIGHT) & (size <= LARGEST_WEIGHT)
    if bias is not None:
        holds &= bias.abs() <= LARGEST_RATIO * size
    return holds.all()


def _samples_bytes(call: Call) -> int:
    """How much of a float32 input a GPU has at a time, if that is whole samples."""
    source = call.args[1]
    assert isinstance(source, TensorRef)
    whole = 4 * math.prod(source.spec.shape)
    return max(_piece_bytes(whole, "cuda"), whole // max(1, source.spec.shape[0]))


def _samples_launches(call: Call) -> int:
    source = call.args[1]
    assert isinstance(source, TensorRef)
    return 6 + 6 * -(-4 * math.prod(source.spec.shape) // max(1, _samples_bytes(call)))


def _piece_bytes(whole: int, device: str) -> int:
    most = _MOST_BYTES.get(device, _MOST_BYTES["cpu"])
    return max(_LEAST_BYTES, min(most, whole // _FEWEST_CHUNKS))


@function("batch_norm_backward_by_channels_")
def backward_by_channels_(
    gradient: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of batch norm for (input, weight, bias), some channels at a time, over the gradient that comes in.

    Each channel's gradient is of that channel alone, so these are the bits of one call for all of them.
    """
    channels = source.shape[1]
    step = max(
        1, min(channels, _piece_bytes(source.nbytes, source.device.type) * channels // max(1, source.nbytes))
    )
    of_weight, of_bias = [], []
    for start in range(0, channels, step):
        some = slice(start, start + step)
        part = gradient[:, some]
        made, for_weight, for_bias = torch.ops.aten.native_batch_norm_backward.default(
            part.contiguous(),
            source[:, some].contiguous(),
            None if weight is None else weight[some],
            None,
            None,
            mean[some],
            deviation[some],
            True,
            eps,
            [True, mask[1], mask[2]],
        )
        part.copy_(made)
        del made  # before the next one is
        of_weight.append(for_weight)
        of_bias.append(for_bias)
    return gradient, torch.cat(of_weight) if mask[1] else None, torch.cat(of_bias) if mask[2] else None


@function(
    "batch_norm_backward_by_samples_",
    limit="normalization",
    passes=2.5,
    workspace_bytes=_samples_bytes,
    launches=_samples_launches,
)
def backward_by_samples_(
    gradient: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The same, some samples at a time: the sums over the batch first, then

    (g − Σg/n − x̂·Σ(g·x̂)/n)·w/σ over g.
    """
    _, products, sums = torch.ops.aten.native_batch_norm_backward.default(
        gradient, source, weight, None, None, mean, deviation, True, eps, [False, True, True]
    )
    count = source.numel() // max(1, source.shape[1])
    scale = deviation if weight is None else deviation * weight
    slope, offset = deviation * products / count, sums / count
    step = max(1, _piece_bytes(source.nbytes, source.device.type) * len(source) // max(1, source.nbytes))
    for start in range(0, len(source), step):
        part, of_source = gradient[start : start + step], source[start : start + step]
        centered = (of_source - along(mean, source)).mul_(along(slope, source))
        part.sub_(along(offset, source)).sub_(centered).mul_(along(scale, source))
        del centered  # before the next one is made
    return gradient, products if mask[1] else None, sums if mask[2] else None


@function("batch_norm_backward_from_output", limit="normalization", passes=1.5)
def backward_from_output(
    gradient: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    deviation: torch.Tensor,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of batch norm for (input, weight, bias) from its output.

    The output is an affine image of the normalised input, so it takes the input's place with b for the mean,
    1/w for 1/σ, and w²/σ for the weight. Sound where `is_invertible`.
    """
    made: tuple[torch.Tensor | None, ...] = torch.ops.aten.native_batch_norm_backward.default(
        gradient, output, *_as_statistics(weight, bias, deviation), True, eps, mask
    )
    return made


@function(
    "batch_norm_backward_from_output_",
    limit="normalization",
    passes=2.5,
    workspace_bytes=_samples_bytes,
    launches=_samples_launches,
)
def backward_from_output_(
    gradient: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    deviation: torch.Tensor,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The same, over the gradient that comes in."""
    scale, _, _, mean, inverse = _as_statistics(weight, bias, deviation)
    assert mean is not None
    assert inverse is not None
    in_rows = gradient.is_contiguous() and output.is_contiguous() and gradient.device.type == "cpu"
    run = backward_by_channels_ if in_rows else backward_by_samples_
    return run(gradient, output, scale, mean, inverse, eps, mask)


def _as_statistics(
    weight: torch.Tensor, bias: torch.Tensor | None, deviation: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """(weight, running mean, running variance, mean, 1/σ) with which the output stands for the input."""
    return weight * weight * deviation, None, None, torch.zeros_like(weight) if bias is None else bias, 1 / weight
