"""Named devices: every figure has a source, and names are found as people write them."""

from importlib import resources

import pytest
import yaml

from monetlite.core.devices import find_device, known_devices
from monetlite.core.errors import DeviceError

DEVICES = known_devices()


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_plausible(name):
    device = DEVICES[name]
    assert 8 * 2**30 <= device.memory_bytes <= 256 * 2**30
    assert 2e11 < device.bandwidth_bytes_per_s < 1e13
    assert 5e12 < device.peak_flops["fp32"] < 2e14
    assert set(device.peak_flops) <= {"fp64", "fp32", "tf32", "fp16", "bf16"}
    assert device.peak_flops.get("fp16", device.peak_flops["fp32"]) >= device.peak_flops["fp32"]
    assert 1 <= device.launch_us <= 50
    assert all(0 < share <= 1 for share in vars(device.efficiency).values())
    assert 0.9 * device.memory_bytes <= device.torch_bytes < device.memory_bytes


def test_figures_have_sources():
    text = resources.files("monetlite.core").joinpath("devices.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    of_devices = [part for entry in data["devices"].values() for part in entry.values() if isinstance(part, dict)]
    figures = [*data["efficiency"].values(), *data["launch_us"].values(), *of_devices]
    assert len(of_devices) >= 2 * len(DEVICES)
    assert all(len(part["source"]) > 10 for part in figures)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("p100", "p100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("Tesla P100-PCIE-16GB", "p100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("H200", "h200"),
    ],
)
def test_names_as_people_and_torch_write_them(written, name):
    assert find_device(written).name == name


def test_no_two_devices_share_a_name():
    for device in DEVICES.values():
        for alias in (device.name, device.title, *device.aliases):
            assert find_device(alias) is device


@pytest.mark.parametrize(
    ("written", "suggested"),
    [
        ("A100", "a100-40gb or a100-80gb?"),
        ("rtx-4091", "rtx-4090"),
        ("H100-80GB", "mean h100?"),
        ("", "Known: p100"),
    ],
)
def test_unknown_devices_are_answered_with_known_ones(written, suggested):
    with pytest.raises(DeviceError) as failure:
        find_device(written)
    assert suggested in str(failure.value)
    assert "h200" in str(failure.value)
    assert "measure" in str(failure.value)


def test_tensor_cores():
    assert not DEVICES["p100"].has_tensor_cores
    assert DEVICES["v100"].has_tensor_cores
    assert DEVICES["rtx-4060"].has_tensor_cores
