"""Latency and workspace of single calls, measured on the CPU or on a GPU."""

import contextlib
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from monetlite.core.errors import DeviceError
from monetlite.fx.torch_internals.torch_cuda import occupy_gpu
from monetlite.operators.cudnn import tf32_allowed
from monetlite.profiling.memory_records import peak_growth_bytes
from monetlite.profiling.memory_use import high_water_growth_bytes, kept_bytes, nvidia_smi, page_faults

MIN_RUNS, MAX_RUNS = 3, 7
MIN_SECONDS = 0.15
"""A call is run until it has had `MIN_RUNS` runs and `MIN_SECONDS`, or `MAX_RUNS`."""
MAX_PAGE_FAULTS = 64
"""A run on the CPU with more page faults took memory from the system, which is not part of the call."""
MAX_CACHE_BYTES = 2**26
"""Largest cache that is emptied between runs on a CPU, and the size taken for a GPU that does not say its own."""
GPU_CYCLES_PER_SECOND = 2e9
"""Upper estimate of a GPU's clock."""
MIN_SECONDS_AHEAD = 2e-4
"""Least time by which the host runs ahead of the GPU when a call is timed."""
IGNORED_GROWTH_BYTES = 4 * 2**20
"""Growth of the high-water mark beyond the allocation events that pages and the allocator's blocks may explain."""


class CpuMeter:
    """Wall-clock time, and the CPU profiler's allocation events checked against the high-water mark."""

    device = "cpu"

    def __init__(self) -> None:
        self._cache_bytes = _cache_bytes()

    def latency_ms(
        self, run: Callable[[], Any], recent: torch.Tensor | None = None, room_bytes: float = math.inf
    ) -> float:
        """Median latency of a call after a warm-up, in ms, with empty caches.

        Args:
            run: the call.
            recent: the argument that may be in a cache when it begins: the result of the operator before it.
            room_bytes: the most memory to empty caches with; beside training, what its budget leaves.
        """
        other = torch.empty(_within(self._cache_bytes, room_bytes), dtype=torch.uint8)
        run()
        times: list[float] = []
        undisturbed: list[float] = []
        began = time.perf_counter()
        while len(times) < MAX_RUNS and (len(undisturbed) < MIN_RUNS or time.perf_counter() - began < MIN_SECONDS):
            other.fill_(1)
            _touch(recent)
            faults, start = page_faults(), time.perf_counter()
            run()
            taken = time.perf_counter() - start
            times.append(taken)
            if page_faults() - faults <= MAX_PAGE_FAULTS:
                undisturbed.append(taken)
        return statistics.median(undisturbed or times) * 1000

    def once_ms(self, run: Callable[[], Any]) -> float:
        """Latency of one run, in ms."""
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)

    def host_ms(self, run: Callable[[], Any]) -> float:
        """Median time in which a call is handed to the device, in ms; 0 on the CPU, which does it itself."""
        return 0.0

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        """Most memory that a call holds beyond its arguments, its results included, in bytes."""
        events = peak_growth_bytes(run)
        # The first run may have grown the heap for good; only what a second one needs again is workspace.
        for _ in range(2):
            mark = high_water_growth_bytes(run)
            if mark is None or mark <= events * 1.1 + IGNORED_GROWTH_BYTES:
                return events
        assert mark is not None
        return mark

    def kept_bytes(self, runs: Sequence[Callable[[], Any]]) -> int:
        """Bytes that libraries keep for this thread after these calls.

        None on the CPU: oneDNN keeps memory of the heap, which torch's figures don't count.
        """
        return 0

    def environment(self) -> Mapping[str, str]:
        """The device, and the versions and settings that its figures depend on."""
        return {
            "device": _cpu_name(),
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }


