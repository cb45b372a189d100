"""Batch norm: in place, run again with the first run's statistics, and backward in place or from the output.

The normalisation is y = x·α + β with α = w/σ and β = b − μ·α for each channel (Ioffe and Szegedy,
arXiv:1502.03167), where μ and 1/σ are the batch's. With μ and 1/σ kept, which are a few numbers, a re-run is one
pass over x instead of three.

From the output (Rota Bulò et al., In-Place Activated BatchNorm, CVPR 2018): x̂ = (y − b)/w, so the gradient can
be made from y instead of x. Rounding on the way to y moves x̂ by up to ε·((|x| + |μ|)/σ + |b/w|): by as much as
rounding μ does in either way, and by the bias, and nothing is left of x̂ where w = 0. The guard holds |b/w| to
`LARGEST_RATIO`; where it fails, a step is run in another way.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TypeGuard

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monetlite.captured.calls import spec_of
from monetlite.graph import Argument, Call, Implementation, TensorRef, TensorSpec
from monetlite.operators.kernel import Kernel, is_channels_last, is_contiguous
from monetlite.operators.registry import alternatives_for, function, name_of

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"
_NO_STATISTICS = "aten._native_batch_norm_legit.no_stats"
_BACKWARD = "aten.native_batch_norm_backward.default"

LARGEST_RATIO = 2.0**9
"""The most that |b/w| may be for a gradient from the output, in float32."""
SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-32, 2.0**32
"""What |w| may be for a gradient from the output: w² and 1/w² have to stay well within float32."""
FROM_OUTPUT_TOLERANCE = 1e-4
"""Twice float32's ε times `LARGEST_RATIO`, as a share of sums in which |x̂| counts as 1 + (|x| + |μ|)/σ."""
_LEAST_BYTES, _MOST_BYTES, _FEWEST_CHUNKS = 2**16, 2**20, 8
"""Of the input at a time, in place: an eighth of it, in pieces that are worth a call and stay in a CPU's cache."""


def without_running_statistics(call: Call, results: tuple[TensorRef | None, ...], device: str) -> Call | None:
    """The same normalisation of the same batch, for a re-run: the same bits, and no running statistics.

    With the first run's statistics where that makes the same bits; computing them again elsewhere.
    """
    if call.target != _FUNCTIONAL:
        return None
    source, weight, bias, _, _, training, momentum, eps = call.args
    if training is not True:
        return None
    statistics = results[1:3]
    if (
        device == "cpu"
        and isinstance(source, TensorRef)
        and source.spec.dtype == "float32"
        and _in_order(source.spec)
        and all(statistics)
        and _same_bits_again()
    ):
        return replace(
            call,
            target=name_of(normalize),
            args=(source, weight, bias, *statistics),
            outputs=(call.outputs[0], None, None),
        )
    return replace(
        call,
        target=_NO_STATISTICS,
        args=(source, weight, bias, training, momentum, eps),
        outputs=call.outputs[:3],
    )


