"""The step of a partition: what `torch.compile`'s partitioner makes of a joint graph for the nodes that it keeps.

The forward program runs the nodes that its results and the kept ones need. The backward program runs in the order
of the joint graph; what it lacks of the forward part is computed again right before it is first read, as torch
reorders it (`reordering_to_mimic_autograd_engine`). Both are one operator graph here, so `simulate` has their
memory.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monetlite.core.costs import without_costs
from monetlite.core.errors import TraceError
from monetlite.core.graph import (
    LOSS_ONLY,
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    Resident,
    Value,
    ValueKind,
)
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.fx import storages
from monetlite.fx.torch_internals.torch_aot import is_gradient_output, is_tangent
from monetlite.fx.torch_internals.torch_pytree import tensors_among


@dataclass(kw_only=True)
class PartitionedStep:
    """The operators of a partition.

    Args:
        joint_graph: of forward and backward. kept: nodes that the backward program gets of the forward one.
        outputs: what the caller holds, as in `compile_within`.
    """

    joint_graph: fx.Graph
    kept: Sequence[fx.Node]
    outputs: str = LOSS_ONLY
    _values: list[Value] = field(default_factory=list)
    _operators: list[Operator] = field(default_factory=list)

    def peak_bytes(self) -> int:
        """Peak of the step: arguments, what is kept, results and gradients; without workspaces.

        Raises:
            TraceError: a size that varies.
        """
        graph = self.joint_graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.resident = {storages.base(node) for node in placeholders if not is_tangent(node)}
        results: Any = graph.output_node().args[0]
        described = graph.output_node().meta.get("desc") or [None] * len(results)
        tensors = [
            (node, is_gradient_output(item))
            for node, item in zip(results, described, strict=True)
            if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
        ]
        outputs = [node for node, last in tensors if not last]
        gradients = [node for node, last in tensors if last]
        returned = {storages.base(node) for node in outputs}
        self._held = returned
        if self.outputs == LOSS_ONLY and any(node.meta["val"].dim() == 0 for node in outputs):
            self._held = {storages.base(node) for node in outputs if node.meta["val"].dim() <= 2}
        self._grown = {storages.base(node) for node in gradients}
        known: dict[fx.Node, int] = {}
        self._add(self._needed([*outputs, *self.kept], ()), known, Phase.FORWARD)
        stays = {storages.base(node) for node in self.kept}
        back = {node: number for node, number in known.items() if node in stays}
        tangents = [node for node in placeholders if is_tangent(node)]
        writes = tuple(self._value(node, ValueKind.GRADIENT) for node in tangents)
        back.update(zip(tangents, writes, strict=True))
        reads = tuple(known[node] for node in sorted(returned, key=str) if node in known)
        self._operator("loss", reads, writes, Phase.BACKWARD)
        self._add(self._backward(gradients), back, Phase.BACKWARD)
        made = OperatorGraph(
            name="partition",
            operators=tuple(self._operators),
            values=tuple(self._values),
            resident=Resident(inputs=sum(map(stored_bytes, self.resident))),
        )
        return simulate(without_costs(made), plain_steps(made)).peak_bytes

    def _needed(self, wanted: Iterable[fx.Node], given: Collection[fx.Node]) -> list[fx.Node]:
        """The nodes that some take, in order, up to those that are given."""
        found = storages.ancestors(wanted, given.__contains__)
        return [node for node in self.joint_graph.nodes if node in found]

    def _backward(self, gradients: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes of the backward program in its order."""
        given = set(self.kept)
        needed = self._needed(gradients, given)
        inside = set(needed)
        order = {node: at for at, node in enumerate(self.joint_graph.nodes)}
        users = (user for node in needed if is_tangent(node) for user in node.users if user in inside)
        first = min((order[user] for user in users), default=0)
        placed: dict[fx.Node, None] = {}
        for node in (item for item in needed if order[item] >= first):
            missing = storages.ancestors([node], lambda item: item in placed or item not in inside)
            placed.update(dict.fromkeys(sorted(missing, key=order.__getitem__)))
        return list(placed)

    def _add(self, nodes: Iterable[fx.Node], known: dict[fx.Node, int], phase: Phase) -> None:
        """Add the kernels among nodes. `known` has the value of each storage, and gets those that they make."""
        for node in nodes:
            if not storages.is_kernel(node):
                continue
            made = [item for item in storages.results(node) if item is not None]
            read = {storages.base(item) for item in node.all_input_nodes}
            reads = tuple(sorted({known[item] for item in read if item in known}))
            writes = tuple(self._value(item, self._kind(item, phase)) for item in made)
            known.update(zip(made, writes, strict=True))
            self._operator(f"{node.name}.{phase}", reads, writes, phase)

    def _kind(self, node: fx.Node, phase: Phase) -> ValueKind:
        if phase is Phase.FORWARD:
            return ValueKind.OUTPUT if node in self._held else ValueKind.ACTIVATION
        return ValueKind.PARAM_GRAD if node in self._grown else ValueKind.GRADIENT

    def _value(self, node: fx.Node, kind: ValueKind) -> int:
        name = f"{node.name}.{len(self._values)}"
        self._values.append(Value(name=name, kind=kind, size_bytes=stored_bytes(node)))
        return len(self._values) - 1

    def _operator(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], phase: Phase) -> None:
        way = Implementation(name="default", reads=reads, writes=writes)
        self._operators.append(
            Operator(name=name, family="node", phase=phase, implementations=(way,), rerunnable=False)
        )


def stored_bytes(node: fx.Node) -> int:
    """Bytes of the storages of a node's results."""
    sizes = [item.untyped_storage().nbytes() for item in tensors_among(node.meta.get("val"))]
    if not all(isinstance(size, int) for size in sizes):
        raise TraceError(f"{node.name} has a size that varies; compile for fixed sizes (dynamic=False)")
    return sum(sizes)