class CudaMeter:
    """CUDA events, and the caching allocator's statistics. Methods as those of `CpuMeter`."""

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "device 'cuda': this machine has no GPU that torch can use; name a device to estimate"
            )
        self._cache_bytes = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0) or MAX_CACHE_BYTES

    def latency_ms(
        self, run: Callable[[], Any], recent: torch.Tensor | None = None, room_bytes: float = math.inf
    ) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        # In a step the host is ahead of the GPU. Here the GPU is held up until the host has queued the call.
        cycles = int(GPU_CYCLES_PER_SECOND * max(MIN_SECONDS_AHEAD, 2 * (time.perf_counter() - began)))
        times: list[float] = []
        other = torch.empty(_within(2 * self._cache_bytes, room_bytes), dtype=torch.uint8, device="cuda")
        began = time.perf_counter()
        while len(times) < MIN_RUNS or (time.perf_counter() - began < MIN_SECONDS and len(times) < MAX_RUNS):
            other.zero_()
            _touch(recent)
            times.append(_gpu_ms(run, cycles))
        return statistics.median(times)

    def once_ms(self, run: Callable[[], Any]) -> float:
        return _gpu_ms(run, int(GPU_CYCLES_PER_SECOND * MIN_SECONDS_AHEAD))

    def host_ms(self, run: Callable[[], Any]) -> float:
        times: list[float] = []
        for _ in range(MAX_RUNS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        return statistics.median(times) * 1000

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        return peak_growth_bytes(run, "cuda")

    def kept_bytes(self, runs: Sequence[Callable[[], Any]]) -> int:
        return kept_bytes(*runs) if runs else 0

    def environment(self) -> Mapping[str, str]:
        backends: Any = torch.backends
        return {
            "device": torch.cuda.get_device_name(),
            "driver": driver_version(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "cudnn": str(backends.cudnn.version()),
            "tf32": str(backends.cudnn.conv.fp32_precision == "tf32"),
            "matrix products": str(backends.cuda.matmul.fp32_precision),
            "deterministic": str(torch.are_deterministic_algorithms_enabled() or backends.cudnn.deterministic),
            "cudnn.benchmark": str(backends.cudnn.benchmark),
        }


Meter = CpuMeter | CudaMeter


def meter_for(device: str) -> Meter:
    """The meter of `"cpu"` or `"cuda"`.

    Raises:
        DeviceError: this machine has no such device.
    """
    return CudaMeter() if device == "cuda" else CpuMeter()


def convolves_in_tf32(device: str) -> bool:
    """Tell whether convolutions in float32 run in TF32 there."""
    on_gpu = device == "cuda" and torch.cuda.is_available()
    return on_gpu and tf32_allowed() and torch.cuda.get_device_capability() >= (8, 0)


def driver_version() -> str:
    """Version of NVIDIA's driver, by its kernel module or by nvidia-smi; empty where neither says it."""
    with contextlib.suppress(OSError):
        line = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
        if found := re.search(r"\b\d+\.\d+(\.\d+)?\b", line):
            return found.group()
    return nvidia_smi("driver_version").partition("\n")[0]


def _within(cache_bytes: int, room_bytes: float) -> int:
    """Memory to empty a cache with."""
    return int(max(0, min(cache_bytes, room_bytes)))


def _touch(tensor: torch.Tensor | None) -> None:
    """Bring a tensor into the cache."""
    if tensor is not None and tensor.numel():
        (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).sum()  # nothing adds up float8


def _cache_bytes() -> int:
    """Bytes that fill the largest cache of the CPU."""
    sizes = [2**23]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(1024 * int(path.read_text().strip().removesuffix("K")))
    return min(max(sizes) * 5 // 4, MAX_CACHE_BYTES)


def _gpu_ms(run: Callable[[], Any], cycles: int) -> float:
    """Time that the GPU takes for a call, which waits for so many cycles before it, in ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types for it
    occupy_gpu(cycles)
    start.record()
    run()
    end.record()
    end.synchronize()
    taken: float = start.elapsed_time(end)
    return taken


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
