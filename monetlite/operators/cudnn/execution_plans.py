"""The execution plans that cuDNN offers for a convolution, with their workspaces; and running them on CUDA tensors.

A plan is an engine with values for its knobs. cuDNN's heuristics list those that they recommend for a graph of
operations, a device and a version of cuDNN, and say what workspace each one needs once it is built. No GPU has to
be present: a description of the device is enough.
"""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from monetlite.core.announcing import warn
from monetlite.core.errors import ConvolutionError, CudnnError, DeviceError
from monetlite.operators.cudnn import library
from monetlite.operators.cudnn.work import ConvolutionWork, Layout
from monetlite.operators.strides import same_places

ALIGNMENT_BYTES = 16
"""Alignment that the frontend promises cuDNN of every pointer."""

_FIRST, _SECOND, _MADE = 1, 2, 3
"""Identifiers of a graph's tensors: the two operands, and the result."""

_BACKEND_NAME = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)")

# Per thread: not every engine's plans may be run by two threads at a time.
_local = threading.local()


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """One way in which cuDNN can do a piece of work.

    `name` is made of the engine's number and its knobs, so it means the same after a restart, and on another
    machine with the same version of cuDNN. `index` is the plan's place among those that cuDNN listed, with the ones
    that can't be built counted.
    """

    name: str
    workspace_bytes: int
    index: int


def enumerate_plans(work: ConvolutionWork, device_properties: str | None = None) -> tuple[ExecutionPlan, ...]:
    """The plans that cuDNN recommends for a piece of work, its favourites first; none if it can't do it.

    `device_properties` is the JSON of a device (`properties_json`); without it, the plans are for the current CUDA
    device. It takes some tens of milliseconds, and a second more when it is the first.

    Raises:
        CudnnMissing: cuDNN can't be used here.
        CudnnError: cuDNN refuses the description of the work or of the device.
        DeviceError: no device is described, and none is present.
    """
    graph = _planned_graph(work, device_properties)
    return () if graph is None else tuple(_built(graph))


def find_plan(
    work: ConvolutionWork, name: str, device_properties: str | None = None
) -> tuple[Any, ExecutionPlan] | None:
    """The plan of that name, found anew among those for this device; None if it is not among them.

    A plan can't be built from its engine and knobs alone: the frontend has no names for some of cuDNN's knobs.

    Returns:
        The frontend's graph in which the plan is built and ready to run, and the plan.

    Raises:
        CudnnMissing, CudnnError, DeviceError: as `enumerate_plans` does.
    """
    graph = _planned_graph(work, device_properties)
    plan = None if graph is None else next(_built(graph, name), None)
    return None if plan is None else (graph, plan)


def _built(graph: Any, only: str | None = None) -> Iterator[ExecutionPlan]:
    """The plans of a graph that can be built: all, or those of one name."""
    for index, name in _listed(graph):
        if only not in (None, name):
            continue
        try:
            graph.build_plan_at_index(index)
            workspace_bytes = max(0, int(graph.get_workspace_size_plan_at_index(index)))
        except (library.load().cudnnGraphNotSupportedError, RuntimeError):
            continue
        yield ExecutionPlan(name=name, workspace_bytes=workspace_bytes, index=index)


def _planned_graph(work: ConvolutionWork, device_properties: str | None = None) -> Any | None:
    """The frontend's graph of the work, with plans listed and none built; None if cuDNN has no plan for it."""
    if not work.plannable:
        return None
    cudnn = library.load()
    if device_properties is None:
        if not torch.cuda.is_available():
            raise DeviceError("there is no CUDA device here to plan for; describe one (properties_json)")
        target = {"handle": library.thread_handle(torch.cuda.current_device())}
    else:
        try:
            target = {"device_property": cudnn.create_device_properties(device_properties)}
        except RuntimeError as error:
            raise CudnnError(f"cuDNN can't read the description of a device: {error}") from error
    try:
        graph = _describe(cudnn, work, target)
        graph.validate()
        graph.build_operation_graph()
        # Each mode lists plans that the others don't; the frontend drops what is listed twice.
        modes = cudnn.heur_mode
        graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError:
        return None
    except RuntimeError as error:
        raise CudnnError(f"cuDNN refuses {work}: {error}") from error
    unwanted = _unwanted_notes(cudnn.numerical_note, work)
    if unwanted:
        graph.deselect_numeric_notes(unwanted)
    return graph


