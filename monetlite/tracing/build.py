"""From a joint graph to an `OperatorGraph`: one operator per kernel, one value per storage.

Three kinds of operators come out of the joint graph (`Reachability` tells them apart): those that a result
of the forward pass needs, which are mandatory forward operators; those that depend on the gradient of an
output, which are backward operators; and those that only the backward pass needs but that could run at any
time, which are optional forward operators. Between forward and backward stands the operator `loss`, outside
the model, which reads the outputs and writes their gradients.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from monetlite.captured import storages
from monetlite.captured.calls import encode_arguments, spec_of
from monetlite.errors import TraceError
from monetlite.graph import (
    AS_TRACED,
    CHANNELS_LAST,
    Call,
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    Resident,
    TensorRef,
    Value,
    ValueKind,
)
from monetlite.operators import Kernel, again, is_random, merge, split
from monetlite.operators.family import family_of
from monetlite.operators.random import STATE as RNG_STATE
from monetlite.operators.random import note_state, replayed
from monetlite.operators.registry import (
    Intermediate,
    alternatives,
    find_function,
    intermediates,
    name_of,
    target_of,
)
from monetlite.tracing.capture import Joint, capture
from monetlite.tracing.layout import channels_last
from monetlite.tracing.names import Namer

LOSS = "monetlite.loss"


def trace(
    model: nn.Module, example_inputs: "Inputs", *, meta_device: str = "cpu", layout: str = AS_TRACED
) -> OperatorGraph:
    """Trace one training step of a model, without running it and without allocating memory.

    Args:
        model: a module in training mode; on the CPU, a GPU, or the meta device.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Only the
            shapes, strides, dtypes, devices and `requires_grad` of its tensors matter.
        meta_device: the device that tensors on the meta device stand for.
        layout: `"as_traced"`, or `"channels_last"` to have images with their channels innermost throughout the
            step, whatever the model and its inputs have.

    Returns:
        The operator graph: every kernel of the forward and backward pass, and every storage they write.

    Raises:
        TraceError: the model can't be captured as one graph, or has nothing to train.
    """
    args, kwargs = split_inputs(example_inputs)
    if layout not in (AS_TRACED, CHANNELS_LAST):
        raise TraceError(f"layout {layout!r} is neither {AS_TRACED!r} nor {CHANNELS_LAST!r}")
    if not model.training:
        raise TraceError("the model is in evaluation mode; call model.train() before tracing a training step")
    joint = capture(model, args, kwargs, meta_device=meta_device)
    return build_graph(joint, model, (args, kwargs), meta_device=meta_device, layout=layout).graph


Inputs: TypeAlias = torch.Tensor | tuple[object, ...] | list[object] | dict[str, object]


def split_inputs(example_inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """Example inputs as (positional, keyword) arguments."""
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
) -> Traced:
    """Build the operator graph of a joint graph, its images laid out as `trace` says."""
    if layout == CHANNELS_LAST:
        joint = channels_last(joint)
    graph = joint.graph.graph
    merge(graph)
    reach = storages.Reachability(graph, joint.forward_outputs)
    namer = Namer(model)
    flat_inputs = pytree.tree_leaves(inputs)
    builder = _Builder(reach=reach, namer=namer, device=_device(flat_inputs, model, meta_device))
    kernels = [node for node in graph.nodes if node in reach.needed and storages.is_kernel(node)]
    for node in kernels:
        if not isinstance(node.target, torch._ops.OpOverload) and find_function(target_of(node)) is None:
            raise TraceError(
                f"{namer.source(node) or 'the model'}: {node.target} can't be scheduled (not an operator)"
            )
        if _shape_depends_on_data(node):
            raise TraceError(
                f"{namer.source(node) or 'the model'}: {node.target} makes a tensor whose shape depends on the "
                "data, so its memory can't be planned; keep shapes fixed (a mask in place of a selection)"
            )
    mandatory = [
        node for node in kernels if node in reach.forward or (is_random(node) and node not in reach.backward)
    ]
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
    for node in backward:
        builder.add(node, Phase.BACKWARD)
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
    )
    return Traced(graph=built, joint=joint)


def resident_bytes(model: nn.Module, inputs: Iterable[object]) -> Resident:
    """Bytes of a model's parameters and buffers and of its inputs, each storage counted once."""
    seen: set[int] = set()

    def total(tensors: Iterable[object]) -> int:
        size = 0
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    size += storage.nbytes()
        return size

    return Resident(parameters=total(model.parameters()), buffers=total(model.buffers()), inputs=total(inputs))


def _shape_depends_on_data(node: fx.Node) -> bool:
    tensors = pytree.tree_leaves(node.meta.get("val"))
    return any(
        not isinstance(size, int) for item in tensors if isinstance(item, torch.Tensor) for size in item.shape
    )


def _device(inputs: Iterable[object], model: nn.Module, meta_device: str) -> str:
    for tensor in (*inputs, *model.parameters()):
        if isinstance(tensor, torch.Tensor):
            return meta_device if tensor.is_meta else tensor.device.type
    return meta_device


