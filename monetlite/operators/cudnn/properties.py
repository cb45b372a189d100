"""What cuDNN has to know of a device to plan for it without having it: the CUDA attributes of named devices.

Names are those of `monetlite/profiling/devices.yaml`. Devices below compute capability 7.5 (P100, V100) are left
out on purpose: cuDNN lists plans for them, but since 9.11 it no longer runs there.
"""

import json
from dataclasses import dataclass
from types import MappingProxyType

from monetlite.core.errors import DeviceError


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """A device as CUDA reports it.

    `capability` is the compute capability times 100 (9.0 → 900). Clocks are in kHz; the memory's is half its data
    rate. `source` says where processors, clocks, cache and memory come from.
    """

    capability: int
    processors: int
    clock_khz: int
    memory_clock_khz: int
    l2_bytes: int
    memory_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Per compute capability, from the table of technical specifications in the CUDA C++ Programming Guide."""

    threads_per_processor: int
    blocks_per_processor: int
    shared_bytes_per_block: int
    """With opt-in, which is what a kernel can ask for at most."""
    reserved_bytes_per_block: int


_LIMITS = {
    750: _Limits(
        threads_per_processor=1024,
        blocks_per_processor=16,
        shared_bytes_per_block=65536,
        reserved_bytes_per_block=0,
    ),
    800: _Limits(
        threads_per_processor=2048,
        blocks_per_processor=32,
        shared_bytes_per_block=166912,
        reserved_bytes_per_block=1024,
    ),
    860: _Limits(
        threads_per_processor=1536,
        blocks_per_processor=16,
        shared_bytes_per_block=101376,
        reserved_bytes_per_block=1024,
    ),
    890: _Limits(
        threads_per_processor=1536,
        blocks_per_processor=24,
        shared_bytes_per_block=101376,
        reserved_bytes_per_block=1024,
    ),
    900: _Limits(
        threads_per_processor=2048,
        blocks_per_processor=32,
        shared_bytes_per_block=232448,
        reserved_bytes_per_block=1024,
    ),
}

_OPENXLA = "attributes recorded in openxla/xla, xla/backends/gpu/target_config/specs"
_GIB, _MIB = 2**30, 2**20

DEVICES = MappingProxyType(
    {
        "t4": DeviceProperties(
            capability=750,
            processors=40,
            clock_khz=1_590_000,
            memory_clock_khz=5_001_000,
            l2_bytes=4 * _MIB,
            memory_bytes=15_843_721_216,
            source="CUDA's deviceQuery on a Tesla T4, as published (chiemon.github.io, 2024-12-25)",
        ),
        "a100-40gb": DeviceProperties(
            capability=800,
            processors=108,
            clock_khz=1_410_000,
            memory_clock_khz=1_215_000,
            l2_bytes=40 * _MIB,
            memory_bytes=42_331_013_120,
            source=f"{_OPENXLA}/a100_sxm_40.txtpb",
        ),
        "a100-80gb": DeviceProperties(
            capability=800,
            processors=108,
            clock_khz=1_410_000,
            memory_clock_khz=1_593_000,
            l2_bytes=40 * _MIB,
            memory_bytes=85_100_068_864,
            source=f"{_OPENXLA}/a100_sxm_80.txtpb; memory clock from its bandwidth over a bus of 5120 bits",
        ),
        "a6000": DeviceProperties(
            capability=860,
            processors=84,
            clock_khz=1_800_000,
            memory_clock_khz=8_001_000,
            l2_bytes=6 * _MIB,
            memory_bytes=51_041_271_808,
            source=f"{_OPENXLA}/a6000.txtpb; memory clock from its bandwidth over a bus of 384 bits",
        ),
        "rtx-3090": DeviceProperties(
            capability=860,
            processors=82,
            clock_khz=1_695_000,
            memory_clock_khz=9_751_000,
            l2_bytes=6 * _MIB,
            memory_bytes=24 * _GIB,
            source="NVIDIA Ampere GA102 whitepaper v2 (82 processors, 1695 MHz, 19.5 Gb/s, 6 MB); memory nominal",
        ),
        "rtx-4090": DeviceProperties(
            capability=890,
            processors=128,
            clock_khz=2_520_000,
            memory_clock_khz=10_501_000,
            l2_bytes=72 * _MIB,
            memory_bytes=24_563 * _MIB,
            source="nvbench on an RTX 4090, as published in NVIDIA/nvbench pull request 207",
        ),
        "h100": DeviceProperties(
            capability=900,
            processors=132,
            clock_khz=1_980_000,
            memory_clock_khz=2_619_000,
            l2_bytes=50 * _MIB,
            memory_bytes=84_942_979_072,
            source=f"{_OPENXLA}/h100_sxm.txtpb",
        ),
        "h200": DeviceProperties(
            capability=900,
            processors=132,
            clock_khz=1_980_000,
            memory_clock_khz=3_201_000,
            l2_bytes=50 * _MIB,
            memory_bytes=141 * _GIB,
            source=f"{_OPENXLA}/h200.txtpb; memory clock from nvidia-smi in awslabs/amazon-eks-ami pull 1985",
        ),
    }
)
"""Devices that can be planned for without having them."""


def properties_json(device: str) -> str:
    """A named device as the JSON that cuDNN reads.

    Raises:
        DeviceError: no such device; the message lists those that there are.

    >>> import json
    >>> json.loads(properties_json("h100"))["multiProcessorCount"]
    132
    """
    found = DEVICES.get(device)
    if found is None:
        raise DeviceError(
            f"cuDNN plans can't be enumerated for {device!r} without having it; known: {', '.join(DEVICES)}"
        )
    limits = _LIMITS[found.capability]
    return json.dumps(
        {
            "deviceVer": found.capability,
            "multiProcessorCount": found.processors,
            "smClockRateKHz": found.clock_khz,
            "memClockRateKHz": found.memory_clock_khz,
            "l2CacheSize": found.l2_bytes,
            "totalGlobalMem": found.memory_bytes,
            "warpSize": 32,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": limits.threads_per_processor,
            "maxCtasPerSM": limits.blocks_per_processor,
            "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [2**31 - 1, 65535, 65535],
            "regsPerBlock": 65536,
            "maxRegistersPerSM": 65536,
            "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": limits.shared_bytes_per_block,
            "reservedSharedMemoryPerBlock": limits.reserved_bytes_per_block,
            "supportCoopLaunch": 1,
            # What identifies one device among several; cuDNN wants the fields, and plans without regard to them.
            "deviceName": device,
            "cudaDeviceId": 0,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "driverVer": 13000,
        }
    )
