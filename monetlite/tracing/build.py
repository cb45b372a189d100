"""From a joint graph to an `OperatorGraph`: one operator per kernel, one value per storage.

Three kinds of operators come out of the joint graph (`Reachability` tells them apart): those that a result
of the forward pass needs, or the random number generator's state after it, which are mandatory forward
operators; those that depend on the gradient of an
output, which are backward operators; and those that only the backward pass needs but that could run at any
time, which are optional forward operators. Between forward and backward stands the operator `loss`, outside
the model, which reads the outputs and writes their gradients.
"""

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from monetlite.core.devices import find_device
from monetlite.core.errors import DeviceError, TraceError
from monetlite.core.graph import (
    AS_TRACED,
    CHANNELS_LAST,
    OperatorGraph,
    Phase,
    Resident,
)
from monetlite.fx import storages
from monetlite.fx.calls import spec_of
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import is_forward
from monetlite.fx.torch_internals.torch_dispatch import OpOverload, storage_key
from monetlite.operators import is_random, merge
from monetlite.operators.implementations import (
    find_function,
    target_of,
)
from monetlite.operators.traits import traits_of
from monetlite.tracing.attention import Capability
from monetlite.tracing.builder import GraphBuilder
from monetlite.tracing.capture import Joint, capture
from monetlite.tracing.layout import channels_last
from monetlite.tracing.names import Namer
from monetlite.tracing.signature import leaves_in_order


def trace(
    model: nn.Module,
    example_inputs: "Inputs",
    *,
    device: str | None = None,
    meta_device: str = "cpu",
    layout: str = AS_TRACED,
) -> OperatorGraph:
    """Trace one training step of a model, without running it and without allocating memory.

    Under `torch.autocast` the step is traced as it runs there.

    Args:
        model: a module in training mode; on the CPU, a GPU, or the meta device.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Only the
            shapes, strides, dtypes, devices and `requires_grad` of its tensors matter.
        device: the name of a GPU to trace for (`"rtx-4090"`), where the model is not on one: attention runs by
            other operators there than on a CPU.
        meta_device: the device that tensors on the meta device stand for.
        layout: `"as_traced"`, or `"channels_last"` to have images with their channels innermost throughout the
            step, whatever the model and its inputs have.

    Returns:
        The operator graph: every kernel of the forward and backward pass, and every storage they write.

    Raises:
        TraceError: the model can't be captured as one graph, or has nothing to train.
        DeviceError: `device` is not one whose figures are known.
    """
    args, kwargs = split_inputs(example_inputs)
    if layout not in (AS_TRACED, CHANNELS_LAST):
        raise TraceError(f"layout {layout!r} is neither {AS_TRACED!r} nor {CHANNELS_LAST!r}")
    if not model.training:
        raise TraceError("the model is in evaluation mode; call model.train() before tracing a training step")
    here = device_of(model, (args, kwargs), meta_device)
    if here == "cuda" and not torch.cuda.is_available():
        # torch ends the process where it looks for a GPU that isn't there.
        raise DeviceError(
            "a step on 'cuda' is traced on a machine that has a GPU; here, trace for one by name: device='rtx-4090'"
        )
    capability = capability_of(device) if here == "cpu" else None
    joint = capture(model, args, kwargs, meta_device=meta_device, capability=capability)
    autocast = autocast_dtype(here)
    traced = build_graph(joint, model, (args, kwargs), meta_device=meta_device, layout=layout, autocast=autocast)
    return traced.graph if capability is None else replace(traced.graph, device=find_device(str(device)).name)


def capability_of(device: str | None) -> Capability | None:
    """The compute capability of a named GPU; None for a device that is not named, but measured.

    Raises:
        DeviceError: an unknown name.
    """
    return None if device in (None, "cpu", "cuda") else find_device(device).compute_capability


@dataclass(frozen=True)
class Arguments:
    """Example inputs of a call with both positional and keyword arguments."""

    args: tuple[object, ...]
    kwargs: dict[str, object]


Inputs: TypeAlias = torch.Tensor | tuple[object, ...] | list[object] | dict[str, object] | Arguments


