"""Costs for a machine without the GPU that will train: a roofline over the operators of a traced step.

An estimate ranks operators and schedules; it does not promise milliseconds. `docs/estimates.md` gives its
error against measurements.
"""

import math
from dataclasses import replace

import torch

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.devices import Device, find_device
from monetlite.core.graph import Argument, Call, Implementation, OperatorGraph, TensorRef
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.fx.torch_internals.torch_dispatch import named_operator, schema_of
from monetlite.operators.convolution import in_tf32
from monetlite.operators.convolution_kernels import BACKWARD, FORWARD, ConvolutionCall
from monetlite.operators.implementations import FUNCTIONS, tensor_at
from monetlite.operators.strides import item_bytes
from monetlite.operators.traits import family_of, operation_formula, traits_of
from monetlite.profiling import roofline
from monetlite.profiling.roofline import Convolution

LEAST_BESIDE_CUBLAS_BYTES = 10**9
"""Plain peak from which on a step is estimated with what cuBLAS keeps. Of a small step it would be the most."""


def estimate_profile(graph: OperatorGraph, device_name: str) -> Profile:
    """Estimate the costs of every implementation of every operator on a named device.

    Convolutions in float32 run as TF32 where the device can, and matrix products don't: torch's default settings.

    Args:
        graph: a traced step.
        device_name: one of `known_devices()`, such as `h100`, or torch's name of it.

    Returns:
        A profile of kind `estimated`. Operators outside of the model (calls of None) cost nothing.

    Raises:
        DeviceError: no figures for a device of that name.
    """
    device = find_device(device_name)
    graph = graph.available("cuda")
    if "tf32" in device.peak_flops:
        graph = in_tf32(graph)
    estimated: dict[tuple[str, int], Cost] = {}

    def cost_of(item: Implementation) -> Cost:
        if item.call is None or not item.call.outputs:  # nothing is computed
            return Cost(latency_ms=0.0, workspace_bytes=0)
        written_bytes = sum(graph.values[value].size_bytes for value in item.writes)
        key = (item.call.signature, written_bytes)
        if key not in estimated:
            estimated[key] = estimate_call(item.call, device, written_bytes)
        return estimated[key]

    environment = {
        "device": device.title,
        "method": "roofline",
        "float32 convolutions": "tf32" if "tf32" in device.peak_flops else "fp32",
        "float32 matmuls": "fp32",
        "torch": torch.__version__,
    }
    profile = Profile(
        graph=graph,
        device=device.name,
        kind=ProfileKind.ESTIMATED,
        costs=tuple(tuple(map(cost_of, operator.implementations)) for operator in graph.operators),
        environment=environment,
    )
    return beside_cublas(profile, graph)


def beside_cublas(profile: Profile, traced: OperatorGraph) -> Profile:
    """Count what cuBLAS keeps: a workspace for each part of a step that multiplies matrices, as each has a thread.

    Args:
        profile: estimated.
        traced: a graph with calls of the operators that it has.
    """
    graph = profile.graph
    if simulate(profile, plain_steps(graph)).peak_bytes < LEAST_BESIDE_CUBLAS_BYTES:
        return profile
    phases = {
        operator.phase
        for operator in traced.operators
        if (call := operator.implementations[0].call) and traits_of(call.target).runs_on_cublas
    }
    libraries = len(phases) * find_device(profile.device).cublas_workspace_bytes
    return replace(profile, graph=replace(graph, resident=replace(graph.resident, libraries=libraries)))


def attention_problem(graph: OperatorGraph, device_name: str) -> str:
    """The problem of estimating a graph for a device whose attention is another; empty if there is none."""
    device = find_device(device_name)
    traced_on = graph.device
    if traced_on not in ("cpu", "cuda") and find_device(traced_on).compute_capability == device.compute_capability:
        return ""
    families = {
        family_of(call.target) for operator in graph.operators if (call := operator.implementations[0].call)
    }
    if traced_on == "cuda" or families.isdisjoint(("attention", "attention_backward", "safe_softmax")):
        return ""
    return (
        f"the attention of {graph.name} was traced as {traced_on} runs it, and {device.name} may run other "
        f"operators: a schedule solved from this would then not fit the model there. Trace it with "
        f'device="{device.name}"'
    )


