"""What measures whole runs of a model on a device: memory and time, behind one small interface."""

import contextlib
import gc
import subprocess
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from monetlite.checking.measuring.results import Growth, Memory, Place
from monetlite.profiling import memory_use
from monetlite.profiling.memory_use import (
    high_water_bytes,
    peak_growth_bytes,
    process_bytes,
    steady_heap,
    trim_heap,
)
from monetlite.profiling.meters import meter_for


class Probe(Protocol):
    """Measures runs on one device. Made before anything is on it."""

    place: Place

    def within(self) -> contextlib.AbstractContextManager[None]:
        """A context in which taking more memory than there is raises, rather than ends the process."""

    def clean(self) -> None:
        """Give back all memory that nobody uses."""

    def growth(self, build: Callable[[], Any]) -> Growth | None:
        """Build something, once, and see what memory it takes; None where the system won't say."""

    def memory(self, run: Callable[[], Any], resident_bytes: int) -> Memory:
        """The memory of a run, which may be run several times, beside what is resident before it."""

    def times_ms(self, run: Callable[[], Any], warmup: int, repeats: int) -> tuple[float, ...]:
        """How long a run takes, several times, in ms, after runs that don't count."""


class CpuProbe:
    """The CPU profiler's allocation events, and the process's own account of itself beside them."""

    def __init__(self) -> None:
        self.place = Place(
            device="cpu",
            environment=meter_for("cpu").environment(),
            total_bytes=memory_use.machine_bytes(),
            available_bytes=memory_use.available_bytes(),
            process_bytes=process_bytes(),
        )

    def within(self) -> contextlib.AbstractContextManager[None]:
        return memory_use.memory_limited(memory_use.available_bytes())

    def clean(self) -> None:
        gc.collect()
        trim_heap()

    def growth(self, build: Callable[[], Any]) -> Growth | None:
        before, ran = process_bytes(), False

        def once() -> None:
            nonlocal ran
            ran = True
            build()

        highest = high_water_bytes(once)
        if not ran:
            build()
        after = process_bytes()
        if before is None or after is None or highest is None:
            return None
        return Growth(kept_bytes=after - before, peak_bytes=highest - before)

    def memory(self, run: Callable[[], Any], resident_bytes: int) -> Memory:
        peak_bytes = resident_bytes + peak_growth_bytes(run)
        trim_heap()
        return Memory(peak_bytes=peak_bytes, resident_bytes=resident_bytes, in_use_bytes=high_water_bytes(run))

    def times_ms(self, run: Callable[[], Any], warmup: int, repeats: int) -> tuple[float, ...]:
        with steady_heap():
            return _times_ms(run, warmup, repeats, lambda: None)


class CudaProbe:
    """The caching allocator's statistics, and what the device reports in use."""

    def __init__(self) -> None:
        idle_bytes = _reported_bytes()
        environment = meter_for("cuda").environment()
        torch.zeros(1, device="cuda")  # the context, with its kernels, comes with the first tensor
        torch.cuda.synchronize()
        started_bytes = _reported_bytes()
        context_bytes = None
        if idle_bytes is not None and started_bytes is not None:
            context_bytes = max(0, started_bytes - idle_bytes - torch.cuda.memory_reserved())
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        self.place = Place(
            device="cuda",
            environment=environment,
            total_bytes=total_bytes,
            available_bytes=free_bytes,
            context_bytes=context_bytes,
        )

    def within(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clean(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def growth(self, build: Callable[[], Any]) -> Growth | None:
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        build()
        torch.cuda.synchronize()
        return Growth(
            kept_bytes=torch.cuda.memory_allocated() - before_bytes,
            peak_bytes=torch.cuda.max_memory_allocated() - before_bytes,
        )

    def memory(self, run: Callable[[], Any], resident_bytes: int) -> Memory:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return Memory(
            peak_bytes=torch.cuda.max_memory_allocated(),
            resident_bytes=resident_bytes,
            reserved_bytes=torch.cuda.max_memory_reserved(),
            in_use_bytes=total_bytes - free_bytes,
        )

    def times_ms(self, run: Callable[[], Any], warmup: int, repeats: int) -> tuple[float, ...]:
        return _times_ms(run, warmup, repeats, torch.cuda.synchronize)


def probe_for(device: str) -> Probe:
    """The probe of `"cpu"` or `"cuda"`.

    Raises:
        DeviceError: this machine has no such device.
    """
    return CudaProbe() if device == "cuda" else CpuProbe()


def _times_ms(
    run: Callable[[], Any], warmup: int, repeats: int, synchronize: Callable[[], None]
) -> tuple[float, ...]:
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - begin) * 1000)
    return tuple(times)


def _reported_bytes() -> int | None:
    """What nvidia-smi reports in use on the present GPU: unlike torch, it can tell before there is a context."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return int(told) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


__all__ = ["CpuProbe", "CudaProbe", "Probe", "probe_for"]
