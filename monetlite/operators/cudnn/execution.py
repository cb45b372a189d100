"""Running cuDNN's execution plans on CUDA tensors."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monetlite.core.errors import ConvolutionError, CudnnError, DeviceError
from monetlite.operators.cudnn import library, plans
from monetlite.operators.cudnn.work import ConvolutionWork, Layout

ALIGNMENT_BYTES = 16
"""What the frontend promises cuDNN of every pointer."""

# Per thread: not every engine's plans may be run by two threads at a time.
_local = threading.local()


@dataclass(frozen=True, kw_only=True)
class _Ready:
    graph: Any
    index: int
    workspace_bytes: int


def run(work: ConvolutionWork, plan_name: str, first: Tensor, second: Tensor) -> Tensor:
    """Do a convolution, or one of its gradients, by the plan of that name, on the current CUDA stream.

    `first` and `second` are the image and the weight (forward), the result's gradient and the weight
    (input_gradient), or the image and the result's gradient (weight_gradient), laid out as `work` says. The plan
    is built at its first use by a thread and kept; its workspace comes from torch's caching allocator.

    Returns:
        The result, the image's gradient, or the weight's gradient, laid out as `work` says.

    Raises:
        ConvolutionError: a tensor is not what `work` says, or its memory is not aligned to 16 bytes.
        DeviceError: a tensor is not on a CUDA device, or they are on two; or the device has no such plan.
        CudnnMissing, CudnnError: cuDNN can't be used here, or failed.
    """
    device = _common_device(first, second)
    for name, tensor, layout in zip(("first", "second"), (first, second), work.operands, strict=True):
        _check(name, tensor, layout, work.dtype)
    with torch.cuda.device(device):
        ready = _ready(device, work, plan_name)
        made = torch.empty_strided(*work.made, dtype=first.dtype, device=first.device)
        # Freed when this returns and taken again by what follows on the same stream, so after the kernel.
        workspace = torch.empty(ready.workspace_bytes, dtype=torch.uint8, device=first.device)
        handle = library.thread_handle(device)
        pointers = {
            plans.FIRST: first.data_ptr(),
            plans.SECOND: second.data_ptr(),
            plans.MADE: made.data_ptr(),
        }
        try:
            library.load().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
            ready.graph.execute_plan_at_index(pointers, workspace.data_ptr(), index=ready.index, handle=handle)
        except RuntimeError as error:
            raise CudnnError(f"{plan_name} failed on cuda:{device}, doing {work}: {error}") from error
    return made


def forget_plans() -> None:
    """Drop the plans that the calling thread has built."""
    _local.__dict__.clear()


def _ready(device: int, work: ConvolutionWork, plan_name: str) -> _Ready:
    built: dict[tuple[int, ConvolutionWork, str], _Ready] = _local.__dict__.setdefault("built", {})
    key = (device, work, plan_name)
    if key not in built:
        found = plans.find_built(work, plan_name)
        if found is None:
            raise DeviceError(
                f"cuDNN offers no plan {plan_name} on cuda:{device} for {work}; the schedule was made for another "
                "device, version of cuDNN or shape: profile and solve again here"
            )
        graph, plan = found
        built[key] = _Ready(graph=graph, index=plan.index, workspace_bytes=plan.workspace_bytes)
    return built[key]


def _common_device(first: Tensor, second: Tensor) -> int:
    if first.device.type != "cuda" or second.device != first.device:
        raise DeviceError(f"cuDNN runs on one CUDA device; these tensors are on {first.device} and {second.device}")
    return int(first.device.index)


def _check(name: str, tensor: Tensor, layout: Layout, dtype: str) -> None:
    shape, stride = layout
    # How far apart the elements of a dimension are that has only one means nothing.
    same = tuple(tensor.shape) == shape and all(
        size == 1 or actual == wanted for size, actual, wanted in zip(shape, tensor.stride(), stride, strict=True)
    )
    if not same or str(tensor.dtype) != f"torch.{dtype}":
        raise ConvolutionError(
            f"the {name} tensor is {tuple(tensor.shape)} with strides {tensor.stride()} of {tensor.dtype}, "
            f"and the plan is for {shape} with strides {stride} of {dtype}"
        )
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ConvolutionError(
            f"the {name} tensor starts {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of "
            f"{ALIGNMENT_BYTES}, and cuDNN's plans are for aligned memory; copy it first"
        )
