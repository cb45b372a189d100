"""Storages of a captured graph: the kernel that makes each, and the tensors that are views of it.

A view shares the storage of its base. Only operators that compute something make storages. The graph of operators
and values is made of those, and views are rebuilt where they are read.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.fx.torch_internals.torch_aot import descriptors, is_tangent
from monetlite.fx.torch_internals.torch_dispatch import OpOverload, schema_of, storage_key
from monetlite.fx.torch_internals.torch_pytree import tensors_among

_UNANNOTATED_VIEWS = frozenset(
    {"aten._unsafe_view.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"}
)
"""Operators whose results share their input's storage though their schema does not say so."""


def is_view(node: fx.Node) -> bool:
    """True for a call that returns (a list of) views of its first tensor argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if str(target) in _UNANNOTATED_VIEWS:
        return True
    returns = schema_of(target).returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def is_item(node: fx.Node) -> bool:
    """True for a node that takes one of the results of another."""
    return node.op == "call_function" and node.target is operator.getitem


def is_kernel(node: fx.Node) -> bool:
    """True for a node that computes something: no input, no view, and no item of another's results."""
    return node.op == "call_function" and not is_item(node) and not is_view(node)


def base(node: fx.Node) -> fx.Node:
    """The tensor node whose storage a tensor node is (a view of): an input, a kernel, or an item of a kernel."""
    while True:
        if is_view(node):
            node = node.all_input_nodes[0]
        elif is_item(node) and is_view(producer := node.all_input_nodes[0]):
            node = producer.all_input_nodes[0]
        else:
            return node


def kernel_of(node: fx.Node) -> fx.Node:
    """The kernel (or input) that writes the storage of a tensor node."""
    made = base(node)
    return made.all_input_nodes[0] if is_item(made) else made


def results(kernel: fx.Node) -> tuple[fx.Node | None, ...]:
    """A kernel's results by position: itself, or the items taken of it (None where nobody takes one)."""
    made = kernel.meta.get("val")
    if made is None:
        return ()
    if isinstance(made, torch.Tensor):
        return (kernel,)
    items = {user.args[1]: user for user in kernel.users if is_item(user)}
    return tuple(items.get(index) for index in range(len(made)))


def shares_storage(kernel: fx.Node) -> bool:
    """True for a kernel with a result in the storage of an operand, or of another result."""
    operands = {storage for node in kernel.all_input_nodes for storage in _captured_in(node)}
    made = _captured_in(kernel)
    return not operands.isdisjoint(made) or len(set(made)) < len(made)


def _captured_in(node: fx.Node) -> list[int]:
    return list(map(storage_key, tensors_among(node.meta.get("val"))))


def storage_bytes(node: fx.Node) -> int:
    """Size of the storage behind a base tensor, in bytes."""
    return int(node.meta["val"].untyped_storage().nbytes())


@dataclass(frozen=True)
class Reachability:
    """The nodes that outputs of a joint graph need, and those that depend on gradients of outputs."""

    graph: fx.Graph
    forward_outputs: int
    effects: frozenset[fx.Node] = frozenset()
    """Kernels that run even where nobody reads what they make: they move the random number generator on, or check
    what the model asserts."""
    late_effects: frozenset[fx.Node] = frozenset()
    """Those of them that autograd runs in the backward pass, whatever they read."""

    @cached_property
    def output(self) -> list[fx.Node | None]:
        flat = self.graph.output_node().args[0]
        assert isinstance(flat, (list, tuple))
        return [item if isinstance(item, fx.Node) else None for item in flat]

    @cached_property
    def primals(self) -> list[fx.Node]:
        """Inputs of the forward pass: parameters, buffers and arguments."""
        return [node for node in self.graph.nodes if node.op == "placeholder" and not is_tangent(node)]

    @cached_property
    def gradients(self) -> list[tuple[fx.Node, fx.Node]]:
        """Each gradient, and the input that it is of.

        Raises:
            TraceError: it is of a tensor subclass, which is made of several inputs.
        """
        inputs = {node.meta["desc"]: node for node in self.primals}
        described = self.graph.output_node().meta["desc"]
        found = []
        for node, item in zip(self.output[self.forward_outputs :], described[self.forward_outputs :], strict=True):
            if node is not None:
                if getattr(item, "grad_of", None) not in inputs:
                    raise TraceError(
                        "a gradient is of a tensor subclass, such as a DTensor (tensor parallelism, FSDP2 in the "
                        "model), which is made of several tensors. Plan parts of the model that have none: "
                        "model.part = MONeTWrapper(model.part, ...). FSDP2 goes around a part with a plan: "
                        "fully_shard(MONeTWrapper(block, ...))"
                    )
                found.append((node, inputs[item.grad_of]))
        return found

    @cached_property
    def updates(self) -> dict[int, fx.Node]:
        """Positions of outputs that are new contents of an input (running statistics), with that input."""
        output = self.graph.output_node()
        inputs = {node.meta["desc"]: node for node in self.graph.nodes if node.op == "placeholder"}
        return {
            at: inputs[item.mutated_input]
            for at, item in enumerate(output.meta["desc"])
            if isinstance(item, descriptors.InputMutationAOTOutput) and item.mutated_input in inputs
        }

    @cached_property
    def mutated(self) -> set[fx.Node]:
        """Inputs that the step changes in place: read again, they have other contents."""
        return set(self.updates.values())

    @cached_property
    def shared(self) -> set[fx.Node]:
        """Inputs that have a gradient and that the step changes in place or returns a view of.

        Operations on such a tensor or view after the step go into the gradient, too. AOTAutograd sees to that, with
        the very tensors that it is called with.
        """
        seen = {base(node) for node in self.output[: self.forward_outputs] if node is not None}
        return {node for _, node in self.gradients} & (self.mutated | seen)

    @property
    def takes_arguments(self) -> bool:
        """True if the inputs are the step's arguments, one by one.

        They are not where an argument that is changed shares its storage with another, or is made of several
        tensors (as quantised weights are).
        """
        given = [node.meta["desc"] for node in self.primals]
        plain = all(
            isinstance(item, (descriptors.BufferAOTInput, descriptors.ParamAOTInput, descriptors.PlainAOTInput))
            for item in given
        )
        return plain and all(getattr(item, "idx", at) == at for at, item in enumerate(given))

    @cached_property
    def needed(self) -> set[fx.Node]:
        """Nodes that some output depends on, or the generator's state."""
        return ancestors([*(node for node in self.output if node is not None), *self.effects])

    @cached_property
    def forward(self) -> set[fx.Node]:
        """Nodes that a result of the forward pass depends on, or the state that it leaves the generator in."""
        results = [node for node in self.output[: self.forward_outputs] if node is not None]
        return ancestors([*results, *(self.effects - self.backward)])

    @cached_property
    def backward(self) -> set[fx.Node]:
        """Nodes that depend on the gradient of an output, or on what is drawn only then."""
        return after_gradients(self.graph, self.late_effects)


def after_gradients(graph: fx.Graph, others: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Nodes that depend on gradients of outputs, or on other nodes."""
    found = set(others)
    for node in graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def ancestors(roots: Iterable[fx.Node], ends: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """Nodes that some are made from, and themselves; without those that it ends at."""
    found: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found and not ends(node):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
