"""A scheduled step is plain autograd's step, whatever is recomputed and however operators run."""

import functools
import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    Elementwise,
    SmallCNN,
    TwoInputsTwoOutputs,
    WithLoss,
    assert_same,
    step,
    tiny_transformer,
    twin,
)
from step_lists import (
    drop_once,
    free_profile,
    recompute_at_random,
    recompute_everything,
    recompute_with_any_reads,
    schedule_of,
    with_random_implementations,
)
from thoroughness import often
from torch import nn
from torch.nn import functional as F

import monetlite
from monetlite.core.graph import Phase
from monetlite.core.steps import plain_steps
from monetlite.models import build_model
from monetlite.models.convnets import BasicBlock, DenseNet, ResNet

REORDERED_SUMS = 1e-6
THOROUGH = "MONETLITE_THOROUGH" in os.environ
"""More models, and more schedules of each."""


def exactly(graph):
    """A graph without the implementations that promise less than the same bits."""
    return graph.available("cpu").restricted(lambda item: item.tolerance == 0.0)


def wrapped_step(model, graph, steps, inputs):
    return step(monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps)), inputs)


def small_cnn():
    return SmallCNN(), (torch.randn(4, 3, 12, 12),)


def elementwise():
    return Elementwise(), (torch.randn(5, 16, requires_grad=True),)


def two_inputs():
    return TwoInputsTwoOutputs(), (torch.randint(0, 11, (3, 6)), torch.randn(3, 8, requires_grad=True))


def with_loss():
    return WithLoss(), {"x": torch.randn(4, 6), "labels": torch.tensor([0, 3, 1, 2])}


SMALL = {"cnn": small_cnn, "elementwise": elementwise, "two inputs": two_inputs, "with loss": with_loss}


@functools.cache
def traced(kind):
    """A small model, its inputs, and its graph."""
    torch.manual_seed(0)
    model, inputs = SMALL[kind]()
    return model, inputs, monetlite.trace(model, inputs)


@pytest.mark.parametrize("kind", often(SMALL, *(SMALL.keys() - {"cnn", "two inputs"})))  # which later tests train
def test_every_kind_of_schedule_is_plain_training_bit_for_bit(kind):
    model, inputs, graph = traced(kind)
    graph = exactly(graph)
    expected = step(twin(model), inputs)
    rng = random.Random(7)
    everything = recompute_everything(graph)
    runs = [index for index, _ in everything if graph.operators[index].phase is Phase.FORWARD]
    assert len(runs) > len(set(runs)), "this schedule should recompute"
    in_place = with_random_implementations(graph, everything, rng)
    at_random = with_random_implementations(graph, recompute_at_random(graph, rng), rng)
    compact = with_random_implementations(graph, recompute_with_any_reads(graph, rng, 0.5), rng)
    # This model of many operators runs what is the furthest from plain training.
    few = not THOROUGH and kind == "elementwise"
    for steps in (in_place, compact, *(() if few else (plain_steps(graph), everything, at_random))):
        assert_same(wrapped_step(model, graph, steps, inputs), expected)


def test_in_place_implementations_were_tested():
    """The random choices above do reach the in-place implementations, in both passes."""
    used = set()
    for kind in SMALL:
        _, _, graph = traced(kind)
        steps = with_random_implementations(graph, recompute_everything(graph), random.Random(7))
        for index, choice in steps:
            item = graph.operators[index].implementations[choice]
            if item.overwrites:
                used.add(item.call.target)
    assert {"aten.relu_.default", "aten.add_.Tensor", "aten.threshold_backward.grad_input"} <= used
    assert len(used) >= 12, used


@pytest.fixture(scope="module")
def traced_cnn():
    model, inputs, graph = traced("cnn")
    return model, inputs, exactly(graph), step(twin(model), inputs)


@settings(max_examples=5 if THOROUGH else 2, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.2, 0.5, 0.9]))
def test_random_legal_schedules_of_a_cnn_with_batch_norm_and_dropout(traced_cnn, seed, share):
    model, inputs, graph, expected = traced_cnn
    rng = random.Random(seed)
    steps = with_random_implementations(graph, recompute_with_any_reads(graph, rng, share), rng)
    assert_same(wrapped_step(model, graph, steps, inputs), expected)


def resnet():
    return ResNet((1, 1), block=BasicBlock, classes=10).train()


def mobilenet():
    return build_model("mobilenet_v2", batch=2, input_size=(32, 32)).model


def densenet():
    return DenseNet((2, 2), growth=8, stem_channels=16, classes=10).train()


NETWORKS = (resnet, *([densenet, mobilenet] if THOROUGH else []))


