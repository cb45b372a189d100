"""Layouts of fake tensors in a capture: those of the real tensors that kernels make."""

import itertools
import math
import random

import pytest
import torch
from small_models import assert_same, step, twin
from thoroughness import some
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode

import monetlite
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


def views(count):
    """Tensors of some ones among their sizes, in any order, and shapes of other ones that they can be viewed in."""
    numbers = random.Random(0)
    while count:
        sizes = [numbers.choice([1, 1, 2, 3, 4]) for _ in range(numbers.randint(1, 5))]
        tensor = torch.empty(sizes).permute(numbers.sample(range(len(sizes)), len(sizes)))
        shape = [size for size in tensor.shape if size > 1]
        for _ in range(numbers.randint(0, 3)):
            shape.insert(numbers.randint(0, len(shape)), 1)
        if len(shape) > 1 and numbers.random() < 0.5:
            at = numbers.randrange(len(shape) - 1)
            shape[at : at + 2] = [math.prod(shape[at : at + 2])]
        if tuple(shape) == tensor.shape:
            continue  # AOTAutograd's
        try:
            strides = tensor.view(shape).stride()
        except RuntimeError:
            continue
        count -= 1
        yield tensor, shape, strides


@pytest.mark.parametrize("by_python", [False, True])
def test_views_with_ones_have_real_strides(by_python):
    wrong = 0
    for tensor, shape, strides in views(some(200)):
        with FakeTensorMode() as mode:
            wrong += mode.from_tensor(tensor).view(shape).stride() != strides
        with kernels_kept_whole(), FakeTensorMode() as mode:
            if by_python:
                with enable_python_dispatcher():
                    found = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(shape)
            else:
                found = mode.from_tensor(tensor).view(shape)
        assert found.stride() == strides, (tensor.shape, tensor.stride(), shape)
    assert wrong, "torch's own are right"


@pytest.mark.parametrize("of", [lambda x: x / 2.0, lambda x: 1 + x, lambda x: x - 1, lambda x: x * 2])
@pytest.mark.parametrize("shape", [(1, 4, 2, 3), (2, 1, 3, 3), (2, 4, 1, 1)])
def test_numbers_leave_the_strides_of_images(of, shape):
    for order in itertools.permutations(range(4)):
        sizes = [shape[at] for at in order]
        images = torch.empty(sizes).permute([order.index(at) for at in range(4)])
        real = of(images)
        with kernels_kept_whole(), FakeTensorMode() as mode:
            assert of(mode.from_tensor(images)).stride() == real.stride(), images.stride()


class Images(nn.Module):
    """Rows as images, as after attention: group norm copies those that it can't take for channels-last."""

    def __init__(self, between):
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(16, 16), nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3)
        self.between = between

    def forward(self, x):
        rows = self.layer(x).transpose(1, 2)
        side = math.isqrt(x.shape[1])
        return self.last(self.norm(self.between(rows.reshape(len(x), 16, side, side))))


@pytest.mark.parametrize(("between", "batch"), [(lambda x: x / 2.0, 2), (lambda x: x / 2.0, 1), (nn.ReLU6(), 1)])
def test_rows_of_a_batch_of_one_are_images(between, batch):
    plain = Images(between)
    planned = monetlite.within(twin(plain), budget="100%", device="rtx-4090", time_limit=0.3)
    for side in (8, 6, 8):
        inputs = (torch.randn(batch, side * side, 16),)
        assert_same(step(planned, inputs), step(plain, inputs))