def _describe(cudnn: Any, work: ConvolutionWork, target: dict[str, Any]) -> Any:
    data_type = {
        "float32": cudnn.data_type.FLOAT,
        "float16": cudnn.data_type.HALF,
        "bfloat16": cudnn.data_type.BFLOAT16,
    }[work.dtype]
    graph = cudnn.pygraph(
        io_data_type=data_type,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **target,
    )
    tensors = []
    for uid, layout in zip((_FIRST, _SECOND), work.operands, strict=True):
        shape, stride = _at_least_2d(layout)
        tensors.append(graph.tensor(name=f"operand{uid}", uid=uid, dim=shape, stride=stride, data_type=data_type))
    operation = {
        "forward": graph.conv_fprop,
        "input_gradient": graph.conv_dgrad,
        "weight_gradient": graph.conv_wgrad,
    }[work.role]
    flat = len(work.stride) == 1
    made = operation(
        *tensors,
        padding=[0, *work.padding] if flat else list(work.padding),
        stride=[1, *work.stride] if flat else list(work.stride),
        dilation=[1, *work.dilation] if flat else list(work.dilation),
    )
    # Several images have the same result, and several weights; so the gradients' sizes have to be said.
    shape, stride = _at_least_2d(work.made)
    made.set_uid(_MADE).set_output(True).set_dim(shape).set_stride(stride).set_data_type(data_type)
    return graph


def _at_least_2d(layout: Layout) -> tuple[list[int], list[int]]:
    """A layout as cuDNN takes it: with one dimension of space, another of size 1 goes in front of it."""
    shape, stride = layout
    if len(shape) > 3:
        return list(shape), list(stride)
    return [*shape[:2], 1, shape[2]], [*stride[:2], shape[2] * stride[2], stride[2]]


def _unwanted_notes(notes: Any, work: ConvolutionWork) -> list[Any]:
    # Sums are in float32 whatever the dtype. Winograd's larger tiles lose about a digit (Lavin and Gray, 2016),
    # which is little beside TF32's rounding and much beside float32's.
    unwanted = [notes.REDUCED_PRECISION_REDUCTION]
    if not (work.tf32 and work.dtype == "float32"):
        unwanted += [notes.WINOGRAD_TILE_4x4, notes.WINOGRAD_TILE_6x6, notes.WINOGRAD_TILE_13x13]
    if work.deterministic:
        unwanted.append(notes.NONDETERMINISTIC)
    if work.dtype == "float32":
        # cuDNN lists TF32 kernels for float32, too, which run on tensor cores. Inputs are rounded to half
        # precision for nobody who has asked for float32 or TF32.
        unwanted += [notes.DOWN_CONVERT_INPUTS] if work.tf32 else [notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE]
    return unwanted


def _listed(graph: Any) -> Iterator[tuple[int, str]]:
    """Index and name of each plan that is listed for a graph, the first of each name."""
    seen = set()
    for index in range(graph.get_execution_plan_count()):
        # The name has all knobs; the frontend's own (engine, knobs) merges those that it has no names for.
        match = _BACKEND_NAME.fullmatch(graph.get_plan_name_at_index(index))
        if match is None:  # one of the frontend's own kernels, which has no engine number to find it by
            continue
        pairs = (item.split("=") for item in match[2].split("_k")[1:])
        knobs = sorted((int(knob), int(value)) for knob, value in pairs)
        name = ".".join([f"cudnn.engine{match[1]}", *(f"k{knob}={value}" for knob, value in knobs)])
        if name not in seen:
            seen.add(name)
            yield index, name


