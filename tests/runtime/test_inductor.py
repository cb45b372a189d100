"""Programs compiled by Inductor: plain training but for rounding, or a refusal where that can't be."""

import random
from dataclasses import replace

import pytest
import torch
from small_models import assert_same, step, tiny_transformer, twin
from step_lists import (
    free_profile,
    recompute,
    recompute_everything,
    recompute_with_any_reads,
    schedule_of,
    with_random_implementations,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import monetlite
from monetlite.core.errors import ModelError, TraceError
from monetlite.core.steps import plain_steps
from monetlite.runtime.inductor import _as_captured, as_inductor_fuses, inductor
from monetlite.tracing.capture import flat_outputs

CLOSE = 1e-4
THOROUGH = pytest.mark.thorough  # Inductor takes long


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[module for _ in range(2) for module in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x):
        return self.layers(x)


@THOROUGH
def test_training_is_plain_training_but_for_rounding():
    model, x = Deep(), (torch.randn(32, 64),)
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule, compile=True)
    for _ in range(2):
        assert_same(step(wrapper, x), step(model, x), within=CLOSE)


@THOROUGH
def test_a_transformer():
    model, inputs = tiny_transformer("llama")
    wrapper = monetlite.MONeTWrapper(
        twin(model),
        budget="110%",
        device="rtx-4090",
        time_limit=1,
        implementations="default",
        compile=True,
        outputs="all",
    )
    assert_same(step(wrapper, inputs), step(model, inputs), within=1e-3)


@THOROUGH
@pytest.mark.parametrize("seed", range(3))
def test_a_transformer_by_any_implementations(seed):
    model, inputs = tiny_transformer("gpt2")
    model.train()
    graph = monetlite.trace(model, inputs, outputs="all").restricted(lambda item: item.guard is None)
    rng = random.Random(seed)
    steps = with_random_implementations(graph, recompute_with_any_reads(graph, rng, 0.5), rng)
    assert sum(bool(choice) for _, choice in steps) > 10
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps), compile=True)
    assert_same(step(wrapper, inputs), step(model, inputs), within=CLOSE)


def test_masks_are_drawn_again_as_they_were_drawn():
    rates = (0.5, 0.3)
    layers = [module for rate in rates for module in (nn.Linear(64, 64), nn.Dropout(rate), nn.GELU())]
    model, x = nn.Sequential(*layers), (torch.randn(4, 64),)
    graph = monetlite.trace(model, x)
    schedule = schedule_of(free_profile(graph), recompute_everything(graph))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule, compile=True)
    for _ in range(3):
        assert_same(step(wrapper, x), step(model, x), within=1e-5)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(32 * 14 * 14, 10),
        )

    def forward(self, x):
        return self.layers(x)


def choice_of(graph, index, name):
    """The number of an operator's implementation of that name, or of the default one."""
    names = [item.name for item in graph.operators[index].implementations]
    return names.index(name) if name in names else 0


def convolutional(seed):
    """The model, its inputs, and a schedule that recomputes and chooses implementations at random."""
    model, x = Convolutions(), (torch.randn(16, 3, 32, 32),)
    graph = monetlite.trace(model, x)
    steps = recompute_with_any_reads(graph, random.Random(seed), 0.6)
    names = {graph.operators[index].implementations[choice].name for index, choice in steps}
    return model, x, schedule_of(free_profile(graph), steps), names


@THOROUGH
def test_any_implementations():
    model, x, schedule, names = convolutional(seed=30)
    assert names >= {"from_mask", "from_state", "from_indices", "channels_last", "chunks2"}
    found = step(monetlite.MONeTWrapper(twin(model), schedule, compile=True), x)
    expected = step(model, x)
    # Running statistics are rounded as Inductor's kernels round, like everything else.
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-6, atol=1e-7)
    assert_same(replace(found, buffers={}), replace(expected, buffers={}), within=1e-5)


def test_guards_are_refused():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.GELU()), torch.randn(2, 3, 8, 8)
    graph = monetlite.trace(model, x)
    steps = [(index, choice_of(graph, index, "from_output")) for index, _ in plain_steps(graph)]
    assert any(choice for _, choice in steps)
    schedule = schedule_of(free_profile(graph), steps)
    with pytest.raises(ModelError, match="checks its weights first, which Inductor can't compile"):
        monetlite.MONeTWrapper(model, schedule, compile=True)(x)


