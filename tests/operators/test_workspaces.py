"""What functions of ours are said to hold on a GPU, beside what they hold with pieces of the same size on a CPU."""

import functools

import pytest
import torch

from monetlite.core.graph import Call, TensorRef, TensorSpec
from monetlite.operators import (
    activations,
    batch_norm,
    convolution_kernels,
    cross_entropy,
    layer_norm,
    normalization,
    packing,
    pooling,
    relu,
    tiled_loss,
)
from monetlite.operators.implementations import FUNCTIONS, name_of
from monetlite.profiling.memory_records import peak_growth_bytes

SLACK_BYTES = 40_000
"""For what is of the size of channels and rows."""


def call_of(function, *arguments):
    """A call, as a graph has it, with these arguments."""

    def encoded(item):
        if isinstance(item, torch.Tensor):
            spec = TensorSpec(
                shape=tuple(item.shape), stride=item.stride(), dtype=str(item.dtype).removeprefix("torch.")
            )
            return TensorRef(node="x", value=0, spec=spec)
        return tuple(map(encoded, item)) if isinstance(item, list | tuple) else item

    return Call(target=name_of(function), args=tuple(map(encoded, arguments)), kwargs=(), outputs=("y",))


def declared_and_held(function, *arguments, result_bytes):
    held = peak_growth_bytes(lambda: function(*arguments)) - result_bytes
    return FUNCTIONS[name_of(function)].workspace_bytes(call_of(function, *arguments)), held


@pytest.mark.parametrize("pieces", [1, 3, 30])
def test_pooling(pieces, monkeypatch):
    x = torch.randn(30, 4, 64, 64)
    window = ([3, 3], [2, 2], [1, 1], [1, 1])
    result, indices = torch.ops.aten.max_pool2d_with_indices.default(x, *window)
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(pooling.CHUNK_ELEMENTS, name, result.numel() // pieces)
    declared, held = declared_and_held(
        pooling.pooling_offsets, indices, list(x.shape), *window, result_bytes=result.numel()
    )
    assert held - SLACK_BYTES <= declared <= 1.1 * held + SLACK_BYTES
    offsets = pooling.pooling_offsets(indices, list(x.shape), *window)
    declared, held = declared_and_held(
        pooling.max_pool2d_backward_from_offsets,
        *(torch.randn_like(result), list(x.shape), *window, False, offsets),
        result_bytes=x.nbytes,
    )
    assert held - SLACK_BYTES <= declared <= 1.1 * held + SLACK_BYTES
    _, held = declared_and_held(
        pooling.max_pool2d_backward_from_indices,
        *(torch.randn_like(result), list(x.shape), *window, False, indices),
        result_bytes=x.nbytes,
    )
    assert held == 0


@pytest.mark.parametrize("piece_bytes", [2**14, 2**20, 2**30])
@pytest.mark.parametrize("from_output", [False, True])
def test_batch_norm_by_samples(piece_bytes, from_output, monkeypatch):
    """At least one sample at a time, however large it is."""
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(normalization.MAX_PIECE_BYTES, name, piece_bytes)
    x, gradient = (torch.randn(16, 8, 64, 64).contiguous(memory_format=torch.channels_last) for _ in range(2))
    channels = [torch.rand(8) + 0.5 for _ in range(3)]
    function = batch_norm.backward_from_output_ if from_output else batch_norm.backward_by_samples_
    declared, held = declared_and_held(function, gradient, x, *channels, 1e-5, [True, True, True], result_bytes=0)
    assert held - SLACK_BYTES <= declared <= 1.1 * held + SLACK_BYTES


@pytest.mark.parametrize("piece_bytes", [2**16, 2**18, 2**30])
def test_layer_norm_from_its_output(piece_bytes, monkeypatch):
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(normalization.MAX_PIECE_BYTES, name, piece_bytes)
    output, gradient = torch.randn(512, 1024), torch.randn(512, 1024)
    deviation, weight, bias = torch.rand(512, 1) + 0.5, torch.rand(1024) + 0.5, torch.randn(1024)
    declared, held = declared_and_held(
        layer_norm.backward_from_output_,
        *(gradient, output, [1024], deviation, weight, bias, [True, True, True]),
        result_bytes=0,
    )
    assert held - SLACK_BYTES <= declared <= 1.5 * held + SLACK_BYTES


@pytest.mark.parametrize("rows_at_a_time", [10, 100, 1000])
def test_cross_entropy(rows_at_a_time, monkeypatch):
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, name, 200 * rows_at_a_time)
    logs = torch.randn(1000, 200).log_softmax(1)
    target, total = torch.randint(0, 200, (1000,)), torch.tensor(1000.0)
    arguments = (torch.tensor(1.0), logs, target, None, 1, -100, total, 1, torch.float32)
    declared, held = declared_and_held(cross_entropy.cross_entropy_backward, *arguments, result_bytes=logs.nbytes)
    assert abs(declared - held) <= SLACK_BYTES
    for function, result_bytes in (
        (cross_entropy.cross_entropy_backward_by_rows, logs.nbytes),
        (cross_entropy.cross_entropy_backward_, 0),
    ):
        declared, held = declared_and_held(function, *arguments, result_bytes=result_bytes)
        assert abs(declared - held) <= SLACK_BYTES


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("steps", [[], [("div", 30.0), ("tanh", None), ("mul", 30.0)]])
def test_tiled_loss(steps, tiles, monkeypatch):
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, name, 2**16)
    rows, matrix = torch.randn(512, 64), torch.randn(64, 2048)
    arguments = ([(rows, matrix, 1.0, True, tiled_loss.BY_CLASS)], None, torch.randint(0, 2048, (512,)))
    declared, held = declared_and_held(
        tiled_loss.linear_cross_entropy,
        *(*arguments, None, 1, -100, steps, False, tiles),
        result_bytes=rows.nbytes + matrix.nbytes,
    )
    assert held - SLACK_BYTES <= declared <= 1.1 * held + SLACK_BYTES


