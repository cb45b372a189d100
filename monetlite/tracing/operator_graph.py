"""From a joint graph to an `OperatorGraph`: one operator per kernel, one value per storage.

| operators | kernels (see `Reachability`) |
| --- | --- |
| mandatory forward | those that a result of the forward pass or the generator's state after it needs |
| optional forward | those that only the backward pass needs, and that can run at any time |
| `loss` | none: the caller reads the outputs and writes their gradients |
| backward | those that depend on the gradient of an output |
"""

import itertools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from monetlite.core.devices import find_device
from monetlite.core.errors import DeviceError, TraceError
from monetlite.core.graph import (
    ALL_OUTPUTS,
    AS_TRACED,
    CHANNELS_LAST,
    LAYOUTS_IN_WORDS,
    LOSS_ONLY,
    TILED_LOSS,
    TILED_ROWS,
    OperatorGraph,
    Phase,
    uncompiled_layout,
)
from monetlite.fx import storages
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import is_forward
from monetlite.fx.torch_internals.torch_dispatch import OpOverload
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.fx.torch_internals.torch_symbols import SYMBOLIC
from monetlite.operators import is_random, merge, take_apart
from monetlite.operators.head_and_loss import has_loss_of_rows, tile_loss
from monetlite.operators.implementations import FUNCTIONS, target_of
from monetlite.operators.traits import traits_of
from monetlite.tracing.capture import Joint, capture, copied
from monetlite.tracing.channels_last import channels_last, has_images
from monetlite.tracing.graph_builder import GraphBuilder
from monetlite.tracing.names import Namer, source_of
from monetlite.tracing.region_finder import form_regions, read_or_made_by_regions
from monetlite.tracing.row_chains import chain_rows, has_rows
from monetlite.tracing.step_inputs import (
    Inputs,
    autocast_dtype,
    device_of,
    require_module,
    resident_bytes,
    split_inputs,
    tensors_in_order,
)
from monetlite.tracing.whole_kernels import kernels_kept_whole

OF_ROWS = {TILED_LOSS: has_loss_of_rows, TILED_ROWS: has_rows}
"""For each layout of rows, whether a captured graph may differ in it."""
_DIFFERS = {AS_TRACED: lambda _: True, CHANNELS_LAST: has_images, **OF_ROWS}
"""The same for each layout."""


def trace(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    device: str | None = None,
    meta_device: str = "cpu",
    layout: str = AS_TRACED,
    outputs: str = LOSS_ONLY,
) -> OperatorGraph:
    """Trace one training step of a model, without running it and without allocating memory.

    Under `torch.autocast` the step is traced as it runs there.

    Args:
        model: a module in training mode; on the CPU, a GPU, or the meta device.
        example_inputs: a tensor, a tuple of positional arguments, or keyword arguments (a dict, or what a
            tokenizer returns). Only the shapes, strides, dtypes, devices and `requires_grad` of its tensors matter.
        device: the name of a GPU to trace for (`"rtx-4090"`), where the model is not on one: attention runs by
            other operators there than on a CPU.
        meta_device: the device that tensors on the meta device stand for.
        layout: `"as_traced"`; `"channels_last"` to have images with their channels innermost throughout the step,
            whatever the model and its inputs have; `"tiled_loss"` to have the head and loss of a language model
            in tiles of rows; or `"tiled_rows"` to have its MLPs, projections and norms in tiles of rows, too.
            `"compiled"`, `"compiled_channels_last"`, `"compiled_tiled_loss"` and `"compiled_tiled_rows"` are the
            same with regions that can be compiled.
        outputs: what the caller gets of a model that computes its loss: `"loss"` for the loss and outputs of up to
            two dimensions, `"all"`, or `"trained"`, which are all, of which others than the loss have gradients.

    Returns:
        The operator graph: every kernel of the forward and backward pass, and every storage they write.

    Raises:
        TraceError: the model can't be captured as one graph, or has nothing to train.
        DeviceError: `device` is not one whose figures are known.
    """
    (graph,) = trace_layouts(
        model, example_inputs, [layout], device=device, meta_device=meta_device, outputs=outputs
    )
    return graph


def trace_layouts(
    model: nn.Module,
    example_inputs: Inputs,
    layouts: Sequence[str],
    *,
    device: str | None = None,
    meta_device: str = "cpu",
    outputs: str = LOSS_ONLY,
    each_gradient: bool = False,
) -> list[OperatorGraph]:
    """Trace one training step in those of several layouts that differ; args and errors as in `trace`.

    The step is captured once. The first layout is always among those that are traced. With `each_gradient`
    gradients are handed over one by one.
    """
    require_module(model)
    inputs = split_inputs(example_inputs)
    if unknown := [layout for layout in layouts if layout not in LAYOUTS_IN_WORDS]:
        raise TraceError(f"layout {unknown[0]!r} is unknown; there are {', '.join(LAYOUTS_IN_WORDS)}")
    if not model.training:
        raise TraceError("the model is in evaluation mode; call model.train() before tracing a training step")
    here = device_of(model, inputs, meta_device)
    if here == "cuda" and not torch.cuda.is_available():
        # torch ends the process where it looks for a GPU that isn't there.
        raise DeviceError(
            "a step on 'cuda' is traced on a machine that has a GPU; here, trace for one by name: device='rtx-4090'"
        )
    gpu = find_device(device) if here == "cpu" and device not in (None, "cpu", "cuda") else None
    capability = None if gpu is None else gpu.compute_capability
    joint = capture(model, *inputs, meta_device=meta_device, capability=capability, outputs=outputs)
    autocast = autocast_dtype(here)
    graphs = [
        build_graph(
            own,
            model,
            inputs,
            meta_device=meta_device,
            layout=layout,
            autocast=autocast,
            outputs=outputs,
            each_gradient=each_gradient,
        ).graph
        for layout, own in in_layouts(joint, layouts).items()
    ]
    return graphs if gpu is None or capability is None else [replace(graph, device=gpu.name) for graph in graphs]