def estimate_call(call: Call, device: Device, written_bytes: int) -> Cost:
    """Estimate one call on a device, whose results have so many bytes.

    A target without a formula is taken to be bound by memory: it reads its operands and writes its results.
    """
    registered = FUNCTIONS.get(call.target)
    launches = 1 if registered is None else registered.launches(call)
    own_bytes = 0 if registered is None else registered.workspace_bytes(call)
    if registered is not None and registered.kernels is not None:
        runs = registered.kernels(call)
        each = ((run.times, estimate_call(run.call, device, run.written_bytes)) for run in runs)
        return Cost(latency_ms=sum(times * cost.latency_ms for times, cost in each), workspace_bytes=own_bytes)
    if registered is not None and registered.like is not None:
        call, own = registered.like(call), call
        if registered.parts is not None:
            return _in_parts(call, registered.parts(own), device, written_bytes)
    dtype = _compute_dtype(call)
    if call.target in (FORWARD, BACKWARD):
        kernel = _convolutions(call, device, dtype, written_bytes)
    elif operations := _operations(call):
        kernel = _matrix_product(call, device, dtype, operations, written_bytes)
    elif registered is not None and registered.like is None:
        moved = registered.passes * (_read_bytes(call) + written_bytes)
        kernel = roofline.memory_bound(device, moved, getattr(device.efficiency, registered.limit))
    else:
        kernel = _memory_bound(call, device, written_bytes)
    return replace(
        kernel,
        latency_ms=launches * device.launch_us / 1e3 + kernel.latency_ms,
        workspace_bytes=kernel.workspace_bytes + own_bytes,
    )


def _in_parts(call: Call, count: int, device: Device, written_bytes: int) -> Cost:
    """A convolution, or the gradients of one, over a part of the batch at a time.

    A part's result is held beside the whole one: it is copied there or, of a weight's gradient, added.
    """
    forward = call.target == FORWARD
    whole = (0,) if forward else (0, 1)
    args = tuple(_part(item, count) if at in whole else item for at, item in enumerate(call.args))
    of_batch = forward or call.args[10] == (True, False, False)
    made_bytes = written_bytes // count if of_batch else written_bytes
    cost = estimate_call(replace(call, args=args), device, made_bytes)
    gathered = roofline.memory_bound(device, (2 if of_batch else 3) * made_bytes, device.efficiency.elementwise)
    each_ms = cost.latency_ms + device.launch_us / 1e3 + gathered.latency_ms
    return Cost(latency_ms=count * each_ms, workspace_bytes=cost.workspace_bytes + made_bytes)


