"""What measures a call on a device: its latency and its workspace, behind one interface."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from monetlite.errors import DeviceError
from monetlite.profiling.memory import high_water_growth_bytes, peak_growth_bytes

FEWEST_RUNS, MOST_RUNS = 3, 15
ENOUGH_SECONDS = 0.15
"""Runs of one call after warming up: until both the fewest and this long, or the most, are reached."""

UNNOTICED_BYTES = 4 * 2**20
"""How far the high-water mark may exceed the allocation events before it is believed instead: page and
allocator granularity."""


class Meter(Protocol):
    """Measures calls on one device."""

    device: str

    def latency_ms(self, run: Callable[[], Any]) -> float:
        """Median latency of a call, in ms, after a warm-up."""

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        """The most memory a call holds beyond its arguments, its results included, in bytes."""

    def environment(self) -> Mapping[str, str]:
        """The device and the versions that its figures depend on."""


class CpuMeter:
    """Wall-clock time, and the CPU profiler's allocation events checked against the high-water mark."""

    device = "cpu"

    def latency_ms(self, run: Callable[[], Any]) -> float:
        run()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < FEWEST_RUNS or (time.perf_counter() - began < ENOUGH_SECONDS and len(times) < MOST_RUNS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1000

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        events = peak_growth_bytes(run)
        mark = high_water_growth_bytes(run)
        if mark is not None and mark > events * 1.1 + UNNOTICED_BYTES:
            # The first run may have grown the heap for good; only what a second one needs again is workspace.
            mark = high_water_growth_bytes(run)
            if mark is not None and mark > events * 1.1 + UNNOTICED_BYTES:
                return mark
        return events

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

    def latency_ms(self, run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < FEWEST_RUNS or (time.perf_counter() - began < ENOUGH_SECONDS and len(times) < MOST_RUNS):
            start, end = _event(), _event()
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def growth_bytes(self, run: Callable[[], Any]) -> int:
        return peak_growth_bytes(run, "cuda")

    def environment(self) -> Mapping[str, str]:
        return {
            "device": torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "tf32": str(torch.backends.cudnn.allow_tf32),
        }


def meter_for(device: str) -> Meter:
    """The meter of `"cpu"` or `"cuda"`.

    Raises:
        DeviceError: this machine has no such device.
    """
    return CudaMeter() if device == "cuda" else CpuMeter()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
