"""The operators and values of a traced step, from the kernels of its joint graph."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import fx

from monetlite.core.graph import (
    DELIVERY,
    LOSS,
    Call,
    Implementation,
    Operator,
    Phase,
    TensorRef,
    Value,
    ValueKind,
)
from monetlite.fx import storages
from monetlite.fx.call_encoding import encode_arguments, fake_mode, spec_of
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import is_tangent
from monetlite.fx.varying_sizes import SIZES
from monetlite.operators import TracedKernel, is_random
from monetlite.operators.batch_norm import without_running_statistics
from monetlite.operators.convolution import split_backward
from monetlite.operators.implementations import (
    Intermediate,
    alternatives,
    intermediates,
    name_of,
    reads_of,
    target_of,
)
from monetlite.operators.program_calls import deliver
from monetlite.operators.random import STATE as RNG_STATE
from monetlite.operators.random import note_state, replayed
from monetlite.operators.regions import REGION_CALLS, implement
from monetlite.operators.strides import same_places
from monetlite.operators.traits import family_of, is_collective, traits_of
from monetlite.tracing.names import Namer, source_of

DELIVERIES, MIN_DELIVERY_BYTES = 16, 2**20
"""Gradients are handed over to autograd when a 16th of their bytes is ready, and at least 1 MiB."""


def least_delivery(gradient_bytes: int) -> int:
    """Bytes of gradients from which they are handed over, where all of a step have so many."""
    return max(MIN_DELIVERY_BYTES, gradient_bytes // DELIVERIES)


@dataclass
class GraphBuilder:
    """Collects operators and values while the nodes of a joint graph are added one by one."""

    reach: storages.Reachability
    namer: Namer
    device: str
    each_gradient: bool = False
    """Every gradient is handed over by itself."""
    handed_on: Collection[fx.Node] = ()
    """Inputs that are no leaves: autograd hands their gradients on as they are."""
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
    """For each backward kernel, small values that it may read in place of large ones."""
    _final: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """For each backward kernel, the gradients that can be handed over after it."""
    _waiting: list[fx.Node] = field(default_factory=list)
    _given: list[fx.Node] = field(default_factory=list)
    """Gradients that no backward kernel makes, such as one of an output."""

    def __post_init__(self) -> None:
        flat = self.reach.output
        count = self.reach.forward_outputs
        self.outputs = {storages.base(node) for node in flat[:count] if node is not None}
        self.gradient_of: dict[fx.Node, list[fx.Node]] = {}
        for node, primal in self.reach.gradients:
            self.gradient_of.setdefault(node, []).append(primal)
        self.gradients = set(map(storages.base, self.gradient_of))
        self.copied = {node: self._copied_for(node, primals) for node, primals in self.gradient_of.items()}
        """For each gradient, the inputs for which autograd copies it."""
        self.kept = {
            storages.base(node)
            for node, primals in self.gradient_of.items()
            if len(self.copied[node]) < len(primals)
        }
        """Storages of gradients that autograd keeps as they are."""
        # Those that vary in size don't count: a step has the same deliveries at all sizes.
        self._fixed_bytes = {
            node: 0 if hasattr(node.meta["val"], SIZES) else storages.storage_bytes(node) for node in self.gradients
        }

    def _copied_for(self, gradient: fx.Node, inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Those of the inputs with this gradient for which autograd copies it (AccumulateGrad).

        A leaf's first gradient becomes its `.grad` if nobody else holds the tensor and it is laid out as the leaf
        is. The gradient of a mean is a number, expanded; those of two parameters that were joined are slices of one
        tensor; that of a sum is the same for every operand: they are copied. Others may hold the gradient of an
        output, and what is computed before there are any: it counts as copied, though autograd may keep a view.
        """
        base = storages.base(gradient)
        inputs = [item for item in inputs if item not in self.handed_on]
        if is_tangent(base) or base not in self.reach.backward:
            return inputs
        # All but the last leaf to get a tensor find that others will.
        kept = [item for item in inputs if _is_laid_out_as(gradient.meta["val"], item.meta["val"])]
        return [item for item in inputs if item not in kept[:1]]

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
        changes = self._reads_mutated(node)
        drawn_again: Callable[[Call], Call] | None = None
        if phase is Phase.FORWARD and is_random(node) and not changes:
            state, device = self._note_random_state(node)
            drawn_again = partial(replayed, state=state, device=device)
        for suffix, part in split_backward(call):
            operator_name = self.namer.unique(node, suffix)
            used = [(position, name) for position, name in enumerate(part.outputs) if name is not None]
            writes = [
                self._new_value(
                    results[name],
                    operator_name if len(used) == 1 else f"{operator_name}[{position}]",
                    phase,
                    optional,
                    position in traits_of(part.target).private_results,
                )
                for position, name in used
            ]
            rerun = None
            if changes:
                results_of_first = tuple(self.written.get(name or "") for name in part.outputs)
                rerun = without_running_statistics(part, results_of_first, self.device)
            if drawn_again is not None:
                rerun = drawn_again(part)
            self._keep(rerun, writes)
            default = Implementation(
                name="default",
                reads=tuple(value for value in reads_of(part, rerun) if value not in writes),
                writes=tuple(writes),
                call=part,
                again=rerun,
            )
            kernel = TracedKernel(
                call=part,
                default=default,
                results=tuple(
                    None if name is None else spec_of(results[name].meta["val"]) for name in part.outputs
                ),
                values=self.values,
                writer=self._written_by,
                reader_calls=lambda value: self.reader_calls.get(value, ()),
                references=self.written.get,
                intermediates=self.intermediates.get(node, {}),
            )
            for value in reads_of(part):
                self.reader_calls.setdefault(value, []).append(part)
            implementations = [default]
            if not _reads_a_host_number(node):
                implementations += [*alternatives(kernel), *self._region_calls(kernel, node)]
            if drawn_again is not None:
                implementations[1:] = [_with_rerun(item, drawn_again) for item in implementations[1:]]
            self.writers.update(dict.fromkeys(writes, len(self.operators)))
            self._add_operator(
                node,
                operator_name,
                family_of(part.target) + suffix,
                *implementations,
                phase=phase,
                optional=optional,
                rerunnable=phase is Phase.FORWARD
                and not is_collective(part.target)
                and (rerun is not None or not (changes or is_random(node))),
            )

    def _region_calls(self, kernel: TracedKernel, node: fx.Node) -> Iterator[Implementation]:
        """Implementations of a region."""
        for call in node.meta.get(REGION_CALLS, ()):
            item = implement(kernel, call, encode_arguments(call.args, self.value_of))
            if item is not None:
                yield item

    def _add_operator(
        self, node: fx.Node | None, name: str, family: str, *implementations: Implementation, **facts: Any
    ) -> None:
        """Add an operator, which belongs to the module and line of a node if it is of the model."""
        if node is not None:
            facts |= {"module": self.namer.module(node), "source": source_of(node)}
        self.operators.append(Operator(name=name, family=family, implementations=implementations, **facts))

    def _note_random_state(self, node: fx.Node) -> tuple[TensorRef, str]:
        """Add the operator that notes the generator's state right before a random kernel draws from it."""
        state = note_state(node)
        name = self.namer.unique(node, ".rng_state")
        value = self._new_value(state, name, Phase.FORWARD, optional=False)
        (device,) = state.args
        assert isinstance(device, str)
        call = Call(target=RNG_STATE, args=(device,), outputs=(state.name,))
        default = Implementation(name="default", reads=(), writes=(value,), call=call)
        self._add_operator(node, name, "rng_state", default, phase=Phase.FORWARD, rerunnable=False)
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
        with fake_mode(reader):
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
        implementations = [
            Implementation(name=way, reads=reads_of(call), writes=(value,), call=call) for way, call in calls
        ]
        self._add_operator(
            reader, name, family_of(target), *implementations, phase=Phase.FORWARD, optional=True, derived=True
        )
        return self.written[node.name]

    def add_loss(self) -> None:
        """Add the operator for code outside the model: it reads the outputs and writes their gradients."""
        reads = {self.index_of[node] for node in self.outputs if node in self.index_of}
        tangents = [node for node in self.reach.graph.nodes if is_tangent(node)]
        writes = []
        for number, node in enumerate(tangents):
            self.index_of[node] = len(self.values)
            writes.append(len(self.values))
            self.values.append(_value(node, f"loss.tangent{number}", ValueKind.TANGENT))
        implementation = Implementation(name="default", reads=tuple(sorted(reads)), writes=tuple(writes))
        name = self.namer.reserve("loss")
        self._add_operator(None, name, LOSS, implementation, phase=Phase.BACKWARD, rerunnable=False)

    def plan_deliveries(self, backward: Sequence[fx.Node], *, at_once: bool = False) -> None:
        """Find the backward kernel after which each gradient is final and nothing reads its parameter any more.

        An optimizer that steps as soon as it has a gradient may then change the parameter. So nothing that a later
        kernel reads may have to be computed again from it either. With `at_once` all are handed over after the last
        kernel.
        """
        position = {node: at for at, node in enumerate(backward)}
        bits = {node: 1 << number for number, node in enumerate(self.reach.primals)}
        for node in self.reach.graph.nodes:
            if node not in bits and node not in self.reach.backward:
                bits[node] = reduce(or_, (bits.get(read, 0) for read in node.all_input_nodes), 0)
        last_read: dict[fx.Node, int] = {}
        seen = 0  # from the last kernel on
        for at, node in reversed(list(enumerate(backward))):
            needed = reduce(or_, (bits.get(read, 0) for read in node.all_input_nodes), 0)
            new, seen = needed & ~seen, needed | seen
            if new:
                last_read.update((primal, at) for primal in self.reach.primals if new & bits[primal])
        for node, primals in self.gradient_of.items():
            kernel = storages.kernel_of(node)
            if kernel not in position:
                self._given.append(node)
            else:
                at = max(position[kernel], *(last_read.get(primal, 0) for primal in primals))
                self._final.setdefault(backward[-1 if at_once else at], []).append(node)

    def add_delivery(self, node: fx.Node | None) -> None:
        """Hand over the gradients that are final after a kernel, once they are a share of all; at last, any."""
        self._waiting += self._given if node is None else self._final.get(node, [])
        values = {self.index_of[storages.base(gradient)] for gradient in self._waiting}
        waiting_bytes = sum(self._fixed_bytes[made] for made in set(map(storages.base, self._waiting)))
        least = 0 if node is None or self.each_gradient else least_delivery(sum(self._fixed_bytes.values()))
        if not values or waiting_bytes < least:
            return
        call = Call(target=name_of(deliver), args=encode_arguments(self._waiting, self.value_of), outputs=())
        copies = tuple(self._copy(gradient, of) for gradient in self._waiting for of in self.copied[gradient])
        implementation = Implementation(name="default", reads=tuple(sorted(values)), writes=copies, call=call)
        self._waiting = []
        name = self.namer.reserve("deliver")
        self._add_operator(None, name, DELIVERY, implementation, phase=Phase.BACKWARD, rerunnable=False)

    def _copy(self, gradient: fx.Node, primal: fx.Node) -> int:
        """Add the copy of a gradient that autograd makes for an input when it is handed over."""
        name = self.namer.reserve(f"{self.values[self.index_of[storages.base(gradient)]].name}.copy")
        copied = _value(primal, name, ValueKind.PARAM_GRAD)
        self.values.append(replace(copied, size_bytes=primal.meta["val"].nbytes))
        return len(self.values) - 1

    def value_of(self, node: fx.Node) -> int | None:
        """The value that a tensor of the graph is (a view of); None where it is resident."""
        return self.index_of.get(storages.base(node))

    def _keep(self, rerun: Call | None, writes: Iterable[int]) -> None:
        """Keep the results of a kernel's first run that later runs read."""
        for value in set(writes).intersection(reads_of(rerun)):
            self.values[value] = replace(self.values[value], kind=ValueKind.STATISTIC)

    def _reads_mutated(self, node: fx.Node) -> bool:
        return any(
            isinstance(argument.meta.get("val"), torch.Tensor) and storages.base(argument) in self.reach.mutated
            for argument in node.all_input_nodes
        )

    def _new_value(self, node: fx.Node, name: str, phase: Phase, optional: bool, note: bool = False) -> int:
        if node in self.outputs or (node in self.gradients and phase is Phase.FORWARD):
            kind = ValueKind.OUTPUT
        elif node in self.kept:
            kind = ValueKind.PARAM_GRAD
        elif phase is Phase.BACKWARD:
            kind = ValueKind.GRADIENT
        else:
            kind = ValueKind.INTERMEDIATE if optional else ValueKind.ACTIVATION
        self.index_of[node] = len(self.values)
        self.values.append(_value(node, name, kind, note))
        self.written[node.name] = TensorRef(
            node=node.name, value=self.index_of[node], spec=spec_of(node.meta["val"])
        )
        return self.index_of[node]

    def _written_by(self, value: int) -> Implementation | None:
        writer = self.writers.get(value)
        return None if writer is None else self.operators[writer].implementations[0]


def _value(node: fx.Node, name: str, kind: ValueKind, note: bool = False) -> Value:
    tensor = node.meta["val"]
    return Value(
        name=name,
        kind=kind,
        size_bytes=storages.storage_bytes(node),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        note=note,
    )


def _with_rerun(item: Implementation, drawn_again: Callable[[Call], Call]) -> Implementation:
    """An implementation of a random kernel, whose later runs draw the same numbers again."""
    assert item.call is not None
    rerun = drawn_again(item.call)
    return replace(item, reads=reads_of(item.call, rerun), again=rerun)


def _is_laid_out_as(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Torch's layout contract of gradients: a dense leaf's strides, or else contiguous."""
    if torch.empty_like(leaf).stride() != leaf.stride():  # with gaps or overlaps
        return gradient.is_contiguous()
    return same_places(leaf.shape, gradient.stride(), leaf.stride())


def _reads_a_host_number(node: fx.Node) -> bool:
    """True for a kernel on a GPU that takes a number of the host's memory. Nothing may be written in its place."""
    device = getattr(node.meta.get("val"), "device", None)
    vals = [item.meta.get("val") for item in node.all_input_nodes]
    return any(isinstance(item, torch.Tensor) and device not in (None, item.device) for item in vals)