def test_convolutions_by_patches():
    """Of one image at a time."""
    image, weight, gradient = torch.randn(8, 16, 32, 32), torch.randn(4, 16, 3, 3), torch.randn(8, 4, 32, 32)
    geometry = ([1, 1], [1, 1], [1, 1])
    patches_bytes = 9 * image[0].nbytes
    for function, arguments, result_bytes in (
        (convolution_kernels.convolve_unfolded, (image, weight, None, *geometry), gradient.nbytes),
        (
            convolution_kernels.weight_gradient_unfolded,
            (gradient, image, list(weight.shape), [False, True, False], *geometry),
            weight.nbytes,
        ),
    ):
        held = peak_growth_bytes(functools.partial(function, *arguments))
        assert 0 <= held - result_bytes - patches_bytes <= image[0].nbytes + SLACK_BYTES, function


@pytest.mark.parametrize("pieces", [1, 4])
def test_masks_and_bfloat16(pieces, monkeypatch):
    """Without Triton, which holds nothing."""
    source, gradient = torch.randn(256, 4096), torch.randn(256, 4096)
    for name in ("cpu", "cuda"):
        monkeypatch.setitem(packing.PIECE_ELEMENTS, name, source.numel() // pieces)
    strides = [4096, 1]
    mask = relu.relu_mask(source, strides)
    kept = activations.to_bfloat16(source, strides)
    for function, arguments, result_bytes in (
        (relu.relu_mask, (source, strides), mask.nbytes),
        (packing.masked_gradient_, (gradient, mask, strides), 0),
        (activations.backward_from_bfloat16_, (gradient, kept, strides, "gelu_backward", "none"), 0),
    ):
        declared, held = declared_and_held(function, *arguments, result_bytes=result_bytes)
        assert held - SLACK_BYTES <= declared <= 2 * held + SLACK_BYTES, function