def split_inputs(example_inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """Example inputs as (positional, keyword) arguments."""
    if isinstance(example_inputs, Arguments):
        return example_inputs.args, dict(example_inputs.kwargs)
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An operator graph together with the joint graph that its calls refer to, for lowering."""

    graph: OperatorGraph
    joint: Joint


def build_graph(
    joint: Joint,
    model: nn.Module,
    inputs: tuple[tuple[object, ...], dict[str, object]],
    *,
    meta_device: str = "cpu",
    layout: str = AS_TRACED,
    autocast: str = "",
) -> Traced:
    """Build the operator graph of a joint graph, its images laid out as `trace` says.

    `autocast` is the dtype that `torch.autocast` converted to where the graph was captured.
    """
    if layout == CHANNELS_LAST:
        joint = channels_last(joint)
    graph = joint.graph.graph
    merge(graph)
    effects = _draws(graph) | {node for node in graph.nodes if traits_of(str(node.target)).checks}
    late = frozenset(itertools.filterfalse(is_forward, effects))
    reach = storages.Reachability(graph, joint.forward_outputs, effects=effects, late_effects=late)
    namer = Namer(model)
    flat_inputs = leaves_in_order(model, *inputs)
    kernels = [node for node in graph.nodes if node in reach.needed and storages.is_kernel(node)]
    for node in kernels:
        _refuse_what_cannot_be_planned(node, namer)
    builder = GraphBuilder(reach=reach, namer=namer, device=device_of(model, inputs, meta_device))
    mandatory = [node for node in kernels if node in reach.forward]
    backward = [node for node in kernels if node in reach.backward]
    others = set(mandatory) | set(backward)
    namer.assign(kernels)
    for node in mandatory:
        builder.add(node, Phase.FORWARD)
    for node in kernels:
        if node not in others:
            builder.add(node, Phase.FORWARD, optional=True)
    for node in backward:
        builder.add_intermediates(node)
    builder.add_loss()
    builder.plan_deliveries(backward, at_once=joint.at_once)
    for node in backward:
        builder.add(node, Phase.BACKWARD)
        builder.add_delivery(node)
    builder.add_delivery(None)
    specs = {
        f"input{index}": spec_of(tensor)
        for index, tensor in enumerate(item for item in flat_inputs if isinstance(item, torch.Tensor))
    }
    built = OperatorGraph(
        name=type(model).__name__,
        operators=tuple(builder.operators),
        values=tuple(builder.values),
        resident=resident_bytes(model, flat_inputs),
        inputs=specs,
        device=builder.device,
        layout=layout,
        autocast=autocast,
    )
    return Traced(graph=built, joint=joint)


def resident_bytes(model: nn.Module, inputs: Iterable[object]) -> Resident:
    """Bytes of a model's parameters and buffers and of its inputs, each storage counted once."""
    seen: set[int] = set()

    def total(tensors: Iterable[object]) -> int:
        size = 0
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                key = storage_key(tensor)
                if key not in seen:
                    seen.add(key)
                    size += tensor.untyped_storage().nbytes()
        return size

    return Resident(parameters=total(model.parameters()), buffers=total(model.buffers()), inputs=total(inputs))


def autocast_dtype(device: str) -> str:
    """What `torch.autocast` converts operands on a device to at present; empty where it is off."""
    on = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""


def _draws(graph: fx.Graph) -> frozenset[fx.Node]:
    """The random kernels of a captured graph; of one whose results nobody reads, the first of them."""
    draws = {node for node in graph.nodes if storages.is_kernel(node) and is_random(node)}
    for node in list(draws):
        if not isinstance(node.meta["val"], torch.Tensor) and not any(storages.results(node)):
            with graph.inserting_after(node):
                first = graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": node.meta["val"][0]}
            draws.add(first)
    return frozenset(draws)


def _refuse_what_cannot_be_planned(node: fx.Node, namer: Namer) -> None:
    """Refuse a kernel that is not an operator, or whose results' storages or their sizes are not known."""
    where = namer.source(node) or "the model"
    if not isinstance(node.target, OpOverload) and find_function(target_of(node)) is None:
        raise TraceError(f"{where}: {node.target} can't be scheduled (not an operator)")
    results = [item for item in pytree.tree_leaves(node.meta.get("val")) if isinstance(item, torch.Tensor)]
    for item in results:
        if item.layout != torch.strided:
            layout = str(item.layout).removeprefix("torch.")
            raise TraceError(
                f"{where}: {node.target} makes a sparse tensor ({layout}), whose size depends on the data, so its "
                "memory can't be planned; make it dense (nn.Embedding and nn.EmbeddingBag with sparse=False)"
            )
    if storages.shares_storage(node):
        raise TraceError(
            f"{where}: {node.target} returns memory that it was given, or the same twice, and its schema doesn't "
            "say so; have it return a copy (.clone())"
        )
    if any(not isinstance(size, int) for item in results for size in item.shape):
        raise TraceError(
            f"{where}: {node.target} makes a tensor whose shape depends on the data, so its memory can't be "
            "planned; keep shapes fixed (a mask in place of a selection)"
        )


def device_of(model: nn.Module, inputs: object, meta_device: str = "cpu") -> str:
    """The type of the device that a step runs on: that of its inputs, or of the parameters."""
    for tensor in _tensors(model, inputs):
        return meta_device if tensor.is_meta else tensor.device.type
    return meta_device


def on_its_gpu(model: nn.Module, inputs: object) -> contextlib.AbstractContextManager[Any]:
    """Make the GPU that a step runs on torch's current one, whose generator and statistics are looked at."""
    gpu = gpu_of(model, inputs)
    return contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu)


def gpu_of(model: nn.Module, inputs: object) -> torch.device | None:
    """The GPU that a step runs on, that of its inputs or of the parameters; None where it runs on none."""
    first = next(_tensors(model, inputs), None)
    return first.device if first is not None and first.is_cuda else None


def _tensors(model: nn.Module, inputs: object) -> Iterator[torch.Tensor]:
    """Those of the inputs, then those of the model."""
    leaves = (item for item in pytree.tree_leaves(inputs) if isinstance(item, torch.Tensor))
    return itertools.chain(leaves, model.parameters())
