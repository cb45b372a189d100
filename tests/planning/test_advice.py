"""Advice where nothing fits: its figures are those of `simulate`, and of the step with the setting it names."""

import functools
import random
import re

import pytest
import torch
import transformers
from commands import run
from random_graphs import random_profile
from thoroughness import often
from torch import nn

import monetlite
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import format_bytes, parse_budget
from monetlite.planning.advice import MIN_SHARE, MOST_SETTINGS, LeastPeak

HEAVY = """
import torch
from torch import nn

def build(batch=4):
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)), (torch.randn(batch, 512),)
"""


def gpt2(batch, dtype):
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=512, n_positions=32)
    tokens = torch.randint(0, 512, (batch, 32))
    return transformers.GPT2LMHeadModel(config).to(dtype), {"input_ids": tokens, "labels": tokens}


def convolutions(batch, dtype):
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers).to(dtype), (torch.randn(batch, 3, 32, 32, dtype=dtype),)


DEVICES = {gpt2: "rtx-4090", convolutions: "t4"}  # which have attention in bfloat16, and no TF32


@functools.cache
def traced(build, batch, dtype, autocast):
    model, inputs = build(batch, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return monetlite.trace(model.train(), inputs, device=DEVICES[build])


def priced(build, batch, dtype, *, optimizer=None, accumulate=False, autocast=False):
    graph = traced(build, batch, dtype, autocast)
    return monetlite.profile(graph, DEVICES[build], optimizer=optimizer, accumulate=accumulate)


def language_model(batch=8, dtype=torch.float32, **options):
    return priced(gpt2, batch, dtype, **options)


def convnet(batch=8, dtype=torch.float32, **options):
    return priced(convolutions, batch, dtype, **options)


def plain_peak(profile):
    return simulate(profile, plain_steps(profile.graph)).peak_bytes


def advised(profile, budget_bytes):
    """Peaks that settings promise, by their names."""
    least = LeastPeak.of_steps(profile, plain_steps(profile.graph))
    return {item.name: item.peak_bytes for item in least.settings(budget_bytes)}


def named(settings, word):
    return next(peak_bytes for name, peak_bytes in settings.items() if word in name)


@pytest.mark.parametrize("seed", range(30))
def test_the_parts_are_the_peak_and_settings_lower_it(seed):
    profile = random_profile(random.Random(seed))
    least = LeastPeak.of_steps(profile, plain_steps(profile.graph))
    peak_bytes = plain_peak(profile)
    budget_bytes = peak_bytes // 2
    assert sum(least.peak_bytes_of.values()) == peak_bytes
    settings = least.settings(budget_bytes)
    saved = [peak_bytes - item.peak_bytes for item in settings]
    assert saved == sorted(saved, reverse=True)
    assert len(settings) <= MOST_SETTINGS
    assert all(size >= MIN_SHARE * (peak_bytes - budget_bytes) for size in saved)
    text = least.advice(budget_bytes)
    assert ":  " not in text  # a value of unknown shape has none
    held = {str(holding): size for holding, size in least.peak_bytes_of.items()}
    told = re.findall(r"([\d.]+ \w?B) (weights|inputs|weight gradients|stored|recomputed|workspace)", text)
    assert all(format_bytes(held[what]) == size for size, what in told)


def close_and_not_below(peak_bytes, true_bytes):
    """A peak that is promised may be too high, never much too low."""
    return 0.97 * true_bytes <= peak_bytes <= 1.15 * true_bytes


@pytest.mark.parametrize(
    ("build", "options"),
    often(
        [
            (language_model, {}),
            (language_model, {"autocast": True}),
            (convnet, {"optimizer": "adamw"}),
            (convnet, {"accumulate": True}),
        ],
        *[(language_model, {}), (convnet, {"optimizer": "adamw"})],
    ),
)
def test_a_smaller_batch_saves_what_is_said(build, options):
    profile = build(**options)
    small = build(batch=2, **options)
    peak_bytes = LeastPeak.of_steps(profile, plain_steps(profile.graph))._peak(inputs=0.25)
    assert close_and_not_below(peak_bytes, plain_peak(small))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "options"),
    [(language_model, {}), (convnet, {}), (convnet, {"optimizer": "adamw", "accumulate": True})],
)
def test_bfloat16_weights_save_what_is_said(build, options):
    profile = build(**options)
    narrow = build(dtype=torch.bfloat16, **options)
    assert close_and_not_below(named(advised(profile, 1), "bfloat16"), plain_peak(narrow))


@pytest.mark.thorough
def test_an_optimizer_without_state_saves_what_is_said():
    profile = language_model(batch=1, optimizer="adamw")
    assert named(advised(profile, 1), "SGD") == plain_peak(language_model(batch=1, optimizer="sgd"))


def test_frozen_weights_save_their_gradients_and_their_state():
    profile = language_model(batch=1, optimizer="adamw")
    weights = profile.graph.resident.parameters
    saved = plain_peak(profile) - named(advised(profile, 1), "LoRA")
    assert saved > 2.5 * weights, "gradients, two moments and the step's own copy; activations take their place"


def test_what_is_small_is_not_advised():
    heavy = advised(language_model(batch=2, optimizer="adamw"), 1)
    assert not [name for name in heavy if "batch" in name]
    light = advised(convnet(batch=64, optimizer="adamw"), 1)
    assert "batch 1 instead of 64" in light
    assert not [name for name in light if "SGD" in name or "LoRA" in name]


def test_the_batch_is_the_largest_half_that_fits():
    profile = convnet(batch=64)
    quarter = LeastPeak.of_steps(profile, plain_steps(profile.graph))._peak(inputs=0.25)
    assert "batch 16 instead of 64" in advised(profile, quarter)
    assert "batch 8 instead of 64" in advised(profile, quarter - 1)


def test_the_command_and_the_api_say_the_same(tmp_path, monkeypatch):
    (tmp_path / "heavy.py").write_text(HEAVY)
    monkeypatch.chdir(tmp_path)
    options = ("--device", "t4", "--optimizer", "adamw", "--time-limit", "2")
    result = run("solve", "--model", "heavy.py:build", "--budget", "8MB", *options)
    assert result.exit_code == 3
    told = result.stderr
    assert "at optimizer.step, step " in told
    assert "That peak holds 8.4 MB optimizer state, 4.2 MB weights, 4.2 MB weight gradients" in told
    assert "SGD, without state (optimizer='sgd', or --optimizer sgd): about −" in told
    assert "batch" not in told, "batch 1 needs as much"
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    graph = monetlite.trace(model.train(), torch.randn(4, 512), device="t4")
    profile = monetlite.profile(graph, "t4", optimizer="adamw")
    with pytest.raises(InfeasibleBudget) as refused:
        monetlite.solve(profile, "8MB", time_limit=2)
    assert str(refused.value).partition("That peak")[2] == told.strip().partition("That peak")[2]
    assert refused.value.budget_bytes == parse_budget("8MB")
