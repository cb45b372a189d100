"""Batch norm: in place, and run again with the first run's statistics.

The normalisation is y = x·α + β with α = w/σ and β = b − μ·α for each channel (Ioffe and Szegedy,
arXiv:1502.03167), where μ and 1/σ are the batch's. With μ and 1/σ kept, which are a few numbers, a re-run is one
pass over x instead of three.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from monetlite.core.graph import Call, Implementation, TensorRef, TensorSpec
from monetlite.fx.calls import spec_of
from monetlite.operators.kernel import Kernel, is_channels_last, is_contiguous
from monetlite.operators.registry import alternatives_for, function, name_of

FUNCTIONAL = "aten._native_batch_norm_legit_functional.default"
NO_STATISTICS = "aten._native_batch_norm_legit.no_stats"
BY_CUDNN = "aten._batch_norm_with_update_functional.default"
"""What runs as cuDNN's where a plain step's would: its gradient reads what the fourth result reserves for it."""


def without_running_statistics(call: Call, results: tuple[TensorRef | None, ...], device: str) -> Call | None:
    """The same normalisation of the same batch, for a re-run: the same bits, and no running statistics.

    With the first run's statistics where that makes the same bits; computing them again elsewhere.
    """
    if call.target == BY_CUDNN:
        source, weight, bias, _, _, momentum, eps = call.args
        return replace(
            call,
            target=name_of(batch_norm_by_cudnn_again),
            args=(source, weight, bias, momentum, eps),
            outputs=call.outputs[:4],
        )
    if call.target != FUNCTIONAL:
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
        target=NO_STATISTICS,
        args=(source, weight, bias, training, momentum, eps),
        outputs=call.outputs[:3],
    )


@function("batch_norm_by_cudnn_again", limit="normalization", passes=2)
def batch_norm_by_cudnn_again(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """The same normalisation of the same batch by the same kernel, which leaves the running statistics alone.

    Returns (the result, the batch's mean, 1/σ, the reserved space).
    """
    mean = weight.new_zeros(source.shape[1], dtype=torch.promote_types(weight.dtype, torch.float32))
    made: tuple[torch.Tensor, ...] = torch.ops.aten._batch_norm_with_update.default(
        source, weight, bias, mean, torch.ones_like(mean), momentum, eps
    )
    return made


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
    return torch.addcmul(along(shift, source), source, along(scale, source), out=out)


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


@alternatives_for(FUNCTIONAL)
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
    running_mean, running_variance = running_mean.clone(), running_variance.clone()
    made = batch_norm_in_buffers_(source, weight, bias, running_mean, running_variance, training, momentum, eps)
    return *made, running_mean, running_variance


def batch_norm_in_buffers_(
    source: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """The same, over the running mean and variance too. Returns (the result, the batch's mean, 1/σ)."""
    arguments = (source, weight, bias, running_mean, running_variance, training, momentum, eps)
    if not _in_order(spec_of(source)):
        made, mean, deviation = torch.ops.aten._native_batch_norm_legit.default(*arguments)
        return source.copy_(made), mean, deviation
    mean, deviation = running_mean.new_empty(0), running_mean.new_empty(0)
    torch.ops.aten._native_batch_norm_legit.out(*arguments, out=source, save_mean=mean, save_invstd=deviation)
    return source, mean, deviation


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


def along(of_channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor (channels,) as it broadcasts over (batch, channels, …)."""
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))
