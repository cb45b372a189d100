"""NVIDIA's cuDNN frontend: whether it can be used here, and a handle for each thread and device.

The frontend (`import cudnn`, the package nvidia-cudnn-frontend) is optional. It finds the libcudnn that torch
with CUDA brings; without a GPU, libcudnn and cuBLASLt from wheels are enough to enumerate plans.
"""

import ctypes
import importlib
import importlib.util
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from monetlite.core.errors import CudnnError, CudnnMissing
from monetlite.operators.cudnn.properties import properties_json

_OLDEST = 90800
"""cuDNN 9.8, the first that plans from a description of a device."""

_local = threading.local()


def available() -> bool:
    """Whether plans can be enumerated here. That needs no GPU; running one does."""
    return problem() is None


@cache
def problem() -> str | None:
    """What keeps cuDNN from being used here, and what to do about it; None if nothing does."""
    if not sys.platform.startswith("linux"):
        return f"cuDNN plans are supported on Linux, and this is {sys.platform}"
    if importlib.util.find_spec("cudnn") is None:
        return 'nvidia-cudnn-frontend is not installed; pip install "monetlite[cudnn]"'
    try:
        library = importlib.import_module("cudnn")
        version = int(library.backend_version())
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
        return f"nvidia-cudnn-frontend does not find libcudnn ({_first_line(error)}); torch with CUDA brings it"
    if version < _OLDEST:
        return f"cuDNN {version} is older than {_OLDEST}; install torch with a newer CUDA"
    missing = _load_cublas()
    if missing is not None:
        return missing
    try:
        library.create_device_properties(properties_json("h100"))
    except RuntimeError as error:
        # From 9.21 on, part of libcudnn is linked against the driver (libcuda.so.1).
        return (
            f"cuDNN {version} does not load without a driver ({_first_line(error)}); "
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
            raise CudnnError(f"cuDNN can't be initialised on cuda:{device}: {_first_line(error)}") from error
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
