"""What measures a call on a device: its latency and its workspace, behind one interface."""

import contextlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]  # a module, where there is one

from monetlite.core.errors import DeviceError
from monetlite.profiling.memory import high_water_growth_bytes, peak_growth_bytes, release_workspaces

FEWEST_RUNS, MOST_RUNS = 3, 15
ENOUGH_SECONDS = 0.15
"""Runs of one call after warming up: until both the fewest and this long, or the most, are reached."""
FEW_FAULTS = 64
"""A run on the CPU with more page faults than this took memory from the system, which a step does once."""
MOST_CACHE_BYTES = 2**26
"""Caches of a CPU are taken to be no larger than this when they are emptied; a GPU's to be this if it won't say."""
CYCLES_A_SECOND = 2e9
"""Of a GPU, at most about this."""
FEWEST_SECONDS_AHEAD = 2e-4
"""How far ahead of a GPU the host is, at least, when a call is timed."""

UNNOTICED_BYTES = 4 * 2**20
"""How far the high-water mark may exceed the allocation events before it is believed instead: page and
allocator granularity."""


class Meter(Protocol):
    """Measures calls on one device."""

    device: str

    def latency_ms(self, run: Callable[[], Any], recent: torch.Tensor | None = None) -> float:
        """Median latency of a call, in ms, after a warm-up.

        `recent` is what the operator before would have just written: of the call's arguments, that one may be in
        a cache when it begins.
        """

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        """The most memory a call holds beyond its arguments, its results included, in bytes."""

    def kept_bytes(self, runs: Sequence[Callable[[], Any]]) -> int:
        """What libraries keep for the thread that makes these calls, once their results are gone, in bytes."""

    def environment(self) -> Mapping[str, str]:
        """The device, and the versions and settings that its figures depend on."""


class CpuMeter:
    """Wall-clock time, and the CPU profiler's allocation events checked against the high-water mark."""

    device = "cpu"

    def __init__(self) -> None:
        self._other = torch.empty(cache_bytes(), dtype=torch.uint8)

    def latency_ms(self, run: Callable[[], Any], recent: torch.Tensor | None = None) -> float:
        run()
        times: list[float] = []
        undisturbed: list[float] = []
        began = time.perf_counter()
        while len(undisturbed) < FEWEST_RUNS or time.perf_counter() - began < ENOUGH_SECONDS:
            if len(times) >= MOST_RUNS:
                break
            self._empty_cache(recent)
            faults, start = page_faults(), time.perf_counter()
            run()
            taken = time.perf_counter() - start
            times.append(taken)
            if page_faults() - faults <= FEW_FAULTS:
                undisturbed.append(taken)
        return statistics.median(undisturbed or times) * 1000

    def _empty_cache(self, recent: torch.Tensor | None) -> None:
        """Leave in the cache what a step would: the last result, not what was stored long before."""
        self._other.fill_(1)
        if recent is not None and recent.numel():
            recent.sum()

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        events = peak_growth_bytes(run)
        mark = high_water_growth_bytes(run)
        if mark is not None and mark > events * 1.1 + UNNOTICED_BYTES:
            # The first run may have grown the heap for good; only what a second one needs again is workspace.
            mark = high_water_growth_bytes(run)
            if mark is not None and mark > events * 1.1 + UNNOTICED_BYTES:
                return mark
        return events

    def kept_bytes(self, runs: Sequence[Callable[[], Any]]) -> int:
        return 0  # what oneDNN keeps it takes from the heap, which torch's figures don't count

    def environment(self) -> Mapping[str, str]:
        return {
            "device": _cpu_name(),
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }


class CudaMeter:
    """CUDA events, and the caching allocator's statistics."""

    device = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "device 'cuda': this machine has no GPU that torch can use; name a device to estimate"
            )
        cache = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0) or MOST_CACHE_BYTES
        self._other = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")

    def latency_ms(self, run: Callable[[], Any], recent: torch.Tensor | None = None) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        # In a step the host is ahead of the GPU. Here the GPU is held up until the host has queued the call.
        cycles = int(CYCLES_A_SECOND * max(FEWEST_SECONDS_AHEAD, 2 * (time.perf_counter() - began)))
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < FEWEST_RUNS or (time.perf_counter() - began < ENOUGH_SECONDS and len(times) < MOST_RUNS):
            self._other.zero_()
            if recent is not None and recent.numel():
                recent.sum()
            start, end = _event(), _event()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no types for it
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        return peak_growth_bytes(run, "cuda", counted="requested")

    def kept_bytes(self, runs: Sequence[Callable[[], Any]]) -> int:
        if not runs:
            return 0
        release_workspaces("cuda")
        before = torch.cuda.memory_allocated()
        for run in runs:
            run()
        torch.cuda.synchronize()
        return max(0, torch.cuda.memory_allocated() - before)

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


def meter_for(device: str) -> Meter:
    """The meter of `"cpu"` or `"cuda"`.

    Raises:
        DeviceError: this machine has no such device.
    """
    return CudaMeter() if device == "cuda" else CpuMeter()


def cache_bytes() -> int:
    """What it takes to fill the largest cache of the CPU, in bytes."""
    sizes = [2**23]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(1024 * int(path.read_text().strip().removesuffix("K")))
    return min(max(sizes) * 5 // 4, MOST_CACHE_BYTES)


def driver_version() -> str:
    """The version of NVIDIA's driver, as its kernel module or nvidia-smi tells it; empty where neither does."""
    with contextlib.suppress(OSError):
        line = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
        if found := re.search(r"\b\d+\.\d+(\.\d+)?\b", line):
            return found.group()
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return told.strip().partition("\n")[0]
    return ""


def page_faults() -> int:
    """How many pages this process has taken from the system; 0 where that is not counted."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
