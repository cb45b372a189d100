"""A graph that TorchDynamo has captured of a model that it takes apart."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import DELIVERY, LOSS, Phase, ValueKind
from monetlite.core.steps import Step, check_legal
from monetlite.runtime.gradient_delivery import CapturedStep, Version
from monetlite.runtime.lowering import lower
from monetlite.tracing.operator_graph import Traced


@dataclass(eq=False)
class CapturedPiece:
    """A graph that TorchDynamo has captured, and its programs by the steps they run."""

    traced: Traced | None = None
    step: CapturedStep | None = None
    versions: dict[tuple[Step, ...] | None, Version] = field(default_factory=dict)

    def version(self, steps: tuple[Step, ...] | None) -> Version:
        """Its programs for some steps; None for those that store least."""
        assert self.step is not None
        assert self.traced is not None
        if steps not in self.versions:
            made = self.step.current if steps is None else self.step.exchange(*lower(self.traced, steps))
            self.versions[steps] = made
        return self.versions[steps]

    def serves_as(self, other: "CapturedPiece") -> bool:
        """True if the other's steps also run this piece, in no more memory."""
        assert self.traced is not None
        assert other.traced is not None
        ours, theirs = self.traced.graph, other.traced.graph
        if self is other:
            return True
        smaller = sum(value.size_bytes for value in ours.values) <= sum(value.size_bytes for value in theirs.values)
        return smaller and ours.structure == theirs.structure

    def carried_over(self, steps: tuple[Step, ...], other: "CapturedPiece") -> tuple[Step, ...] | None:
        """Another piece's steps on this one, which has the same structure; None if they can't run.

        Which derived operators and implementations there are depends on layouts, too: they are found by name.
        """
        assert self.traced is not None
        assert other.traced is not None
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
        assert self.traced is not None
        joint = self.traced.joint
        results: Any = joint.graph.graph.output_node().args[0]
        delivered = {
            ref.node: ref.value
            for operator in self.traced.graph.operators
            if operator.family == DELIVERY and operator.implementations[0].call is not None
            for ref in operator.implementations[0].call.tensors()
        }
        found = {}
        for at in positions:
            node = results[joint.forward_outputs + at]
            value = delivered.get(node.name) if isinstance(node, fx.Node) else None
            if value is not None:
                found[at] = value
        return found

    @property
    def output_bytes(self) -> dict[int, int]:
        """Sizes of the values of its graph that are outputs."""
        assert self.traced is not None
        values = self.traced.graph.values
        return {index: value.size_bytes for index, value in enumerate(values) if value.kind is ValueKind.OUTPUT}

    def held_outputs(self, sizes: Collection[int]) -> frozenset[int]:
        """The outputs of some sizes in bytes; all, if there is none of one of them."""
        known = self.output_bytes
        unknown = not set(sizes) <= set(known.values())
        return frozenset(index for index, size in known.items() if unknown or size in sizes)

    def unsaved(self, inputs: Sequence[Any]) -> set[int]:
        """Positions of inputs that plain training does not save: they may change before the backward part."""
        assert self.traced is not None
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
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) and nodes[at].name not in saved
        }

    def readers(self, inputs: Collection[int], outputs: bool = False) -> frozenset[int]:
        """The forward operators that read some inputs, by position, or any output."""
        assert self.traced is not None
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
        assert self.traced is not None
        graph = self.traced.graph
        handed_on = self.output_bytes.keys()
        return frozenset(
            (index, item.name)
            for index, operator in enumerate(graph.operators)
            if operator.phase is Phase.BACKWARD and operator.family != LOSS
            for item in operator.implementations[1:]
            if not handed_on.isdisjoint(item.reads)
        )