def in_layouts(joint: Joint, layouts: Sequence[str]) -> dict[str, Joint]:
    """The joint graph for each layout in which its step differs, and for the first.

    Building an operator graph changes the joint graph, so each layout has its own.
    """
    differing = [layout for layout in layouts[1:] if _DIFFERS[uncompiled_layout(layout)](joint.graph.graph)]
    return {layouts[0]: joint, **{layout: copied(joint) for layout in differing}}


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
    outputs: str = ALL_OUTPUTS,
    each_gradient: bool = False,
    handed_on: Collection[int] = (),
) -> Traced:
    """Build the operator graph of a joint graph.

    Args:
        joint: is changed.
        model, inputs, meta_device, layout, each_gradient: as in `trace_layouts`; inputs are (positional, keyword)
            arguments.
        autocast: name of the dtype that `torch.autocast` converted to during the capture; empty if it was off.
        outputs: what was captured of them, as in `trace`.
        handed_on: positions of inputs whose gradients go on to other code.

    Raises:
        TraceError: a kernel whose memory can't be planned.
    """
    plain = uncompiled_layout(layout)
    if plain == CHANNELS_LAST:
        with kernels_kept_whole():  # fake tensors are made anew
            joint = channels_last(joint)
    graph = joint.graph.graph
    merge(graph)
    if plain in (TILED_LOSS, TILED_ROWS):
        tile_loss(graph)
    if plain == TILED_ROWS:
        chain_rows(graph, joint.forward_outputs)
    if layout != plain:
        take_apart(graph)
        joint = form_regions(joint, _reach(joint))
        graph = joint.graph.graph
    reach = _reach(joint)
    reach.needed.update(read_or_made_by_regions(graph))
    kernels = [node for node in graph.nodes if node in reach.needed and storages.is_kernel(node)]
    for node in kernels:
        _refuse_unplannable(node)
    device = device_of(model, inputs, meta_device)
    given = graph.find_nodes(op="placeholder")
    builder = GraphBuilder(
        reach=reach,
        namer=Namer(model, kernels),
        device=device,
        each_gradient=each_gradient,
        handed_on=frozenset(given[at] for at in handed_on),
    )
    backward = [node for node in kernels if node in reach.backward]
    optional = [node for node in kernels if node not in reach.forward and node not in reach.backward]
    for node in kernels:
        if node in reach.forward:
            builder.add(node, Phase.FORWARD)
    for node in optional:
        builder.add(node, Phase.FORWARD, optional=True)
    for node in backward:
        builder.add_intermediates(node)
    builder.add_loss()
    builder.plan_deliveries(backward, at_once=joint.at_once)
    for node in backward:
        builder.add(node, Phase.BACKWARD)
        builder.add_delivery(node)
    builder.add_delivery(None)
    tensors = tensors_in_order(model, *inputs)
    built = OperatorGraph(
        name=type(model).__name__,
        operators=tuple(builder.operators),
        values=tuple(builder.values),
        resident=resident_bytes(model, tensors),
        inputs={f"input{index}": spec_of(tensor) for index, tensor in enumerate(tensors)},
        device=device,
        layout=layout,
        autocast=autocast,
        outputs=outputs,
    )
    return Traced(graph=built, joint=joint)


def _reach(joint: Joint) -> storages.Reachability:
    """Nodes that the results of a joint graph need, and those that have effects."""
    graph = joint.graph.graph
    effects = _draws(graph) | {node for node in graph.nodes if traits_of(str(node.target)).checks}
    late = frozenset(itertools.filterfalse(is_forward, effects))
    return storages.Reachability(graph, joint.forward_outputs, effects=effects, late_effects=late)


def _draws(graph: fx.Graph) -> frozenset[fx.Node]:
    """The random kernels of a captured graph, and the first result of those whose results nobody reads."""
    draws = {node for node in graph.nodes if storages.is_kernel(node) and is_random(node)}
    for node in list(draws):
        if not isinstance(node.meta["val"], torch.Tensor) and not any(storages.results(node)):
            with graph.inserting_after(node):
                first = graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": node.meta["val"][0]}
            draws.add(first)
    return frozenset(draws)


def _refuse_unplannable(node: fx.Node) -> None:
    """Refuse a kernel that is not an operator, or whose results' storages or their sizes are not known."""
    where = source_of(node) or "the model"
    if not isinstance(node.target, OpOverload) and target_of(node) not in FUNCTIONS:
        raise TraceError(f"{where}: {node.target} can't be scheduled (not an operator)")
    made = pytree.tree_leaves(node.meta.get("val"))
    if any(isinstance(item, SYMBOLIC) for item in made):
        raise TraceError(f"{where}: {node.target} makes a number of a tensor (.item(), float()); keep it a tensor")
    results = tensors_among(made)
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
