"""What people train, the ways they train it: twenty steps have the losses of plain training.

Bit for bit, but for GPT-2 and Llama at these widths, of which a capture adds some terms in another order, and for
dropout of bfloat16 tensors on the CPU, which a captured step scales without rounding the scale first.
"""

import functools
import os
import random
from dataclasses import replace

import pytest
import torch
from real_models import NAMES, Loop, batches, build
from small_models import call, twin
from step_lists import free_profile, recompute_at_random, schedule_of, with_random_implementations

import monetlite

THOROUGH = "MONETLITE_THOROUGH" in os.environ
"""Every model in every way, rather than each model in one way.

A way that does more stands for the first one, too: evaluation in between, and a step of several batches.
"""
STEPS = 20
WITHIN = {"llama with LoRA": 1e-4, "gpt2": 1e-4}
"""Of the loss, after twenty steps; elsewhere 0."""
ROUNDED = dict(WITHIN)
"""The same under autocast to bfloat16, with dropout."""


@functools.cache
def prepared(name, autocast=None):
    """A model, its batches, and a schedule that recomputes at random and runs operators in other exact ways."""
    model, make = build(name)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        graph = monetlite.trace(model, make())
    profile = free_profile(graph.available("cpu")).within(0.0)
    rng = random.Random(1)
    steps = recompute_at_random(profile.graph, rng)
    steps = with_random_implementations(profile.graph, steps, rng)
    return model, make, replace(schedule_of(profile, steps), autocast=profile.graph.autocast)


def train(loop, made, *, autocast=None, every=1):
    """Losses of a loop's steps, each on several batches, from the same seed."""
    torch.manual_seed(7)
    return [loop.step(made[at : at + every], autocast) for at in range(0, len(made), every)]


def assert_alike(name, found, expected, tolerances=WITHIN):
    assert len(found) == len(expected)
    within = tolerances.get(name, 0.0)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert abs(one - other) <= within * abs(other), (step, found, expected)
    assert len(set(expected)) == len(expected), "the losses should change"


def assert_averages_alike(name, wrapped, plain):
    within = WITHIN.get(name, 0.0)
    for one, other in zip(wrapped.average, plain.average, strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)


def some(*names):
    """Models to train in one way: all of them, if it may take long."""
    assert set(names) < set(NAMES)
    return pytest.mark.parametrize("name", NAMES if THOROUGH else names)


def both(name, autocast=None):
    model, make, schedule = prepared(name, autocast)
    return make, Loop(twin(model)), Loop(monetlite.MONeTWrapper(twin(model), schedule))


class TestLossesOverTwentySteps:
    @pytest.mark.thorough
    @some("gpt2")
    def test_float32(self, name):
        make, plain, wrapped = both(name)
        made = list(batches(make, STEPS))
        assert_alike(name, train(wrapped, made), train(plain, made))
        assert_averages_alike(name, wrapped, plain)

    @pytest.mark.thorough
    @some("llama with LoRA")
    def test_bfloat16_autocast(self, name):
        make, plain, wrapped = both(name, torch.bfloat16)
        made = list(batches(make, STEPS))
        found, expected = (train(loop, made, autocast=torch.bfloat16) for loop in (wrapped, plain))
        assert_alike(name, found, expected, ROUNDED)

    @pytest.mark.thorough
    @some("bert")
    def test_accumulation(self, name):
        make, plain, wrapped = both(name)
        made = list(batches(make, 2 * STEPS))
        assert_alike(name, train(wrapped, made, every=2), train(plain, made, every=2))

    @pytest.mark.thorough
    @some("vit")
    def test_torch_compile(self, name):
        model, make = build(name)
        other = twin(model)
        other.compile(
            backend="monetlite", options={"budget": "120%", "device": "rtx-4090", "time_limit": 1, "seed": 1}
        )
        made = list(batches(make, STEPS))
        assert_alike(name, train(Loop(other), made), train(Loop(twin(model)), made))

    @pytest.mark.thorough
    @some("resnet")
    def test_evaluation_in_between(self, name):
        make, plain, wrapped = both(name)
        made = list(batches(make, STEPS))
        found = []
        for loop in (wrapped, plain):
            torch.manual_seed(7)
            losses = []
            for at in range(0, STEPS, 5):
                losses += [loop.step([batch]) for batch in made[at : at + 5]]
                loop.model.eval()
                with torch.no_grad():
                    output = call(loop.model, made[0])
                losses.append((output if isinstance(output, torch.Tensor) else output["loss"]).item())
                loop.model.train()
            found.append(losses)
        assert_alike(name, *found)
        assert_averages_alike(name, wrapped, plain)

    @pytest.mark.thorough
    @some("mobilenet")
    def test_resuming_from_a_state_dict(self, name):
        model, make, schedule = prepared(name)
        made = list(batches(make, STEPS))
        expected = train(Loop(twin(model)), made)
        torch.manual_seed(7)
        first = Loop(monetlite.MONeTWrapper(twin(model), schedule))
        losses = [first.step([batch]) for batch in made[: STEPS // 2]]
        state = first.state()
        assert set(state["model"]) == set(model.state_dict())
        second = Loop(monetlite.MONeTWrapper(twin(model), schedule))
        second.load(state)
        losses += [second.step([batch]) for batch in made[STEPS // 2 :]]
        assert_alike(name, losses, expected)
