"""Named devices: what their vendors say they can do, and what fraction of it real kernels reach."""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from monetlite.core.errors import DeviceError

CUBLAS_WORKSPACE_BYTES, CUBLAS_WORKSPACE_BYTES_OF_9 = 8519680, 2**25
"""Memory that torch gives cuBLAS for each thread that multiplies matrices, before Hopper and since.

`CUBLAS_WORKSPACE_CONFIG` says otherwise: `:SIZE:COUNT`, of so many KiB, any number of times.
"""
CONTEXT_BYTES = 5 * 10**8
"""Memory of a CUDA context: a guess. It differs between GPUs, and between versions of CUDA."""
TORCH_SHARE = 0.98
"""Part of a card's memory that torch reports, where that isn't known of the card: an RTX 4090's least."""
MEASURED_HERE = ("cpu", "cuda")
"""Devices of this machine, whose costs are measured."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of a device's peaks that kernels reach, each above 0 and at most 1.

    The first four are of peak arithmetic, on the vector units and on the tensor cores; the others of the
    memory's bandwidth.
    """

    fp32_matmul: float
    fp32_convolution: float
    tensor_matmul: float
    tensor_convolution: float
    elementwise: float
    normalization: float
    pooling: float
    resampling: float
    """Interpolation and its gradient."""
    scatter: float
    """Kernels that read or write where indices say, such as the gradient of max pooling."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device to estimate for.

    `peak_flops` is in operations per second (an addition and a multiplication are two), dense, by arithmetic:
    `fp64`, `fp32`, `tf32`, `fp16`, `bf16`, as far as the device has each. `compute_capability` is NVIDIA's
    (major, minor). `cuda` has the attributes that cuDNN plans by, under its names for them; it is empty if they
    are not known. Of `memory_bytes`, torch reports `torch_bytes`. `devices.yaml` has the origin of the figures.
    """

    name: str
    title: str
    memory_bytes: int
    torch_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    launch_us: float
    compute_capability: tuple[int, int]
    efficiency: Efficiency
    aliases: tuple[str, ...]
    cuda: Mapping[str, int]

    @property
    def cublas_workspace_bytes(self) -> int:
        """Memory that cuBLAS keeps for each thread that multiplies matrices, by torch's rules."""
        parts = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        if parts:
            return sum(1024 * int(size) * int(count) for size, count in parts)
        return CUBLAS_WORKSPACE_BYTES_OF_9 if self.compute_capability >= (9, 0) else CUBLAS_WORKSPACE_BYTES

    @property
    def has_tensor_cores(self) -> bool:
        """True if half precision runs on tensor cores: on vector units it is at most twice as fast as float32."""
        return self.peak_flops.get("fp16", 0.0) > 2.5 * self.peak_flops["fp32"] or "tf32" in self.peak_flops


def find_device(name: str) -> Device:
    """Return a device by its name, or by the name that `torch.cuda.get_device_name()` gives it.

    Case, spaces, hyphens and the words NVIDIA, GeForce and Tesla don't matter.

    Raises:
        DeviceError: not a known device; the message lists those that are.

    >>> find_device("GeForce RTX 4090").name
    'rtx-4090'
    """
    devices = known_devices()
    wanted = _normalise(name)
    for device in devices.values():
        if wanted in {_normalise(alias) for alias in (device.name, device.title, *device.aliases)}:
            return device
    own = {device: _normalise(device) for device in devices} if wanted else {}
    longer = [device for device, known in own.items() if known.startswith(wanted)]
    shorter = [device for device, known in own.items() if wanted.startswith(known)]
    near = longer or shorter or difflib.get_close_matches(name.lower(), devices, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise DeviceError(
        f"no figures for a device called {name!r}{hint} Known: {', '.join(devices)}. "
        "On a machine that has the device, measure a profile instead of estimating one"
    )


def require_device(name: str | None) -> None:
    """Refuse what is no device to measure on or to estimate; None stands for where the model is.

    Raises:
        DeviceError: says what there is.
    """
    if name is None or name in MEASURED_HERE:
        return
    if not isinstance(name, str):
        raise DeviceError(f"device {name!r}: give its name, such as 'cuda' or 'rtx-4090'")
    if name.lower().startswith((*MEASURED_HERE, "gpu")):
        meant = "cpu" if name.lower().startswith("cpu") else "cuda"
        raise DeviceError(f"{name!r} is no device; did you mean {meant}?")
    find_device(name)


@cache
def known_devices() -> Mapping[str, Device]:
    """All named devices, by name, in the order of `devices.yaml`."""
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    return MappingProxyType({name: _device(name, entry, data) for name, entry in data["devices"].items()})


def _device(name: str, entry: dict[str, Any], data: dict[str, Any]) -> Device:
    memory, peak = entry["memory"], entry["peak"]
    efficiency = data["efficiency"][entry["efficiency"]]
    major, minor = entry["compute_capability"].split(".")
    cuda = {**data["cuda_limits"][entry["compute_capability"]], **entry["cuda"]} if "cuda" in entry else {}
    cuda.pop("source", None)
    return Device(
        name=name,
        title=entry["title"],
        memory_bytes=int(memory["gib"] * 2**30),
        torch_bytes=int(entry.get("of_torch", {"gib": TORCH_SHARE * memory["gib"]})["gib"] * 2**30),
        bandwidth_bytes_per_s=memory["bandwidth_gb_per_s"] * 1e9,
        peak_flops=MappingProxyType({kind: rate * 1e12 for kind, rate in peak.items() if kind != "source"}),
        launch_us=float(data["launch_us"][entry["launch_us"]]["value"]),
        compute_capability=(int(major), int(minor)),
        efficiency=Efficiency(**{kind: share for kind, share in efficiency.items() if kind != "source"}),
        aliases=tuple(entry["aliases"]),
        cuda=MappingProxyType(cuda),
    )


def _normalise(name: str) -> str:
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
