"""NVIDIA's cuDNN frontend, descriptions of devices for it, and a handle for each thread and device.

The frontend (`import cudnn`, the package nvidia-cudnn-frontend) is optional. It finds the libcudnn that torch
with CUDA brings; without a GPU, libcudnn and cuBLASLt from wheels are enough to enumerate plans.
"""

import ctypes
import importlib
import importlib.util
import json
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from monetlite.core.devices import known_devices
from monetlite.core.errors import CudnnError, CudnnMissing, DeviceError, first_line

MIN_VERSION = 90800
"""cuDNN 9.8, the first that plans from a description of a device."""

_local = threading.local()


def available() -> bool:
    """Tell whether plans can be enumerated here. That needs no GPU; running one does."""
    return problem() is None


@cache
def problem() -> str | None:
    """The reason why cuDNN can't be used here, and what to do about it; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"cuDNN plans are supported on Linux, and this is {sys.platform}"
    if importlib.util.find_spec("cudnn") is None:
        return 'nvidia-cudnn-frontend is not installed; pip install "monetlite[cudnn]"'
    try:
        library = importlib.import_module("cudnn")
        version = int(library.backend_version())
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
        return f"nvidia-cudnn-frontend does not find libcudnn ({first_line(error)}); torch with CUDA brings it"
    if version < MIN_VERSION:
        return f"cuDNN {version} is older than {MIN_VERSION}; install torch with a newer CUDA"
    missing = _load_cublas()
    if missing is not None:
        return missing
    try:
        library.create_device_properties(properties_json("h100"))
    except RuntimeError as error:
        # From 9.21 on, part of libcudnn is linked against the driver (libcuda.so.1).
        return (
            f"cuDNN {version} does not load without a driver ({first_line(error)}); "
            "on a machine without a GPU, pip install nvidia-cudnn-cu13==9.20.0.48"
        )
    return None


def load() -> ModuleType:
    """The frontend.

    Raises:
        CudnnMissing: it can't be used here; the message says why.
    """
    reason = problem()
    if reason is not None:
        raise CudnnMissing(f"cuDNN plans are not available: {reason}")
    return importlib.import_module("cudnn")


def properties_json(device: str) -> str:
    """A named device (`monetlite/core/devices.yaml`) as the JSON that cuDNN plans by, without having the device.

    Raises:
        DeviceError: no such device; the message lists those that there are.

    >>> json.loads(properties_json("h100"))["multiProcessorCount"]
    132
    """
    known = {name: item for name, item in known_devices().items() if item.cuda}
    if device not in known:
        raise DeviceError(
            f"cuDNN plans can't be enumerated for {device!r} without having it; known: {', '.join(known)}"
        )
    major, minor = known[device].compute_capability
    return json.dumps(
        {
            "deviceVer": 100 * major + 10 * minor,
            **known[device].cuda,
            "warpSize": 32,
            "maxThreadsPerBlock": 1024,
            "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [2**31 - 1, 65535, 65535],
            "regsPerBlock": 65536,
            "maxRegistersPerSM": 65536,
            "maxSharedMemoryPerBlock": 49152,
            "supportCoopLaunch": 1,
            # cuDNN wants these fields, which tell one device from another, and plans without regard to them.
            "deviceName": device,
            "cudaDeviceId": 0,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "driverVer": 13000,
        }
    )


def thread_handle(device: int) -> Any:
    """The calling thread's cuDNN handle on a CUDA device, by ordinal; made once, and kept while the thread lives.

    The backward pass runs on a thread of autograd's own, and cuDNN allows a handle to one thread at a time.

    Raises:
        CudnnMissing: cuDNN can't be used here.
        CudnnError: cuDNN can't make a handle.
    """
    handles: dict[int, Any] = _local.__dict__.setdefault("handles", {})
    if device not in handles:
        library = load()
        try:
            with torch.cuda.device(device):
                handles[device] = library.create_handle()
        except RuntimeError as error:
            raise CudnnError(f"cuDNN can't be initialised on cuda:{device}: {first_line(error)}") from error
    return handles[device]


def _load_cublas() -> str | None:
    """Load cuBLASLt, or say that it is missing: cuDNN aborts the process when it looks for it in vain."""
    cudnn = ctypes.CDLL("libcudnn.so.9")  # already loaded by the frontend, from wherever it found it
    cudnn.cudnnGetCudartVersion.restype = ctypes.c_size_t
    major = int(cudnn.cudnnGetCudartVersion()) // 1000
    name = f"libcublasLt.so.{major}"
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    for candidate in (name, wheels / f"cu{major}" / "lib" / name, wheels / "cublas" / "lib" / name):
        try:
            ctypes.CDLL(str(candidate))
        except OSError:
            continue
        return None
    package = "nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}"
    return f"{name} is not found, which libcudnn needs; torch with CUDA {major} brings it, and so does {package}"
