"""The step that tests of the allocator look at, traced once for all tests of a process."""

import pytest

import monetlite
from monetlite.core.costs import Profile
from monetlite.models import build_model


@pytest.fixture(scope="session")
def profile() -> Profile:
    built = build_model("resnet18", batch=48, input_size=(160, 160), meta=True)
    return monetlite.profile(monetlite.trace(built.model, built.example_inputs), "rtx-3090")
