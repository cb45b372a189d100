"""The gradient of a language model's loss in a captured graph, and the single number that it is linear in.

What is done with the loss, up to a single number, must be linear in it and known in the forward pass: a division by
the number of items, the weights and the mean of losses that were not reduced, the two parts of a smoothed loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from monetlite.fx import storages
from monetlite.operators.cross_entropy import cross_entropy_backward
from monetlite.operators.random import is_random

_LINEAR = frozenset(
    f"aten.{name}"
    for name in (
        *("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar", "neg.default"),
        *("expand.default", "view.default", "unsqueeze.default", "alias.default", "detach.default"),
    )
)
"""In their first operands."""
_MASKED = "aten.masked_fill.Scalar"


@dataclass(frozen=True)
class LossGradient:
    """The kernels that make the gradient of the logits.

    Attributes:
        last: the kernel that makes it.
        kernels: all of them, without those that only spread a gradient over the classes.
        slope: the gradient of the loss; of shape (rows,) without reduction.
        spread: that of the log-probabilities' sums over classes, of shape (rows,); None without label smoothing.
        of_loss: log-probabilities, target, weight, reduction, ignore_index and total, as `nll_loss_backward` takes
            them.
    """

    last: fx.Node
    kernels: frozenset[fx.Node]
    slope: fx.Node
    spread: fx.Node | None
    of_loss: tuple[Any, ...]

    @property
    def total(self) -> Any:
        """The node of the sum of the targets' weights."""
        return self.of_loss[5]


class NodeOrder:
    """The order of a graph's nodes, and those that depend on gradients of outputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: number for number, node in enumerate(graph.nodes)}
        self.backward = storages.after_gradients(graph)

    def to_move(self, node: fx.Node, before: fx.Node, late: set[fx.Node]) -> set[fx.Node] | None:
        """Nodes that have to move for a node to stand before another one, with it.

        None if something of it is late (depends on gradients or logits), or draws random numbers.
        """
        moved = storages.ancestors([node], lambda item: self.position[item] < self.position[before])
        read = {node}.union(*(item.all_input_nodes for item in moved))
        if read & late or any(item.op != "call_function" or is_random(item) for item in moved):
            return None
        return moved


def find_loss_gradient(node: Any) -> LossGradient | None:
    """The kernels whose last one a node is; None if it is another kernel."""
    if node.target is cross_entropy_backward:
        slope, *of_loss = node.args[:7]
        return LossGradient(node, frozenset({node}), slope, None, tuple(of_loss))
    if str(node.target) != "aten._log_softmax_backward_data.default" or not isinstance(node.args[0], fx.Node):
        return None
    added, probabilities, dim, _ = node.args
    shape = probabilities.meta["val"].shape
    if str(added.target) != "aten.add.Tensor" or len(added.args) != 2 or added.kwargs or len(added.users) != 1:
        return None
    if len(shape) != 2 or dim not in (1, -1):
        return None
    for spread, loss in (added.args, added.args[::-1]):
        if not isinstance(spread, fx.Node) or not isinstance(loss, fx.Node):
            continue
        if str(loss.target) != "aten.nll_loss_backward.default" or len(loss.users) != 1:
            continue
        given: tuple[Any, ...] = loss.args
        column: Any = spread.args[0] if str(spread.target) == "aten.expand.default" else None
        if column is None or spread.meta["val"].shape != shape or str(column.target) != "aten.unsqueeze.default":
            continue
        if column.args[1] in (1, -1) and storages.base(given[1]) is storages.base(probabilities):
            kernels = frozenset({node, added, loss})
            return LossGradient(node, kernels, given[0], column.args[0], given[1:])
    return None


def linear_in(
    gradient: LossGradient, before: fx.Node, logits: Iterable[fx.Node], order: NodeOrder
) -> tuple[fx.Node, list[fx.Node], list[fx.Node]] | None:
    """The number whose gradient comes in, the nodes from it to the gradients of the loss, and what moves for them.

    The number that is nearest to the outputs: scaled by one afterwards, gradients are not rounded once more. None
    if there is no such number, or something on the way isn't linear or isn't known in the forward pass.
    """
    late = storages.after_gradients(gradient.last.graph, logits)
    chains: list[list[fx.Node]] = []
    moves: dict[fx.Node, set[fx.Node]] = {}
    for end in (gradient.slope, gradient.spread):
        if end is None:
            continue
        chain = [end]
        while (found := _operand(chain[-1], before, late, order)) is not None:
            moves[chain[-1]] = found[1]
            chain.append(found[0])
        chains.append(chain)
    shared = [node for node in chains[0] if all(node in chain for chain in chains[1:])]
    numbers = [node for node in shared if node.meta["val"].dim() == 0]
    if not numbers:
        return None
    incoming = numbers[-1]
    between = {node for chain in chains for node in chain[: chain.index(incoming)]}
    moved = set[fx.Node]().union(*(moves[node] for node in between))
    return incoming, sorted(between, key=order.position.__getitem__), sorted(moved, key=order.position.__getitem__)


def _operand(
    node: Any, before: fx.Node, late: set[fx.Node], order: NodeOrder
) -> tuple[fx.Node, set[fx.Node]] | None:
    """The operand that a node is linear in, and what moves if it is computed before a node; None if it isn't."""
    name = str(node.target)
    by_zero = name == _MASKED and node.args[2] == 0
    if (name not in _LINEAR and not by_zero) or node.kwargs or node not in order.backward:
        return None
    given = [item for item in node.all_input_nodes if item in order.backward]
    swapped = name == "aten.mul.Tensor" and node.args[1] in given
    if len(given) != 1 or node.args[1 if swapped else 0] is not given[0] or node.args.count(given[0]) != 1:
        return None
    moves: set[fx.Node] = set()
    for item in node.all_input_nodes:
        if item is not given[0]:
            found = order.to_move(item, before, late)
            if found is None:
                return None
            moves |= found
    return given[0], moves