def test_random_numbers_over_what_is_read_are_those_of_plain_training():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), (torch.randn(4, 8),)
    graph = monetlite.trace(model, x)
    steps, chosen = [], 0
    for index, choice in plain_steps(graph):
        names = [item.name for item in graph.operators[index].implementations]
        over = "inplace" in names and graph.operators[index].family == "dropout"
        chosen += over
        steps.append((index, names.index("inplace") if over else choice))
    assert chosen == 1
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps), compile=True)
    for _ in range(2):
        assert_same(step(wrapper, x), step(model, x), within=1e-5)


def test_implementations_in_place_are_those_of_plain_training():
    """Batch norm over its input is one that PyTorch can't turn into operators that leave it alone."""
    first = nn.Conv2d(3, 8, 3, bias=False)
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, groups=8))
    x = (torch.randn(2, 3, 10, 10),)
    graph = monetlite.trace(model, x)

    steps = recompute(graph, lambda _: True, lambda index: choice_of(graph, index, "inplace"))
    chosen = {graph.operators[index].family for index, choice in steps if choice}
    assert chosen == {"batch_norm", "hardtanh", "hardtanh_backward", "batch_norm_backward"}
    assert not any(choice for _, choice in as_inductor_fuses(graph, steps))
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps), compile=True)
    found, expected = step(wrapper, x), step(model, x)
    assert_same(replace(found, buffers={}), replace(expected, buffers={}), within=1e-5)
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-6, atol=1e-7)


@THOROUGH
def test_images_stay_in_the_layout_that_inductor_computes_them_in(monkeypatch):
    """Around convolutions on a CPU that is channels-last, which the backward programs are compiled for."""
    chosen = []

    def watched(program, inputs, internal):
        run = inductor(program, inputs, internal)
        captured = [None if item is None else item.meta["val"].stride() for item in flat_outputs(program)]
        differ = {at for at, found in enumerate(run.output_strides) if found not in (None, captured[at])}
        assert differ <= set(internal), "what others than our programs read is as captured"
        chosen.extend(differ)
        return run

    monkeypatch.setattr("monetlite.runtime.inductor.inductor", watched)
    convolutions = [nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()] * 2
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), *convolutions, nn.Flatten(), nn.Linear(8 * 64, 4))
    x = (torch.randn(2, 3, 14, 14),)
    graph = monetlite.trace(model, x)
    rng = random.Random(3)
    graph = graph.available("cpu").restricted(lambda item: item.guard is None)
    steps = recompute_with_any_reads(graph, rng, 0.4)
    wrapper = monetlite.MONeTWrapper(twin(model), schedule_of(free_profile(graph), steps), compile=True)
    found, expected = step(wrapper, x), step(model, x)
    assert chosen
    assert_same(replace(found, buffers={}), replace(expected, buffers={}), within=1e-4)


def test_storage_is_seen_in_the_layout_that_was_captured():
    """`as_strided` of what another program left in other strides is of a copy in those that it was traced with."""

    def last_row(x):
        return torch.as_strided(x, (4,), (1,), 8) * 2

    captured = torch.arange(12.0).view(3, 4)
    other = captured.t().contiguous().t()
    assert other.stride() != captured.stride()
    program = make_fx(last_row)(captured)
    assert not torch.equal(program(other), program(captured))
    _as_captured(program, [captured], [other])
    assert torch.equal(program(other), captured[2] * 2)
    plain = make_fx(lambda x: x * 2)(captured)
    before = len(plain.graph.nodes)
    _as_captured(plain, [captured], [other])
    assert len(plain.graph.nodes) == before


def test_what_fails_inside_of_a_compiler_is_told(monkeypatch):
    def broken(program, inputs, internal):
        raise RuntimeError("Expected 4-dimensional input.\nMore of it")

    monkeypatch.setattr("monetlite.runtime.inductor.inductor", broken)
    model, x = Deep(), (torch.randn(32, 64),)
    graph = monetlite.trace(model, x)
    wrapper = monetlite.MONeTWrapper(model, schedule_of(free_profile(graph), plain_steps(graph)), compile=True)
    with pytest.raises(
        TraceError, match=r"failed to compile it: Expected 4-dimensional input\. Try another"
    ) as told:
        wrapper(*x)
    assert "captured in one graph" not in str(told.value)
