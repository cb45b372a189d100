"""Layouts of fake tensors in a capture: those of the real tensors that kernels make."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from monetlite.tracing.whole_kernels import kernels_kept_whole

aten = torch.ops.aten
IMAGES, PIXELS, ONE_CHANNEL, ROWS = (4, 8, 6, 6), (4, 8, 1, 1), (4, 1, 3, 3), (2, 5, 8)
ALL = [True, True, True]


def batch_norm(images):
    ones, zeros = torch.ones(images.shape[1]), torch.zeros(images.shape[1])
    return aten._native_batch_norm_legit_functional(images, ones, zeros, zeros, ones, True, 0.1, 1e-5)


def batch_norm_backward(gradient, images):
    ones = torch.ones(images.shape[1])
    return aten.native_batch_norm_backward(gradient, images, ones, ones, ones, ones, ones, True, 1e-5, ALL)


def group_norm_backward(gradient, images):
    count, channels, height, width = images.shape
    stats, weight = torch.ones(count, 1), torch.ones(channels)
    return aten.native_group_norm_backward(
        gradient, images, stats, stats, weight, count, channels, height * width, 1, ALL
    )


def layer_norm_backward(gradient, rows):
    stats, weight = torch.ones(*rows.shape[:-1], 1), torch.ones(rows.shape[-1])
    return aten.native_layer_norm_backward(gradient, rows, [rows.shape[-1]], stats, stats, weight, weight, ALL)


ONE = torch.ones(())
CASES = {
    "batch norm": (batch_norm, IMAGES),
    "batch norm of pixels": (batch_norm, PIXELS),
    "batch norm of a channel": (batch_norm, ONE_CHANNEL),
    "batch norm backward": (batch_norm_backward, IMAGES, IMAGES),
    "batch norm backward, pixels": (batch_norm_backward, PIXELS, PIXELS),
    "batch norm backward, a channel": (batch_norm_backward, ONE_CHANNEL, ONE_CHANNEL),
    "group norm backward": (group_norm_backward, IMAGES, IMAGES),
    "layer norm backward": (layer_norm_backward, ROWS, ROWS),
    "layer norm backward, images": (layer_norm_backward, IMAGES, IMAGES),
    "log softmax backward": (lambda g, x: aten._log_softmax_backward_data(g, x, 1, torch.float32), IMAGES, IMAGES),
    "glu backward": (lambda g, x: aten.glu_backward(g, x, 1), (4, 4, 6, 6), IMAGES),
    "squares backward": (lambda x, y: aten.mse_loss_backward(ONE, x, y, 1), IMAGES, IMAGES),
    "smooth L1 backward": (lambda x, y: aten.smooth_l1_loss_backward(ONE, x, y, 1, 1.0), ROWS, ROWS),
    "huber backward": (lambda x, y: aten.huber_loss_backward(ONE, x, y, 1, 1.0), ROWS, ROWS),
    "relu 6 backward": (lambda g, x: aten.hardtanh_backward(g, x, 0, 6), IMAGES, IMAGES),
    "hard swish backward": (lambda g, x: aten.hardswish_backward(g, x), IMAGES, IMAGES),
    "hard sigmoid backward": (lambda g, x: aten.hardsigmoid_backward(g, x), ROWS, ROWS),
    "softplus backward": (lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0), ROWS, ROWS),
    "elu backward": (lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x), IMAGES, IMAGES),
}


def laid_out(shape):
    """Tensors of a shape in several layouts."""
    yield torch.rand(shape)
    yield torch.rand((*shape[:1], *shape[:0:-1])).permute(0, *range(len(shape) - 1, 0, -1))
    if len(shape) == 4:
        yield torch.empty(shape, memory_format=torch.channels_last).copy_(torch.rand(shape))
        yield torch.rand(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    yield torch.rand(shape[0], *(1 for _ in shape[1:])).expand(shape)


@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_are_laid_out_as_real_ones(case):
    function, *shapes = CASES[case]
    for tensors in itertools.product(*map(laid_out, shapes)):
        real = function(*tensors)
        with kernels_kept_whole(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = function(*map(mode.from_tensor, tensors))
        pairs = zip(*((item if isinstance(item, tuple) else (item,)) for item in (real, fake)), strict=True)
        first, other = next(pairs)
        assert (first.shape, first.stride()) == (other.shape, other.stride()), [item.stride() for item in tensors]