def run_plan(work: ConvolutionWork, plan_name: str, first: Tensor, second: Tensor) -> Tensor:
    """Do a piece of work by a plan, on the current CUDA stream, in a workspace from torch's caching allocator.

    A plan is built at its first use by a thread and kept, since not every plan may be run by two threads. `first`
    and `second` are the image and the weight (forward), the result's gradient and the weight (input_gradient), or
    the image and the result's gradient (weight_gradient). One that is not laid out as the work says is copied, with
    a warning.

    Returns:
        The result, the image's gradient, or the weight's gradient, laid out as the work says.

    Raises:
        ConvolutionError: a tensor has not the shape or dtype of the work.
        DeviceError: a tensor is not on a CUDA device, or they are on two; or the device has no such plan.
        CudnnMissing, CudnnError: cuDNN can't be used here, or failed.
    """
    device, dtype = _common_device(first, second), getattr(torch, work.dtype)
    first, second = (
        _laid_out(item, layout, dtype) for item, layout in zip((first, second), work.operands, strict=True)
    )
    with torch.cuda.device(device):
        graph, plan, handle = _ready(work, plan_name, device)
        made = torch.empty_strided(*work.made, dtype=first.dtype, device=first.device)
        # Freed when this returns and taken again by what follows on the same stream, so after the kernel.
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=first.device)
        pointers = {_FIRST: first.data_ptr(), _SECOND: second.data_ptr(), _MADE: made.data_ptr()}
        try:
            library.load().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
            graph.execute_plan_at_index(pointers, workspace.data_ptr(), index=plan.index, handle=handle)
        except (RuntimeError, ValueError, TypeError) as error:
            raise CudnnError(f"{plan_name} failed on cuda:{device}, doing {work}: {error}") from error
    return made


def _ready(work: ConvolutionWork, plan_name: str, device: int) -> tuple[Any, ExecutionPlan, Any]:
    """The graph in which this thread has built a plan, the plan, and the thread's handle."""
    ready: dict[Any, tuple[Any, ExecutionPlan, Any]] = _local.__dict__.setdefault("ready", {})
    key = work, plan_name, device
    if key not in ready:
        found = find_plan(work, plan_name)
        if found is None:
            raise DeviceError(
                f"cuDNN offers no plan {plan_name} on cuda:{device} for {work}; the schedule was "
                "made for another device, version of cuDNN or shape: profile and solve again here"
            )
        ready[key] = (*found, library.thread_handle(device))
    return ready[key]


def forget_plans() -> None:
    """Drop the plans that the calling thread has built."""
    _local.__dict__.clear()


def _common_device(first: Tensor, second: Tensor) -> int:
    if first.device.type != "cuda" or second.device != first.device:
        raise DeviceError(f"cuDNN runs on one CUDA device; these tensors are on {first.device} and {second.device}")
    return int(first.device.index)


def _laid_out(tensor: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """A tensor as a plan needs it: itself, or a copy if its layout is not the captured one.

    Torch's fake tensors have other strides than real ones after a few kernels, and a person's input may be part of
    a larger tensor.
    """
    shape, stride = layout
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ConvolutionError(
            f"a tensor is {tuple(tensor.shape)} of {tensor.dtype}, and the plan is for {shape} of {dtype}"
        )
    beyond_bytes = tensor.data_ptr() % ALIGNMENT_BYTES
    strides = tensor.stride()
    if not beyond_bytes and (strides == stride or same_places(shape, strides, stride)):
        return tensor
    warn(
        f"an operand of a cuDNN plan, of shape {shape}, has strides {tensor.stride()} and starts "
        f"{beyond_bytes} bytes past a multiple of {ALIGNMENT_BYTES}; planned were strides "
        f"{stride} and aligned memory. It is copied at every step, which adds its size to the workspace"
    )
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