@function("batch_norm_again")
def normalize(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> tuple[torch.Tensor, None, None]:
    """The normalisation with given statistics, each of shape (channels,), of a tensor (batch, channels, …).

    Returns what the first run returned, without the statistics.
    """
    return _normalize(source, weight, bias, mean, inverse_deviation, torch.empty_like(source)), None, None


@function("batch_norm_again_")
def normalize_(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> tuple[torch.Tensor, None, None]:
    """The same, over the source."""
    return _normalize(source, weight, bias, mean, inverse_deviation, source), None, None


def _normalize(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    offset = torch.zeros_like(mean) if bias is None else bias
    shift = torch.addcmul(offset, mean, scale, value=-1)
    return torch.addcmul(_along(shift, source), source, _along(scale, source), out=out)


def _in_order(spec: TensorSpec) -> bool:
    """Whether a tensor is laid out as torch's kernels for whole rows or whole pixels want it.

    For other layouts torch has another kernel, which rounds otherwise, and whose variant with `out` goes wrong (it
    reads statistics that are not there yet, in 2.13).
    """
    return is_contiguous(spec) or is_channels_last(spec)


@cache
def _same_bits_again() -> bool:
    """Whether, on this CPU, `normalize` makes the bits that the batch norm kernel makes.

    Both are a multiplication and an addition an element; whether they round once or twice is the compilers' and
    the processor's affair, so it is tried, on odd sizes and in both layouts.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # A capture, during which graphs are built, makes fake tensors of what is computed.
    with _disable_current_modes(), torch.no_grad():
        for shape in ((3, 37, 11, 13), (4, 16, 8, 8), (5, 7, 1, 3), (64, 33)):
            plain = torch.randn(shape, generator=generator) * 3 + 1
            weight, bias = (torch.randn(shape[1], generator=generator) for _ in range(2))
            last = plain.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else plain
            for source in (plain, last):
                first, mean, deviation = torch.ops.aten._native_batch_norm_legit.no_stats(
                    source, weight, bias, True, 0.1, 1e-5
                )
                if not torch.equal(normalize(source, weight, bias, mean, deviation)[0], first):
                    return False
    return True


@alternatives_for(_FUNCTIONAL)
def in_place(kernel: Kernel) -> Iterator[Implementation]:
    """The result over the input."""
    source, *_, training, _, _ = kernel.call.args
    overwrites = kernel.over(source)
    if training is not True or not overwrites or not isinstance(source, TensorRef) or not _in_order(source.spec):
        return
    rerun = kernel.default.again
    if rerun is not None:
        target = normalize_ if rerun.target == name_of(normalize) else batch_norm_no_stats_
        rerun = replace(rerun, target=name_of(target))
    yield kernel.implement(
        "inplace", target=name_of(batch_norm_), overwrites=overwrites, devices=("cpu",), again=rerun
    )


@function("batch_norm_", limit="normalization", passes=1.5)
def batch_norm_(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch norm over its input.

    Returns (the result, the batch's mean, 1/σ, the new running mean, the new running variance).
    """
    if not _in_order(spec_of(source)):
        made, *rest = torch.ops.aten._native_batch_norm_legit_functional.default(
            source, weight, bias, running_mean, running_variance, training, momentum, eps
        )
        return source.copy_(made), *rest
    running_mean, running_variance = running_mean.clone(), running_variance.clone()
    mean, deviation = running_mean.new_empty(0), running_mean.new_empty(0)
    torch.ops.aten._native_batch_norm_legit.out(
        source,
        weight,
        bias,
        running_mean,
        running_variance,
        training,
        momentum,
        eps,
        out=source,
        save_mean=mean,
        save_invstd=deviation,
    )
    return source, mean, deviation, running_mean, running_variance


@function("batch_norm_no_stats_", limit="normalization", passes=1.5)
def batch_norm_no_stats_(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch norm without running statistics, over its input. Returns (the result, the mean, 1/σ)."""
    if not _in_order(spec_of(source)):
        made, *rest = torch.ops.aten._native_batch_norm_legit.no_stats(
            source, weight, bias, training, momentum, eps
        )
        return source.copy_(made), *rest
    # Statistics have the type of the weights; without any, that of sums over the batch.
    dtype = weight.dtype if weight is not None else torch.promote_types(source.dtype, torch.float32)
    mean, deviation = (source.new_empty(0, dtype=dtype) for _ in range(2))
    torch.ops.aten._native_batch_norm_legit.no_stats_out(
        source, weight, bias, training, momentum, eps, out=source, save_mean=mean, save_invstd=deviation
    )
    return source, mean, deviation


@alternatives_for(_BACKWARD)
def backward(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient from the input or from the output; into new memory, or over the gradient that comes in."""
    gradient, source, weight, _, _, mean, deviation, training, eps, mask = kernel.call.args
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
    forward = kernel.reader(source, _FUNCTIONAL, _NO_STATISTICS)
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


def is_resident(argument: Argument) -> TypeGuard[TensorRef]:
    """Whether an argument is a tensor that is there when a step begins, as guards need."""
    return isinstance(argument, TensorRef) and argument.value is None


@function("batch_norm_is_invertible")
def is_invertible(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Whether the input of a batch norm can be had from its output with `FROM_OUTPUT_TOLERANCE`: a 0-d bool."""
    size = weight.abs()
    holds = (size >= SMALLEST_WEIGHT) & (size <= LARGEST_WEIGHT)
    if bias is not None:
        holds &= bias.abs() <= LARGEST_RATIO * size
    return holds.all()


def _chunk_bytes(call: Call) -> int:
    source = call.args[1]
    assert isinstance(source, TensorRef)
    return 3 * _piece_bytes(4 * math.prod(source.spec.shape))


def _piece_bytes(whole: int) -> int:
    return max(_LEAST_BYTES, min(_MOST_BYTES, whole // _FEWEST_CHUNKS))


@function("batch_norm_backward_by_channels_", limit="normalization", passes=2.5, workspace_bytes=_chunk_bytes)
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
    step = max(1, min(channels, _piece_bytes(source.nbytes) * channels // max(1, source.nbytes)))
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
        of_weight.append(for_weight)
        of_bias.append(for_bias)
    return gradient, torch.cat(of_weight) if mask[1] else None, torch.cat(of_bias) if mask[2] else None


@function("batch_norm_backward_by_samples_", limit="normalization", passes=2.5, workspace_bytes=_chunk_bytes)
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
    step = max(1, _piece_bytes(source.nbytes) * len(source) // max(1, source.nbytes))
    for start in range(0, len(source), step):
        part, of_source = gradient[start : start + step], source[start : start + step]
        centered = (of_source - _along(mean, source)).mul_(_along(slope, source))
        part.sub_(_along(offset, source)).sub_(centered).mul_(_along(scale, source))
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


@function("batch_norm_backward_from_output_", limit="normalization", passes=2.5, workspace_bytes=_chunk_bytes)
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


def _along(of_channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor (channels,) as it broadcasts over (batch, channels, …)."""
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))