@dataclass
class _Builder:
    reach: storages.Reachability
    namer: Namer
    device: str
    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    index_of: dict[fx.Node, int] = field(default_factory=dict)
    """For each base tensor node that a kernel writes, its value."""
    writers: dict[int, int] = field(default_factory=dict)
    """For each value, the operator that writes it."""
    reader_calls: dict[int, list[Call]] = field(default_factory=dict)
    """For each value, the default calls that read it."""
    written: dict[str, TensorRef] = field(default_factory=dict)
    """The tensors that operators have written, by name."""
    intermediates: dict[fx.Node, dict[str, TensorRef]] = field(default_factory=dict)
    """For each backward kernel, the small values that it may read in place of large ones."""

    def __post_init__(self) -> None:
        flat = self.reach.output
        count = self.reach.forward_outputs
        self.outputs = {storages.base(node) for node in flat[:count] if node is not None}
        self.gradients = {storages.base(node) for node in flat[count:] if node is not None}

    def add(self, node: fx.Node, phase: Phase, optional: bool = False) -> None:
        """Add the operators that a kernel becomes: one, or several where parts of it can run apart."""
        call = Call(
            target=target_of(node),
            args=encode_arguments(node.args, self.value_of),
            kwargs=tuple((name, encode_arguments(value, self.value_of)) for name, value in node.kwargs.items()),
            outputs=tuple(
                item.name if item is not None and item in self.reach.needed else None
                for item in storages.results(node)
            ),
        )
        results = {item.name: item for item in storages.results(node) if item is not None}
        module, source = self.namer.module(node), self.namer.source(node)
        random_state, random_device = None, ""
        if phase is Phase.FORWARD and is_random(node) and not self._reads_mutated(node):
            random_state, random_device = self._note_random_state(node)
        for suffix, part in split(call):
            operator_name = self.namer.unique(node, suffix)
            used = [(position, name) for position, name in enumerate(part.outputs) if name is not None]
            writes = [
                self._new_value(
                    results[name],
                    operator_name if len(used) == 1 else f"{operator_name}[{position}]",
                    phase,
                    optional,
                )
                for position, name in used
            ]
            changes = self._reads_mutated(node)
            rerun = None
            if changes:
                rerun = again(part, tuple(self.written.get(name or "") for name in part.outputs), self.device)
            if random_state is not None:
                rerun = replayed(part, random_state, random_device)
            self._keep(rerun, writes)
            default = Implementation(
                name="default",
                reads=tuple(value for value in _values(part, rerun) if value not in writes),
                writes=tuple(writes),
                call=part,
                again=rerun,
            )
            kernel = Kernel(
                call=part,
                default=default,
                results=tuple(
                    None if name is None else spec_of(results[name].meta["val"]) for name in part.outputs
                ),
                values=self.values,
                writer_call=self._writer_call,
                writer_again=self._writer_again,
                reader_calls=lambda value: self.reader_calls.get(value, ()),
                references=self.written.get,
                intermediates=self.intermediates.get(node, {}),
            )
            for value in _values(part):
                self.reader_calls.setdefault(value, []).append(part)
            implementations = [default, *alternatives(kernel)]
            if random_state is not None:
                others = [_drawn_again(item, random_state, random_device) for item in implementations[1:]]
                implementations[1:] = others
            self.writers.update(dict.fromkeys(writes, len(self.operators)))
            self.operators.append(
                Operator(
                    name=operator_name,
                    family=family_of(part.target, suffix),
                    phase=phase,
                    implementations=tuple(implementations),
                    optional=optional,
                    rerunnable=phase is Phase.FORWARD and (rerun is not None or not (changes or is_random(node))),
                    module=module,
                    source=source,
                )
            )

    def _note_random_state(self, node: fx.Node) -> tuple[TensorRef, str]:
        """Add the operator that notes the generator's state right before a random kernel draws from it."""
        state = note_state(node)
        name = self.namer.unique(node, ".rng_state")
        value = self._new_value(state, name, Phase.FORWARD, optional=False)
        (device,) = state.args
        assert isinstance(device, str)
        call = Call(target=RNG_STATE, args=(device,), outputs=(state.name,))
        self.operators.append(
            Operator(
                name=name,
                family="rng_state",
                phase=Phase.FORWARD,
                implementations=(Implementation(name="default", reads=(), writes=(value,), call=call),),
                rerunnable=False,
                module=self.namer.module(node),
                source=self.namer.source(node),
            )
        )
        return self.written[state.name], device

    def add_intermediates(self, node: fx.Node) -> None:
        """Add the optional operators whose results a backward kernel may read in place of activations."""
        for offered in intermediates(node):
            ways = [
                (name, args)
                for name, args in offered.ways
                if all(self._is_forward(item) for item in pytree.tree_leaves(args) if isinstance(item, fx.Node))
            ]
            if ways:
                self.intermediates.setdefault(node, {})[offered.name] = self._add_intermediate(node, offered, ways)

    def _is_forward(self, node: fx.Node) -> bool:
        return self.value_of(node) is not None and node not in self.reach.backward

    def _add_intermediate(
        self, reader: fx.Node, offered: Intermediate, ways: list[tuple[str, tuple[Any, ...]]]
    ) -> TensorRef:
        graph, target = reader.graph, name_of(offered.function)
        with graph.inserting_before(reader):
            node = graph.call_function(offered.function, ways[0][1])
        mode: Any = getattr(reader.meta["val"], "fake_mode")  # noqa: B009 (fake tensors have it, torch.Tensor's type doesn't)
        with mode:
            node.meta["val"] = torch.empty(
                offered.shape, dtype=getattr(torch, offered.dtype), device=reader.meta["val"].device
            )
        self.reach.needed.add(node)
        name = self.namer.reserve(f"{self.namer.name(reader).removesuffix('.backward')}.{offered.name}")
        value = self._new_value(node, name, Phase.FORWARD, optional=True)
        calls = [
            (way, Call(target=target, args=encode_arguments(args, self.value_of), outputs=(node.name,)))
            for way, args in ways
        ]
        self.operators.append(
            Operator(
                name=name,
                family=family_of(target),
                phase=Phase.FORWARD,
                implementations=tuple(
                    Implementation(name=way, reads=_values(call), writes=(value,), call=call) for way, call in calls
                ),
                optional=True,
                derived=True,
                module=self.namer.module(reader),
                source=self.namer.source(reader),
            )
        )
        return self.written[node.name]

    def add_loss(self) -> None:
        """Add what happens outside the model: the caller reads the outputs and autograd hands in gradients."""
        reads = {self.index_of[node] for node in self.outputs if node in self.index_of}
        tangents = [node for node in self.reach.graph.nodes if storages.is_tangent(node)]
        writes = []
        for number, node in enumerate(tangents):
            self.index_of[node] = len(self.values)
            writes.append(len(self.values))
            self.values.append(_value(node, f"loss.tangent{number}", ValueKind.TANGENT))
        implementation = Implementation(name="default", reads=tuple(sorted(reads)), writes=tuple(writes))
        self.operators.append(
            Operator(
                name=self.namer.reserve("loss"),
                family=LOSS,
                phase=Phase.BACKWARD,
                implementations=(implementation,),
                rerunnable=False,
            )
        )

    def value_of(self, node: fx.Node) -> int | None:
        """The value that a tensor of the graph is (a view of); None where it is resident."""
        return self.index_of.get(storages.base(node))

    def _keep(self, rerun: Call | None, writes: Iterable[int]) -> None:
        """Hold what a kernel's later runs read of its first run's results."""
        for value in set(writes).intersection(_values(rerun)):
            self.values[value] = replace(self.values[value], kind=ValueKind.STATISTIC)

    def _reads_mutated(self, node: fx.Node) -> bool:
        return any(
            isinstance(argument.meta.get("val"), torch.Tensor) and storages.base(argument) in self.reach.mutated
            for argument in node.all_input_nodes
        )

    def _new_value(self, node: fx.Node, name: str, phase: Phase, optional: bool) -> int:
        if node in self.outputs or (node in self.gradients and phase is Phase.FORWARD):
            kind = ValueKind.OUTPUT
        elif node in self.gradients:
            kind = ValueKind.PARAM_GRAD
        elif phase is Phase.BACKWARD:
            kind = ValueKind.GRADIENT
        else:
            kind = ValueKind.INTERMEDIATE if optional else ValueKind.ACTIVATION
        self.index_of[node] = len(self.values)
        self.values.append(_value(node, name, kind))
        self.written[node.name] = TensorRef(
            node=node.name, value=self.index_of[node], spec=spec_of(node.meta["val"])
        )
        return self.index_of[node]

    def _writer(self, value: int) -> Implementation | None:
        """The default implementation of the operator that writes a value, when it has been added."""
        operator = self.writers.get(value)
        return None if operator is None else self.operators[operator].implementations[0]

    def _writer_call(self, value: int) -> Call | None:
        writer = self._writer(value)
        return None if writer is None else writer.call

    def _writer_again(self, value: int) -> Call | None:
        writer = self._writer(value)
        return None if writer is None else writer.again


def _value(node: fx.Node, name: str, kind: ValueKind) -> Value:
    tensor = node.meta["val"]
    return Value(
        name=name,
        kind=kind,
        size_bytes=storages.storage_bytes(node),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _drawn_again(item: Implementation, state: TensorRef, device: str) -> Implementation:
    """An implementation of a random kernel, whose later runs draw from a noted state."""
    assert item.call is not None
    rerun = replayed(item.call, state, device)
    return replace(item, reads=_values(item.call, rerun), again=rerun)


def _values(*calls: Call | None) -> tuple[int, ...]:
    refs = (ref for call in calls if call is not None for ref in call.tensors())
    return tuple(sorted({ref.value for ref in refs if ref.value is not None}))
