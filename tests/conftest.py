"""What every test needs: a cache of its own, few threads, and the helper modules on the path."""

import os
import sys
from pathlib import Path

import pytest
import torch

for folder in (Path(__file__).parent, Path(__file__).parent / "solving"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@pytest.fixture(scope="session", autouse=True)
def _few_threads():
    beside_others = "PYTEST_XDIST_WORKER" in os.environ
    torch.set_num_threads(1 if beside_others else min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Where measured costs are kept: never in a person's own cache."""
    folder = tmp_path / "monetlite-cache"
    monkeypatch.setenv("MONETLITE_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _fresh_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_compiled_programs():
    """Dynamo keeps what it compiled for as long as the process lives; a suite of many models need not."""
    yield
    torch._dynamo.reset()
