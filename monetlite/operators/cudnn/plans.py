"""The execution plans that cuDNN offers for a convolution: names, engines, knobs and workspaces.

A plan is an engine with values for its knobs. cuDNN's heuristics list those that they recommend for a graph of
operations, a device and a version of cuDNN, and say what workspace each one needs once it is built. No GPU has to
be present: a description of the device is enough.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from monetlite.core.errors import CudnnError, DeviceError
from monetlite.operators.cudnn import library
from monetlite.operators.cudnn.work import ConvolutionWork, Layout

FIRST, SECOND, MADE = 1, 2, 3
"""Identifiers of a graph's tensors: the two operands, and what is made of them."""

_BACKEND_NAME = re.compile(r"eng(\d+)((?:_k\d+=-?\d+)*)")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way in which cuDNN can do a piece of work.

    `name` is made of the engine's number and its knobs, so it means the same after a restart, and on another
    machine with the same version of cuDNN. `knobs` are (cuDNN's number of the knob, its value), by number.
    `index` is the plan's place among those that cuDNN listed, with the ones that can't be built counted.
    """

    name: str
    engine: int
    knobs: tuple[tuple[int, int], ...]
    workspace_bytes: int
    index: int


def enumerate_plans(work: ConvolutionWork, device_properties: str | None = None) -> tuple[Plan, ...]:
    """The plans that cuDNN recommends for a piece of work, its favourites first; none if it can't do it.

    `device_properties` is the JSON of a device (`properties_json`); without it, the plans are for the current CUDA
    device. It takes some tens of milliseconds, and a second more when it is the first.

    Raises:
        CudnnMissing: cuDNN can't be used here.
        CudnnError: cuDNN refuses the description of the work or of the device.
        DeviceError: no device is described, and none is present.
    """
    graph = planned_graph(work, device_properties)
    if graph is None:
        return ()
    plans = []
    for index, name, engine, knobs in _listed(graph):
        workspace_bytes = build(graph, index)
        if workspace_bytes is not None:
            plans.append(Plan(name=name, engine=engine, knobs=knobs, workspace_bytes=workspace_bytes, index=index))
    return tuple(plans)


def find_plan(work: ConvolutionWork, name: str, device_properties: str | None = None) -> Plan | None:
    """The plan of that name, found anew among those for this device; None if it is not among them.

    A plan can't be built from its engine and knobs alone: the frontend has no names for some of cuDNN's knobs.

    Raises:
        CudnnMissing, CudnnError, DeviceError: as `enumerate_plans` does.
    """
    found = find_built(work, name, device_properties)
    return None if found is None else found[1]


def find_built(work: ConvolutionWork, name: str, device_properties: str | None = None) -> tuple[Any, Plan] | None:
    """As `find_plan`, with the frontend's graph in which the plan is built and ready to run.

    Raises:
        CudnnMissing, CudnnError, DeviceError: as `enumerate_plans` does.
    """
    graph = planned_graph(work, device_properties)
    if graph is None:
        return None
    for index, listed, engine, knobs in _listed(graph):
        if listed == name:
            workspace_bytes = build(graph, index)
            if workspace_bytes is None:
                return None
            return graph, Plan(name=name, engine=engine, knobs=knobs, workspace_bytes=workspace_bytes, index=index)
    return None


def planned_graph(work: ConvolutionWork, device_properties: str | None = None) -> Any | None:
    """The frontend's graph of the work, with plans listed and none built; None if cuDNN has no plan for it.

    Raises:
        CudnnMissing, CudnnError, DeviceError: as `enumerate_plans` does.
    """
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


def build(graph: Any, index: int) -> int | None:
    """Build a listed plan and return its workspace in bytes; None if it can't be built, or is deselected."""
    try:
        graph.build_plan_at_index(index)
        return max(0, int(graph.get_workspace_size_plan_at_index(index)))
    except (library.load().cudnnGraphNotSupportedError, RuntimeError):
        return None


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
    for uid, layout in zip((FIRST, SECOND), work.operands, strict=True):
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
    made.set_uid(MADE).set_output(True).set_dim(shape).set_stride(stride).set_data_type(data_type)
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
        # What cuDNN lists for float32 includes TF32 kernels, which run on tensor cores. Inputs are rounded to
        # half precision for nobody who has asked for float32 or TF32.
        unwanted += [notes.DOWN_CONVERT_INPUTS] if work.tf32 else [notes.DOWN_CONVERT_INPUTS, notes.TENSOR_CORE]
    return unwanted


def _listed(graph: Any) -> Iterator[tuple[int, str, int, tuple[tuple[int, int], ...]]]:
    """Index, name, engine and knobs of each plan that is listed for a graph, the first of each name."""
    seen = set()
    for index in range(graph.get_execution_plan_count()):
        # The name has all knobs; the frontend's own (engine, knobs) merges those that it has no names for.
        match = _BACKEND_NAME.fullmatch(graph.get_plan_name_at_index(index))
        if match is None:  # one of the frontend's own kernels, which has no engine number to find it by
            continue
        pairs = (item.split("=") for item in match[2].split("_k")[1:])
        knobs = tuple(sorted((int(knob), int(value)) for knob, value in pairs))
        name = ".".join([f"cudnn.engine{match[1]}", *(f"k{knob}={value}" for knob, value in knobs)])
        if name not in seen:
            seen.add(name)
            yield index, name, int(match[1]), knobs
