"""The schedules that come along hold what they say, on the code as it is, and train as plain training does."""

import itertools
import os
import random

import pytest
import torch
from small_models import assert_same, step, twin
from torch.utils import _pytree as pytree

import monetlite
from monetlite.core.schedule import read_schedule, schedule_problems
from monetlite.core.source import ModelSource
from monetlite.zoo.check import Checker, build
from monetlite.zoo.collection import file_name, shipped

ENTRIES = shipped().entries()
GROUPS = {
    f"{model} on {device}": [entry for entry in ENTRIES if (entry.model, entry.device) == (model, device)]
    for model, device in sorted({(entry.model, entry.device) for entry in ENTRIES})
}
THOROUGH = "MONETLITE_THOROUGH" in os.environ
# Larger models of a family that is traced anyway take most of the time: they are left to a person with time.
LIKE_OTHERS = (
    *("-large", "-medium", "llama", "bert", "vit", "convnext"),
    *("resnet152", "efficientnet", "mobilenet", "googlenet", "unet"),
)


def test_every_file_follows_the_schema_and_has_its_name():
    folder = shipped().folder
    for entry in ENTRIES:
        schedule = read_schedule(folder / entry.file)
        assert not list(schedule_problems(folder / entry.file))
        assert file_name(schedule) == entry.file
        assert schedule.peak_bytes <= schedule.budget_bytes
        assert schedule.lower_bound_ms <= schedule.latency_ms * (1 + 1e-6)


@pytest.mark.parametrize(
    "group", [group for group in GROUPS if THOROUGH or not any(name in group for name in LIKE_OTHERS)]
)
def test_every_file_is_sound(group):
    """It can be read, follows the schema, is legal, keeps its budget, and promises what the estimates say."""
    shelf, checker = shipped(), Checker()
    for entry in GROUPS[group]:
        checked = checker.check(shelf.folder / entry.file, expected_name=entry.file)
        assert not checked.problems


def test_the_index_lists_every_file_as_it_is():
    shelf = shipped()
    assert {entry.file for entry in ENTRIES} == set(shelf.files())
    assert not shelf.stale()


def test_more_memory_is_never_slower():
    for entries, tolerance in itertools.product(GROUPS.values(), {entry.tolerance for entry in ENTRIES}):
        ordered = sorted(
            (entry for entry in entries if entry.tolerance == tolerance), key=lambda entry: entry.budget_bytes
        )
        assert all(more.overhead <= less.overhead for less, more in itertools.pairwise(ordered))


# Models that take a minute of a CPU for a step are as good as any other, and left to a person with time.
LARGE = ("llama", "large", "medium", "resnet152", "vgg16", "unet")
# Attention with dropout is one operator on a GPU, and several on a CPU, where these schedules don't fit.
OTHERWISE_ON_A_CPU = ("bert", "gpt2")
SAMPLED = [entry for entry in ENTRIES if not any(name in entry.model for name in (*LARGE, *OTHERWISE_ON_A_CPU))]


@pytest.mark.parametrize(
    "entry", random.Random(7).sample(SAMPLED, 3 if THOROUGH else 1), ids=lambda entry: entry.name
)
@pytest.mark.thorough
def test_a_sample_trains_exactly_at_a_smaller_batch(entry):
    source = shipped().load(entry).source
    smaller = ModelSource(
        model=source.model, batch=2, input_size=source.input_size, sequence_length=source.sequence_length and 64
    )
    torch.manual_seed(0)
    built = build(smaller, meta=False)
    inputs = pytree.tree_map(lambda item: item, built.example_inputs)
    wrapper = monetlite.MONeTWrapper(twin(built.model), f"zoo:{entry.name}")
    assert_same(step(wrapper, inputs), step(built.model, inputs), within=1e-6)
    assert wrapper.schedule.choices.stored