@pytest.mark.parametrize("build", NETWORKS)
def test_real_convolutional_networks(build):
    model, inputs = build(), (torch.randn(2, 3, 32, 32),)
    graph = exactly(monetlite.trace(model, inputs))
    expected = step(twin(model), inputs)
    rng = random.Random(1)
    steps = with_random_implementations(graph, drop_once(graph), rng)
    assert any(graph.operators[index].implementations[choice].overwrites for index, choice in steps)
    assert_same(wrapped_step(model, graph, steps, inputs), expected)
    if not THOROUGH:
        return
    compact = with_random_implementations(graph, recompute_with_any_reads(graph, random.Random(3), 0.4), rng)
    assert_same(wrapped_step(model, graph, compact, inputs), expected)


WITHIN = {"bert": 0.0, "vit": 0.0, "gpt2": REORDERED_SUMS, "llama": REORDERED_SUMS}


@pytest.mark.parametrize("kind", often(WITHIN, "bert"))
def test_transformers(kind):
    within = WITHIN[kind]
    model, inputs = tiny_transformer(kind, layers=2 if THOROUGH or kind == "vit" else 1)
    graph = exactly(monetlite.trace(model, inputs, outputs="all"))
    stored = step(twin(model), inputs)
    if within:
        plain, stored = stored, wrapped_step(model, graph, plain_steps(graph), inputs)
        assert_same(stored, plain, within)
    rng = random.Random(2)
    steps = with_random_implementations(graph, recompute_with_any_reads(graph, rng, 0.3), rng)
    assert_same(wrapped_step(model, graph, steps, inputs), stored)


def test_bfloat16():
    model, inputs = SmallCNN().bfloat16(), (torch.randn(4, 3, 12, 12, dtype=torch.bfloat16),)
    # The captured backward pass of dropout scales by 1/(1-p) in higher precision than eager's, which rounds
    # it to bfloat16 first: the same for a power of two.
    model.dropout.p = 0.5
    graph = exactly(monetlite.trace(model, inputs))
    steps = with_random_implementations(graph, drop_once(graph), random.Random(3))
    assert_same(wrapped_step(model, graph, steps, inputs), step(twin(model), inputs))


class PoolsByAttention(nn.Module):
    """Weights images' positions: a matrix product of one row, a view in its own shape but for strides."""

    def __init__(self):
        super().__init__()
        self.convolution, self.weigh, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 1), nn.Linear(8, 10)

    def forward(self, images):
        positions = self.convolution(images).flatten(2).transpose(1, 2)
        return self.head(torch.matmul(self.weigh(positions).softmax(1).transpose(1, 2), positions).squeeze(1))


def test_a_product_of_one_row_reads_the_strides_of_plain_training():
    model, inputs = PoolsByAttention(), (torch.randn(4, 3, 16, 16),)
    graph = exactly(monetlite.trace(model, inputs))
    for steps in (plain_steps(graph), recompute_everything(graph)):
        assert_same(wrapped_step(model, graph, steps, inputs), step(twin(model), inputs))


class StepsCells(nn.Module):
    """A cell of a GRU over some positions, whose width is no multiple of a CPU's vectors."""

    def __init__(self, width, bias):
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width, bias=bias), nn.Linear(width, 4)

    def forward(self, x):
        hidden = torch.zeros_like(x[0])
        for position in x:
            hidden = self.cell(position, hidden)
        return self.head(hidden)


@pytest.mark.parametrize(("width", "bias"), [(20, True), (12, False)])
def test_cells_of_grus_round_as_in_plain_training(width, bias):
    torch.manual_seed(0)
    model, inputs = StepsCells(width, bias), (torch.randn(3, 8, width, requires_grad=True),)
    graph = exactly(monetlite.trace(model, inputs))
    for steps in (plain_steps(graph), recompute_everything(graph)):
        assert_same(wrapped_step(model, graph, steps, inputs), step(twin(model), inputs))


