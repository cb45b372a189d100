"""Limiting what torch's CUDA allocator takes, with torch's functions for it stood in for: there is no GPU."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import monetlite
from monetlite.checking.trainee import STEPS_IN_A_ROW, Trainee, default_loss
from monetlite.core.errors import BudgetError, DeviceError
from monetlite.runtime.reserved_memory import reserved_within, warn_if_unlimited

GIB, PAGE = 2**30, 20 * 2**20


class Gpu:
    """A GPU of 16 GiB, some of them reserved; notes the settings and the limit that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.backend, self.fraction = 0, "native", 1.0
        self.settings: list[str] = []
        self.calls: list[str] = []
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        for name, answer in (
            ("is_available", lambda: True),
            ("get_allocator_backend", lambda: self.backend),
            ("memory_reserved", lambda _device=None: self.reserved),
            ("get_device_properties", lambda _device: SimpleNamespace(total_memory=16 * GIB)),
            ("get_per_process_memory_fraction", lambda _device=None: self.fraction),
            ("set_per_process_memory_fraction", self.limit),
            ("current_device", lambda: 0),
            ("synchronize", lambda: None),
            ("empty_cache", lambda: self.calls.append("emptied")),
        ):
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)

    def limit(self, fraction: float, device: int | None = None) -> None:
        self.fraction, self.limited = fraction, device

    @property
    def limit_bytes(self) -> int:
        return round(self.fraction * 16 * GIB)


def test_the_allocator_expands_segments_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    monetlite.limit_reserved("6GiB")
    assert gpu.settings == ["expandable_segments:True"]
    assert gpu.limit_bytes == 6 * GIB - PAGE


@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda", 0), (torch.device("cuda"), 0), ("cuda:1", 1), (torch.device("cuda", 1), 1), (1, 1), (None, 0)],
)
def test_a_gpu_is_named_as_torch_names_it(device: Any, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    monetlite.limit_reserved("6GiB", device)
    assert gpu.limited == index


@pytest.mark.parametrize("device", ["cpu", "gpu", "cuda:", 1.5])
def test_what_is_no_gpu_is_refused_and_nothing_is_set(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    with pytest.raises(DeviceError, match="is not a"):
        monetlite.limit_reserved("6GiB", device)
    assert not gpu.settings


def test_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False,roundup_power2_divisions:[256:1,512:2]")
    monetlite.limit_reserved(GIB)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    monetlite.limit_reserved(GIB)
    assert gpu.settings == [
        "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
        "max_split_size_mb:512,expandable_segments:True",
    ]


def test_what_cannot_be_limited_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    with pytest.raises(BudgetError, match="write an amount"):
        monetlite.limit_reserved("50%")
    gpu.reserved = 7 * GIB
    with pytest.raises(BudgetError, match="before anything is on the GPU"):
        monetlite.limit_reserved("6GiB")
    gpu.backend = "cudaMallocAsync"
    with pytest.raises(DeviceError, match="cudaMallocAsync"):
        monetlite.limit_reserved("6GiB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device"):
        monetlite.limit_reserved("6GiB")
    assert gpu.settings == []
    assert gpu.fraction == 1.0


def test_a_limit_on_a_step_leaves_out_what_else_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.reserved = 3 * GIB
    with reserved_within(2 * GIB, own_bytes=GIB):
        assert gpu.limit_bytes == 4 * GIB - PAGE
    assert gpu.fraction == 1.0
    assert gpu.settings == ["expandable_segments:True", "expandable_segments:False"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with reserved_within(2 * GIB, own_bytes=GIB):
        pass
    assert gpu.settings[2:] == ["expandable_segments:True"] * 2
    gpu.fraction = 0.75  # of limit_reserved, whose segments stay expandable
    with reserved_within(2 * GIB, own_bytes=GIB):
        assert gpu.limit_bytes == 4 * GIB - PAGE
    assert gpu.fraction == 0.75
    assert gpu.settings[4:] == ["expandable_segments:True"]
    with reserved_within(None, own_bytes=GIB):
        assert gpu.fraction == 0.75
    with pytest.raises(ValueError, match="a step"), reserved_within(2 * GIB, own_bytes=GIB):
        raise ValueError("a step")
    assert gpu.fraction == 0.75


def test_a_limited_step_is_timed_in_the_memory_that_such_a_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    trainee = Trainee(nn.Linear(4, 4), (torch.randn(2, 4),), {}, default_loss, "cpu", limit_bytes=GIB)
    trainee.device = "cuda"
    monkeypatch.setattr(trainee, "step", lambda: gpu.calls.append(f"step within {gpu.limit_bytes}"))
    trainee.time_ms()
    own_bytes = 4 * (16 + 4 + 8)
    assert gpu.calls == ["emptied", *[f"step within {GIB - PAGE - own_bytes}"] * (1 + STEPS_IN_A_ROW)]
    assert gpu.fraction == 1.0
    trainee.limit_bytes = None
    trainee.time_ms()
    assert gpu.calls[2 + STEPS_IN_A_ROW :] == [f"step within {16 * GIB}"] * STEPS_IN_A_ROW


def test_a_schedule_for_reserved_memory_warns_where_nothing_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(4096, 64)
    schedule = monetlite.optimize(model, x, "60MB", device="rtx-4090", reserved=True, time_limit=1)
    assert schedule.reserved_bytes is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monetlite.MONeTWrapper(model, schedule)(x).sum().backward()  # on the CPU nothing is reserved
    gpu = Gpu(monkeypatch)
    with pytest.warns(UserWarning, match=r"limit_reserved\(60000000\)"):
        warn_if_unlimited(schedule, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_unlimited(replace(schedule, reserved_bytes=None), "cuda")
        gpu.fraction = 0.5
        warn_if_unlimited(schedule, "cuda")