def _part(tensor: Argument, count: int) -> Argument:
    assert isinstance(tensor, TensorRef)
    batch, *rest = tensor.spec.shape
    return replace(tensor, spec=replace(tensor.spec, shape=(-(-batch // count), *rest)))


def tensor_bytes(tensor: TensorRef) -> int:
    """Bytes of a tensor's distinct elements, which a kernel has to read."""
    spec = tensor.spec
    elements = math.prod(size for size, step in zip(spec.shape, spec.stride, strict=True) if step != 0)
    return elements * item_bytes(spec.dtype)


def _convolutions(call: Call, device: Device, dtype: str, written_bytes: int) -> Cost:
    """A convolution, or the gradients of one that are wanted."""
    found = ConvolutionCall.of(call)
    if found.gradient is None:
        result_size, result_bytes, roles, bias_bytes = found.result_size, written_bytes, ["forward"], 0
    else:
        result_size, result_bytes = found.gradient.spec.shape[2:], tensor_bytes(found.gradient)
        wanted = zip(("input_gradient", "weight_gradient"), found.wanted, strict=False)
        roles = [role for role, is_wanted in wanted if is_wanted]
        bias_bytes = result_bytes if found.wanted[2] else 0
    image, weight = found.image.spec, found.weight
    sizes, swap = (image.shape[2:], result_size), {}
    if found.transposed:  # it is the input gradient of the convolution with the same weight
        sizes, swap = sizes[::-1], {"forward": "input_gradient", "input_gradient": "forward"}
    kernels = [
        roofline.convolution(
            device,
            Convolution(
                role=swap.get(role, role),
                batch=image.shape[0],
                input_size=sizes[0],
                output_size=sizes[1],
                weight_shape=weight.spec.shape,
                groups=found.groups,
                image_bytes=tensor_bytes(found.image) + result_bytes,
                weight_bytes=tensor_bytes(weight),
                strided=any(step != 1 for step in found.stride),
                dilated=any(step != 1 for step in found.dilation),
                channels_last=image.stride[1] == 1 and image.shape[1] > 1,
            ),
            dtype=dtype,
        )
        for role in roles
    ]
    kernels.append(roofline.memory_bound(device, bias_bytes, device.efficiency.elementwise))
    return Cost(
        latency_ms=sum(kernel.latency_ms for kernel in kernels),
        workspace_bytes=max(kernel.workspace_bytes for kernel in kernels),
    )


def _operations(call: Call) -> int:
    """Operations of a matrix product or attention, by torch's own formulas; 0 for anything else."""
    formula = operation_formula(call.target)
    if formula is None:
        return 0
    shapes = [argument.spec.shape if isinstance(argument, TensorRef) else argument for argument in call.args]
    return int(formula(*shapes)) // (2 if _is_causal(call) else 1)


def _is_causal(call: Call) -> bool:
    """Tell whether a call is attention to what came before, whose kernels leave out half of the products."""
    if not family_of(call.target).startswith("attention"):
        return False
    names = [argument.name for argument in schema_of(named_operator(call.target)).arguments]
    given = dict(call.kwargs) | dict(zip(names, call.args, strict=False))
    return given.get("is_causal", False) is True


def _matrix_product(call: Call, device: Device, dtype: str, operations: int, written_bytes: int) -> Cost:
    first = traits_of(call.target).left_factor
    left, right = tensor_at(call, first).spec.shape, tensor_at(call, first + 1).spec.shape
    # Attention multiplies queries by keys transposed.
    columns = right[-2] if family_of(call.target).startswith("attention") else right[-1]
    return roofline.matmul(
        device,
        operations=operations,
        batch=math.prod(left[:-2]),
        rows=left[-2],
        columns=columns,
        depth=left[-1],
        moved_bytes=_read_bytes(call) + written_bytes,
        dtype=dtype,
    )


def _memory_bound(call: Call, device: Device, written_bytes: int) -> Cost:
    """A kernel that is bound by memory, at its fraction of the bandwidth."""
    read, traits = _read_bytes(call), traits_of(call.target)
    if traits.reads_twice:
        read *= 2
    elif traits.gathers:
        read = min(read, 2 * written_bytes)
    return roofline.memory_bound(device, read + written_bytes, getattr(device.efficiency, traits.limit))


def _read_bytes(call: Call) -> int:
    """Bytes of a call's operands, each counted once, without those it needs only the shape of."""
    position = traits_of(call.target).shape_only
    ignored = None if position is None else call.args[position]
    tensors = {tensor.node: tensor for tensor in call.tensors() if tensor is not ignored}
    return sum(tensor_bytes(tensor) for tensor in tensors.values())


def _compute_dtype(call: Call) -> str:
    """The dtype of the first floating-point operand."""
    dtypes = (tensor.spec.dtype for tensor in call.tensors())
    return next((dtype for dtype in dtypes if "float" in dtype), "float32")