class DropsInPlace(nn.Module):
    """Draws masks in place for tensors that are not in the order of their indices."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        made = self.first(x)
        if self.kind == "transposed":
            made = F.dropout(made.transpose(1, 2), 0.3, True, inplace=True).transpose(1, 2)
        elif self.kind == "alpha":
            made = F.alpha_dropout(made.permute(2, 0, 1), 0.3, True).permute(1, 2, 0)
        else:
            mask = torch.zeros_like(made)
            mask[:, ::2].bernoulli_(0.3)
            mask[:, 1::2].permute(2, 0, 1).bernoulli_(0.4)
            made = made * mask * torch.bernoulli(torch.empty_like(made).transpose(0, 1), 0.5).transpose(0, 1)
        return self.last(made)


@pytest.mark.parametrize("kind", ["transposed", "alpha", "slices"])
def test_masks_are_drawn_in_place_as_plain_training_draws_them(kind):
    model, inputs = DropsInPlace(kind), (torch.randn(4, 8, 6),)
    graph = exactly(monetlite.trace(model, inputs))
    for steps in (plain_steps(graph), recompute_everything(graph)):
        assert_same(wrapped_step(model, graph, steps, inputs), step(twin(model), inputs))


class FiltersFrequencies(nn.Module):
    """Multiplies complex tensors of two layouts, as spectral filters do."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.filter = (
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Parameter(torch.randn(9, 16, 2)),
        )

    def forward(self, x):
        frequencies = torch.fft.rfft(self.first(x), dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return self.last(torch.fft.irfft(frequencies, n=16, dim=1, norm="ortho"))


class DividesFrequencies(nn.Module):
    """Divides complex tensors of few elements, as state spaces do."""

    def __init__(self):
        super().__init__()
        self.above, self.below = (nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x):
        return (self.above.exp() / self.below.exp()).real * x


@pytest.mark.parametrize("build", [FiltersFrequencies, DividesFrequencies])
def test_complex_numbers_round_as_in_plain_training(build):
    model = build()
    inputs = (torch.randn(8, 16, 16) if build is FiltersFrequencies else torch.randn(2, 4, 3),)
    graph = exactly(monetlite.trace(model, inputs))
    for seed in range(4):
        steps = with_random_implementations(graph, recompute_everything(graph), random.Random(seed))
        assert_same(wrapped_step(model, graph, steps, inputs), step(twin(model), inputs))


class Normalizes(nn.Module):
    """Batch norms without weights, as in heads of self-supervised learning."""

    def __init__(self, transposed):
        super().__init__()
        layers = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False))]
        self.transposed, self.layers = transposed, nn.ModuleList(layers)

    def forward(self, x):
        for linear, norm in zip(self.layers[::2], self.layers[1::2], strict=True):
            made = linear(x).transpose(1, 2)
            made = norm(made if self.transposed else made.contiguous())
            x = made.exp().sin().tanh().transpose(1, 2)
        return x.contiguous()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_batch_norms_without_weights_in_16_bits(transposed, autocast):
    model, x = Normalizes(transposed), torch.randn(8, 20, 16)
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph = exactly(monetlite.trace(model, x))
        expected = step(twin(model), (x,))
        for steps in (
            recompute_everything(graph),
            with_random_implementations(graph, recompute_everything(graph), random.Random(1)),
        ):
            assert_same(wrapped_step(model, graph, steps, (x,)), expected)


def test_running_statistics_are_updated_once():
    """With batch norm re-run several times, counter and running mean are those of one forward pass."""
    model, inputs, graph = traced("cnn")
    steps = recompute_everything(graph)
    batch_norms = [index for index, _ in steps if graph.operators[index].family == "batch_norm"]
    assert len(batch_norms) > 2 * len(set(batch_norms))
    after = wrapped_step(model, graph, steps, inputs)
    assert after.buffers["bn1.num_batches_tracked"].item() == 1
    with torch.no_grad():
        mean = model.stem(inputs[0]).mean((0, 2, 3))
    torch.testing.assert_close(after.buffers["bn1.running_mean"], 0.1 * mean)


def test_dropout_draws_one_mask_for_a_step_and_another_for_the_next():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return nn.functional.dropout(torch.tanh(self.weight * x), 0.5).exp()

    model, x = Net(), torch.ones(64)
    graph = monetlite.trace(model, x)
    trained = monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), recompute_everything(graph)))
    kept = []
    for _ in range(2):
        model.weight.grad = None
        output = trained(x)
        output.sum().backward()
        dropped = output == 1  # exp(0)
        assert torch.equal(model.weight.grad == 0, dropped), "the backward pass used the forward pass's mask"
        kept.append(dropped)
    assert not torch.equal(*kept)


def test_two_steps_with_an_optimizer():
    model, inputs, graph = traced("cnn")
    graph = exactly(graph)
    rng = random.Random(4)
    steps = with_random_implementations(graph, recompute_everything(graph), rng)
    schedule = schedule_of(free_profile(graph), steps)
    plain, trained = twin(model), monetlite.MONeTWrapper(twin(model), schedule)
    for candidate in (plain, trained):
        torch.manual_seed(11)
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            candidate(*inputs).square().mean().backward()
            optimizer.step()
    for (name, ours), (_, theirs) in zip(trained.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not torch.equal(plain.stem.weight, model.stem.weight)


def test_gradients_accumulate_over_steps():
    model, inputs, graph = traced("with loss")
    trained = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), recompute_everything(graph)))
    plain = twin(model)
    for candidate in (plain, trained):
        for factor in (1.0, 2.0):
            candidate(inputs["x"] * factor, inputs["labels"])["loss"].backward()
    for (name, ours), (_, theirs) in zip(trained.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
