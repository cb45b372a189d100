"""Batch norm: in place, and run again with the first run's statistics; its gradient in place and from the output.

The normalisation is y = x·α + β with α = w/σ and β = b − μ·α for each channel (Ioffe and Szegedy,
arXiv:1502.03167), where μ and 1/σ are the batch's. With μ and 1/σ kept, which are a few numbers, a re-run is one
pass over x instead of three.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from monetlite.core.graph import Argument, Call, Implementation, TensorRef, TensorSpec
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.operators.implementations import (
    TracedKernel,
    alternatives_for,
    function,
    function_pair,
    name_of,
    tensor_at,
)
from monetlite.operators.normalization import float32_bytes, from_output, piece_bytes, pieces
from monetlite.operators.strides import is_channels_last, is_contiguous

_FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"
_NO_STATISTICS = "aten._native_batch_norm_legit.no_stats"
_BY_CUDNN = "aten._batch_norm_with_update_functional.default"
"""Runs as cuDNN's where a plain step's would: its gradient reads what the fourth result reserves for it."""
_BACKWARD = "aten.native_batch_norm_backward.default"
_BACKWARD_BY_CUDNN = "aten.batch_norm_backward.default"


def without_running_statistics(call: Call, results: tuple[TensorRef | None, ...], device: str) -> Call | None:
    """The same normalisation of the same batch, for a re-run: the same bits, and no running statistics.

    It reads the first run's statistics if that makes the same bits, and computes them again if not.
    """
    if call.target == _BY_CUDNN:
        args = (*call.args[:3], *call.args[5:])
        return replace(call, target=name_of(batch_norm_by_cudnn_again), args=args, outputs=call.outputs[:4])
    if call.target != _FUNCTIONAL or call.args[5] is not True:
        return None
    source, weight, bias, running, _, training, momentum, eps = call.args
    statistics = results[1:3]
    if (
        device == "cpu"
        and isinstance(source, TensorRef)
        and source.spec.dtype == "float32"
        and _in_order(source.spec)
        and all(statistics)
        and _same_bits_again()
    ):
        args = (source, weight, bias, *statistics)
        return replace(call, target=name_of(normalize), args=args, outputs=(call.outputs[0], None, None))
    if device == "cpu" and weight is None and _is_wider(running, source):
        args = (source, momentum, eps)
        return replace(call, target=name_of(in_float32_again), args=args, outputs=call.outputs[:3])
    args = (source, weight, bias, training, momentum, eps)
    return replace(call, target=_NO_STATISTICS, args=args, outputs=call.outputs[:3])


@function("batch_norm_by_cudnn_again", limit="normalization", passes=2)
def batch_norm_by_cudnn_again(
    source: Tensor, weight: Tensor, bias: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """The same normalisation of the same batch by the same kernel, which leaves the running statistics alone.

    Returns (the result, the batch's mean, 1/σ, the reserved space).
    """
    mean = weight.new_zeros(source.shape[1], dtype=torch.promote_types(weight.dtype, torch.float32))
    made: tuple[Tensor, ...] = torch.ops.aten._batch_norm_with_update.default(
        source, weight, bias, mean, torch.ones_like(mean), momentum, eps
    )
    return made


def _is_wider(running: Argument, source: Argument) -> bool:
    """Tell whether running statistics are in float32, where images are in 16 bits.

    A batch's statistics are then in float32, too. Without running ones and weights, a CPU has them in 16 bits.
    """
    if not isinstance(running, TensorRef) or not isinstance(source, TensorRef):
        return False
    return running.spec.dtype != source.spec.dtype


@function("batch_norm_in_float32_again", limit="normalization", passes=2)
def in_float32_again(source: Tensor, momentum: float, eps: float) -> tuple[Tensor, ...]:
    """Batch norm without weights, with statistics in float32. Returns (the result, the batch's mean, 1/σ)."""
    made: tuple[Tensor, ...] = torch.ops.aten._native_batch_norm_legit.default(
        source, None, None, *_fresh_statistics(source), True, momentum, eps
    )
    return made


@function("batch_norm_in_float32_again_", limit="normalization", passes=1.5)
def in_float32_again_(source: Tensor, momentum: float, eps: float) -> tuple[Tensor, ...]:
    """The same, over its input."""
    return batch_norm_in_buffers_(source, None, None, *_fresh_statistics(source), True, momentum, eps)


def _fresh_statistics(source: Tensor) -> tuple[Tensor, Tensor]:
    mean = source.new_zeros(source.shape[1], dtype=torch.float32)
    return mean, torch.ones_like(mean)


def _normalize(out: Tensor, source: Tensor, *of_channels: Any) -> tuple[Tensor, None, None]:
    """The normalisation of a tensor (batch, channels, …) with given statistics.

    `of_channels` is weight and bias, or None; mean and 1/σ: each of shape (channels,). Returns the results of the
    first run, without the statistics.
    """
    weight, bias, mean, inverse_deviation = of_channels
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    offset = torch.zeros_like(mean) if bias is None else bias
    shift = torch.addcmul(offset, mean, scale, value=-1)
    return torch.addcmul(along(shift, source), source, along(scale, source), out=out), None, None


normalize, normalize_ = function_pair(_normalize, "batch_norm_again")


def _in_order(spec: TensorSpec) -> bool:
    """Tell whether a tensor is laid out as torch's kernels for whole rows or whole pixels want it.

    For other layouts torch has another kernel, which rounds otherwise, and whose variant with `out` goes wrong (it
    reads statistics that are not there yet, in 2.13).
    """
    return is_contiguous(spec) or is_channels_last(spec)


@cache
def _same_bits_again() -> bool:
    """Tell whether, on this CPU, `normalize` makes the bits that the batch norm kernel makes.

    Both are a multiplication and an addition an element; whether they round once or twice is the compilers' and
    the processor's affair, so it is tried, on odd sizes and in both layouts.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # A capture, during which graphs are built, makes fake tensors of what is computed.
    with without_modes(), torch.no_grad():
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
def in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The result over the input."""
    source, *_, training, _, _ = kernel.args
    overwrites = kernel.over(source)
    if training is not True or not overwrites or not _in_order(source.spec):
        return
    rerun = kernel.default.again
    if rerun is not None:
        over = {name_of(normalize): normalize_, name_of(in_float32_again): in_float32_again_}
        rerun = replace(rerun, target=name_of(over.get(rerun.target, batch_norm_no_stats_)))
    yield kernel.implement("inplace", batch_norm_, overwrites=overwrites, devices=("cpu",), again=rerun)


@function("batch_norm_", limit="normalization", passes=1.5)
def batch_norm_(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Batch norm over its input.

    Returns (the result, the batch's mean, 1/σ, the new running mean, the new running variance).
    """
    running = mean.clone(), variance.clone()
    return *batch_norm_in_buffers_(source, weight, bias, *running, *rest), *running


def batch_norm_in_buffers_(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """The same, over the running mean and variance too. Returns (the result, the batch's mean, 1/σ)."""
    run = torch.ops.aten._native_batch_norm_legit
    return _over(run.default, run.out, running_mean.dtype, source, weight, bias, running_mean, *rest)


@function("batch_norm_no_stats_", limit="normalization", passes=1.5)
def batch_norm_no_stats_(source: Tensor, weight: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Batch norm without running statistics, over its input. Returns (the result, the mean, 1/σ)."""
    dtype = source.dtype if weight is None else weight.dtype  # that of the statistics, on a CPU
    run = torch.ops.aten._native_batch_norm_legit
    return _over(run.no_stats, run.no_stats_out, dtype, source, weight, *rest)


def _over(run: Any, run_out: Any, dtype: torch.dtype, source: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """A batch norm over its input, by the variant with `out` if the layout has one."""
    if not _in_order(spec_of(source)):
        made, *statistics = run(source, *rest)
        return source.copy_(made), *statistics
    mean, deviation = (source.new_empty(0, dtype=dtype) for _ in range(2))
    run_out(source, *rest, out=source, save_mean=mean, save_invstd=deviation)
    return source, mean, deviation


@alternatives_for(_BACKWARD, _BACKWARD_BY_CUDNN)
def backward(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient from the input or from the output; into new memory, or over the gradient that comes in."""
    gradient, source, weight, _, _, mean, deviation, training, eps, mask = kernel.args[:10]
    if training is not True:
        return
    args = (gradient, source, weight, mean, deviation, eps, mask)
    # Batches of single points go through a kernel for whole pixels, whose sums depend on the number of channels.
    by_channels = (
        is_contiguous(gradient.spec) and is_contiguous(source.spec) and math.prod(source.spec.shape[2:]) > 1
    )
    if overwrites := kernel.over(gradient):
        over = partial(kernel.implement, args=args, overwrites=overwrites)
        if by_channels:
            yield over("inplace", backward_by_channels_, devices=("cpu",))
        if source.spec.dtype == "float32":
            yield over("inplace_by_samples", backward_by_samples_, tolerance=1e-5)
    found = kernel.normalization(source, deviation, _FUNCTIONAL, _NO_STATISTICS, _BY_CUDNN)
    if found is None or found[1].spec.dtype != "float32":
        return
    forward, output = found
    bias = forward.args[2]
    args = (gradient, output, weight, bias, deviation, eps, mask)
    yield from from_output(kernel, backward_from_output, backward_from_output_, args, weight=weight, bias=bias)


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


def _samples_bytes(call: Call) -> int:
    """The part of a float32 input that a GPU has at a time, if that is whole samples."""
    whole = float32_bytes(call)
    return max(piece_bytes(whole, "cuda"), whole // max(1, tensor_at(call, 1).spec.shape[0]))


def _samples_launches(call: Call) -> int:
    return 6 + 6 * -(-float32_bytes(call) // max(1, _samples_bytes(call)))


_by_samples: dict[str, Any] = {
    "limit": "normalization",
    "workspace_bytes": _samples_bytes,
    "launches": _samples_launches,
}


@function("batch_norm_backward_by_channels_")
def backward_by_channels_(gradient: Tensor, source: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Gradients of batch norm for (input, weight, bias), some channels at a time, over the gradient that comes in.

    Each channel's gradient is of that channel alone, so these are the bits of one call for all of them. `rest` is
    weight, mean, 1/σ, ε, and which of the three gradients are wanted.
    """
    weight, mean, deviation, eps, mask = rest
    sums = []
    for some in pieces(source, 1):
        part = gradient[:, some]
        made, *of_parameters = torch.ops.aten.native_batch_norm_backward.default(
            part.contiguous(),
            source[:, some].contiguous(),
            None if weight is None else weight[some],
            *(None, None, mean[some], deviation[some], True, eps, [True, mask[1], mask[2]]),
        )
        part.copy_(made)
        del made  # before the next one is
        sums.append(of_parameters)
    for_weight, for_bias = (
        torch.cat([parts[at] for parts in sums]) if wanted else None for at, wanted in enumerate(mask[1:])
    )
    return gradient, for_weight, for_bias


@function("batch_norm_backward_by_samples_", passes=2.5, **_by_samples)
def backward_by_samples_(gradient: Tensor, source: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """The same, some samples at a time: after the sums over the batch, (g − Σg/n − x̂·Σ(g·x̂)/n)·w/σ over g."""
    weight, mean, deviation, eps, mask = rest
    _, products, sums = torch.ops.aten.native_batch_norm_backward.default(
        gradient, source, weight, None, None, mean, deviation, True, eps, [False, True, True]
    )
    count = source.numel() // max(1, source.shape[1])
    scale = deviation if weight is None else deviation * weight
    slope, offset = deviation * products / count, sums / count
    for some in pieces(source, 0):
        part, of_source = gradient[some], source[some]
        centered = (of_source - along(mean, source)).mul_(along(slope, source))
        part.sub_(along(offset, source)).sub_(centered).mul_(along(scale, source))
        del centered  # before the next one is made
    return gradient, products if mask[1] else None, sums if mask[2] else None


@function("batch_norm_backward_from_output", limit="normalization", passes=1.5)
def backward_from_output(gradient: Tensor, output: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Gradients of batch norm for (input, weight, bias) from its output.

    The output is an affine image of the normalised input, so it takes the input's place with b for the mean,
    1/w for 1/σ, and w²/σ for the weight. Sound where `is_invertible`. `rest` is weight, bias, 1/σ, ε, and which of
    the three gradients are wanted.
    """
    *of_channels, eps, mask = rest
    scale, mean, inverse = _as_statistics(*of_channels)
    made: tuple[Tensor | None, ...] = torch.ops.aten.native_batch_norm_backward.default(
        gradient, output, scale, None, None, mean, inverse, True, eps, mask
    )
    return made


@function("batch_norm_backward_from_output_", passes=2.5, **_by_samples)
def backward_from_output_(gradient: Tensor, output: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """The same, over the gradient that comes in."""
    *of_channels, eps, mask = rest
    in_rows = gradient.is_contiguous() and output.is_contiguous() and gradient.device.type == "cpu"
    run = backward_by_channels_ if in_rows else backward_by_samples_
    return run(gradient, output, *_as_statistics(*of_channels), eps, mask)


def _as_statistics(weight: Tensor, bias: Tensor | None, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, mean, 1/σ) with which the output stands for the input."""
    return weight * weight * deviation, torch.zeros_like(weight) if bias is None else bias, 1 / weight


def along(of_channels: Tensor, like: Tensor) -> Tensor:
    """A tensor (channels,) as it broadcasts over (batch, channels, …)."""
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))
