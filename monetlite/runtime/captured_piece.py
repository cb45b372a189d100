"""A graph that TorchDynamo has captured of a model that it takes apart, at the sizes that it is planned for."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import le
from typing import Any

import torch
from torch import nn

from monetlite.core.errors import IllegalSchedule, TraceError
from monetlite.core.graph import DELIVERY, LOSS, Phase, ValueKind
from monetlite.core.steps import Step, check_legal
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import is_tangent
from monetlite.fx.torch_internals.torch_symbols import expression
from monetlite.fx.varying_sizes import input_sizes
from monetlite.runtime.gradient_delivery import CapturedStep, Version
from monetlite.runtime.lowering import lower
from monetlite.tracing.capture import Joint, flat_outputs
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.sized_graphs import Limits, SizedGraphs


class CapturedPiece:
    """A captured graph, planned at some of the sizes of its inputs.

    Args:
        joint: its joint graph.
        build: makes the operator graph of a joint graph, for inputs.
        inputs: that it was captured with. They are not kept.

    Attributes:
        first: the piece at the sizes that it was captured with.
        input_names: of its graph, by position.
        step: runs its programs.
        least: the programs that store least.

    Raises:
        TraceError: it can't be planned.
    """

    step: CapturedStep
    least: Version

    def __init__(
        self, joint: Joint, build: Callable[[Joint, Sequence[Any]], Traced], inputs: Sequence[Any]
    ) -> None:
        self._graphs: SizedGraphs | None = None
        if input_sizes(joint.graph.graph):
            self._graphs = SizedGraphs(joint, lambda own, *_: build(own, _captured_inputs(own)))
            sizes = self._graphs.captured
            traced = self._graphs.traced_at(sizes)
        else:
            sizes, traced = (), build(joint, inputs)
        self._counts = _sizes_of_tensors(joint)
        self.input_names = tuple(node.name for node in joint.graph.graph.find_nodes(op="placeholder"))
        self.first = SizedPiece(self, traced, sizes)
        self._known = {sizes: self.first}

    def sizes(self, arguments: Sequence[Any]) -> Limits:
        """The sizes of inputs that vary. Numbers that are the size of no tensor are as they were captured."""
        given = zip(self._counts, self.step.sizes(arguments), self.first.sizes, strict=True)
        return tuple(size if counts else captured for counts, size, captured in given)

    def at(self, sizes: Limits) -> "SizedPiece":
        """The piece at these sizes."""
        if sizes not in self._known:
            assert self._graphs is not None
            self._known[sizes] = SizedPiece(self, self._graphs.traced_at(sizes), sizes)
        return self._known[sizes]

    def serving(self, sizes: Limits) -> "SizedPiece | None":
        """The piece at the least known sizes that are not below these; None if it has other operators there."""
        larger = [piece for piece in self._known.values() if piece.serves(sizes)]
        if larger:
            return min(larger, key=lambda piece: piece.size_bytes)
        try:
            return self.at(sizes)
        except TraceError:
            return None


def _sizes_of_tensors(joint: Joint) -> list[bool]:
    """For each number among the inputs whether the size of a tensor depends on it. A counter takes no memory."""
    found: set[Any] = set()
    for node in joint.graph.graph.nodes:
        for item in pytree.tree_leaves(node.meta.get("val")):
            sizes: Any = item.shape if isinstance(item, torch.Tensor) else ()
            found.update(*(expression(size).free_symbols for size in sizes if isinstance(size, torch.SymInt)))
    return [symbol in found for symbol in input_sizes(joint.graph.graph)]


def _is_trained(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _captured_inputs(joint: Joint) -> list[Any]:
    """Inputs without memory, as a joint graph was captured with."""
    inputs = joint.graph.graph.find_nodes(op="placeholder")
    return [node.meta["val"] for node in inputs if not is_tangent(node)]


@dataclass(eq=False)
class SizedPiece:
    """A captured piece at some sizes of its inputs, and its programs by the steps that they run.

    They serve all sizes that are not larger.
    """

    captured: CapturedPiece
    traced: Traced
    sizes: Limits = ()
    _versions: dict[tuple[Step, ...], Version] = field(default_factory=dict)

    def version(self, steps: tuple[Step, ...]) -> Version:
        """The programs that run some steps."""
        if steps not in self._versions:
            self._versions[steps] = self.captured.step.exchange(*lower(self.traced, steps))
        return self._versions[steps]

    @cached_property
    def size_bytes(self) -> int:
        """The size of all its values."""
        return sum(value.size_bytes for value in self.traced.graph.values)

    def serves(self, sizes: Limits) -> bool:
        """True if its programs are for inputs of these sizes, too."""
        return all(map(le, sizes, self.sizes))

    def serves_as(self, other: "SizedPiece") -> bool:
        """True if the other's steps also run this piece, in no more memory."""
        smaller = self.size_bytes <= other.size_bytes
        return self is other or (smaller and self.traced.graph.structure == other.traced.graph.structure)

    def carried_over(self, steps: tuple[Step, ...], other: "SizedPiece") -> tuple[Step, ...] | None:
        """Another piece's steps on this one, which has the same structure; None if they can't run.

        Which derived operators and implementations there are depends on layouts, too: they are found by name.
        """
        ours, theirs = self.traced.graph, other.traced.graph
        carried = []
        for index, choice in steps:
            planned = theirs.operators[index]
            at = ours.by_name.get(planned.name)
            names = [] if at is None else [item.name for item in ours.operators[at].implementations]
            if at is None or planned.implementations[choice].name not in names:
                return None
            carried.append((at, names.index(planned.implementations[choice].name)))
        try:
            check_legal(ours, carried)
        except IllegalSchedule:
            return None
        return tuple(carried)

    def gradient_values(self, positions: Sequence[int]) -> dict[int, int]:
        """The values of its graph that are gradients of inputs, by the inputs' positions."""
        joint = self.traced.joint
        results = flat_outputs(joint.graph)
        delivered = {
            ref.node: ref.value
            for operator in self.traced.graph.operators
            if operator.family == DELIVERY and operator.implementations[0].call is not None
            for ref in operator.implementations[0].call.tensors()
        }
        found = {}
        for at in positions:
            node = results[joint.forward_outputs + at]
            value = None if node is None else delivered.get(node.name)
            if value is not None:
                found[at] = value
        return found

    @property
    def output_bytes(self) -> dict[int, int]:
        """Sizes of the values of its graph that are outputs."""
        values = self.traced.graph.values
        return {index: value.size_bytes for index, value in enumerate(values) if value.kind is ValueKind.OUTPUT}

    def held_outputs(self, sizes: Collection[int]) -> frozenset[int]:
        """The outputs of some sizes in bytes; all, if there is none of one of them."""
        known = self.output_bytes
        unknown = not set(sizes) <= set(known.values())
        return frozenset(index for index, size in known.items() if unknown or size in sizes)

    def unsaved(self, inputs: Sequence[Any]) -> set[int]:
        """Positions of inputs that plain training does not save: they may change before the backward part.

        So may frozen weights (a teacher's, which follow those of its student).
        """
        nodes = self.traced.joint.graph.graph.find_nodes(op="placeholder")
        saved = {
            ref.node
            for operator in self.traced.graph.operators
            if operator.phase is Phase.BACKWARD and (call := operator.implementations[0].call) is not None
            for ref in call.tensors()
        }
        return {
            at
            for at, item in enumerate(inputs)
            if isinstance(item, torch.Tensor) and not _is_trained(item) and nodes[at].name not in saved
        }

    def readers(self, inputs: Collection[int], outputs: bool = False) -> frozenset[int]:
        """The forward operators that read some inputs, by position, or any output."""
        graph, nodes = self.traced.graph, self.traced.joint.graph.graph.find_nodes(op="placeholder")
        names = {nodes[at].name for at in inputs}
        handed_on = self.output_bytes.keys()
        return frozenset(
            index
            for index, operator in enumerate(graph.operators)
            if operator.phase is Phase.FORWARD and (call := operator.implementations[0].call) is not None
            if any(ref.node in names or (outputs and ref.value in handed_on) for ref in call.tensors())
        )

    def readers_of_outputs(self) -> frozenset[tuple[int, str]]:
        """The implementations of backward operators that read an output, where the default ones don't."""
        graph = self.traced.graph
        handed_on = self.output_bytes.keys()
        return frozenset(
            (index, item.name)
            for index, operator in enumerate(graph.operators)
            if operator.phase is Phase.BACKWARD and operator.family != LOSS
            for item in operator.implementations[1:]
            if not handed_on.isdisjoint(item.reads)
        )
