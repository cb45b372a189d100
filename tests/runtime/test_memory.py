"""What is predicted is what is measured, and a value is freed where `simulate` says that it dies."""

import random

import pytest
import torch
from step_lists import (
    drop_once,
    free_profile,
    recompute_at_random,
    recompute_everything,
    schedule_of,
    with_random_implementations,
)
from torch import nn

import monetlite
from monetlite.models.densenet import DenseNet
from monetlite.profiling import meters
from monetlite.profiling.memory import peak_growth_bytes
from monetlite.schedule import plain_steps


@pytest.fixture
def quick_measurements(monkeypatch):
    """Workspaces as they are; latencies of a single run, as nothing here depends on them."""
    monkeypatch.setattr(meters, "FEWEST_RUNS", 1)
    monkeypatch.setattr(meters, "MOST_RUNS", 1)


class Chain(nn.Module):
    """Elementwise operators alone: no workspace, so that every byte is accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for _ in range(3):
            skip = x
            x = torch.relu(torch.tanh(x).exp() - 1.5)
            x = torch.sigmoid(x) * skip
        return x


def test_values_are_freed_at_the_step_they_die_at():
    """The measured peak is the simulated one to within small allocations, for very different schedules."""
    model, x = Chain(), torch.randn(4, 2**17)
    graph = monetlite.trace(model, x)
    profile, rng, peaks = free_profile(graph), random.Random(0), set()
    candidates = [plain_steps(graph), recompute_everything(graph), recompute_at_random(graph, rng)]
    for steps in [*candidates, *(with_random_implementations(graph, steps, rng) for steps in candidates[1:])]:
        schedule = schedule_of(profile, steps)
        wrapper = monetlite.MONeTWrapper(model, schedule)
        tangent = torch.ones(4, 2**17)

        def train(wrapper=wrapper, tangent=tangent):
            model.weight.grad = None
            output = wrapper(x)
            output.backward(tangent.clone())

        train()
        measured = graph.resident.total + peak_growth_bytes(train)
        assert abs(measured - schedule.peak_bytes) < 2**14, (measured, schedule.peak_bytes)
        peaks.add(schedule.peak_bytes)
    assert len(peaks) >= 3
    assert min(peaks) < 0.7 * max(peaks)


def densenet():
    return DenseNet((1, 1), growth=16, stem_channels=32, classes=10).train(), (torch.randn(12, 3, 96, 96),)


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=600, n_positions=128, n_embd=96, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=2
    )
    tokens = torch.randint(0, 600, (8, 128))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens.clone()}


def all_but_products(graph):
    """Values other than those of convolutions and matrix products: cheap to compute again."""
    dear = {"convolution", "addmm", "mm", "bmm", "attention"}
    return [value for value, writer in graph.writer.items() if graph.operators[writer].family not in dear]


@pytest.mark.parametrize("build", [densenet, gpt2])
def test_measured_peak_is_the_predicted_one(build, quick_measurements):
    model, inputs = build()
    graph = monetlite.trace(model, inputs)
    profile = monetlite.profile(graph, "cpu").within(0.0)
    graph = profile.graph
    peaks = []
    lean = drop_once(graph, all_but_products(graph))
    for steps in (plain_steps(graph), lean, with_random_implementations(graph, lean, random.Random(5))):
        schedule = schedule_of(profile, steps)
        report = monetlite.verify(model, schedule, inputs, repeats=1)
        assert report.largest_difference <= 1e-6
        assert report.random_state
        assert report.same_shapes
        assert report.predicted_peak_bytes == schedule.peak_bytes
        assert abs(report.peak_bytes / schedule.peak_bytes - 1) <= 0.02, (
            report.peak_bytes,
            schedule.peak_bytes,
        )
        peaks.append(report.peak_bytes)
    assert peaks[0] > 16 * 2**20
    assert peaks[1] < 0.98 * peaks[0]
