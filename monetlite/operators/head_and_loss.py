"""The head of a language model and its loss in a captured graph, which become one kernel that runs in tiles.

`tile_loss` finds head and loss in a captured graph: a matrix product, element-wise operators with numbers (a soft
cap, a scale, a conversion), and the cross-entropy of the result. Where the model leaves out some of the logits (the
last of each sequence), their targets are ignored ones instead. Where it divides the loss by a number that is known
in the forward pass (of items), the gradients are made of that quotient: scaled by one afterwards, they are not
rounded once more.
"""

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monetlite.fx import storages
from monetlite.fx.call_encoding import fake_mode
from monetlite.fx.torch_internals.torch_aot import is_tangent
from monetlite.operators.cross_entropy import cross_entropy_backward
from monetlite.operators.tiled_loss import BY_CLASS, BY_FEATURE, MEAN, SUM, linear_cross_entropy

_VIEWS = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.detach.default",
        "aten.alias.default",
        "aten.clone.default",
    }
)
"""Views, and copies, which have the same rows."""
_SLICE, _SLICE_BACK = "aten.slice.Tensor", "aten.slice_backward.default"
_PRODUCTS = {"aten.mm.default": (0, 1, None), "aten.addmm.default": (1, 2, 0)}
"""Positions of rows, matrix and bias."""
_TRANSPOSE = "aten.t.default"
_BY_NUMBER = {"aten.mul.Tensor": "mul", "aten.div.Tensor": "div"}


@dataclass
class _HeadAndLoss:
    """The kernels of a head and its loss, and what they read and make.

    Attributes:
        product: makes the logits.
        steps: between the logits and the loss; `slice` is one of them.
        scales: of the loss, as `linear_cross_entropy` takes them; incoming: the gradient of what comes of them.
        before: the node that all of this has to stand before.
        inside: all nodes that go.
        rows, matrix, bias: nodes that make the gradients.
    """

    product: fx.Node
    steps: list[tuple[str, Any]]
    scales: list[tuple[str, Any]]
    incoming: Any
    before: fx.Node
    inside: set[fx.Node] = field(default_factory=set)
    rows: fx.Node | None = None
    matrix: fx.Node | None = None
    order: str | None = None
    bias: fx.Node | None = None


def has_loss_of_rows(graph: fx.Graph) -> bool:
    """True if a graph may have what `tile_loss` replaces."""
    targets = {str(node.target) for node in graph.nodes}
    return {"aten.nll_loss_forward.default", "aten._log_softmax.default"} <= targets


def tile_loss(graph: fx.Graph) -> None:
    """Replace heads with their losses, in a graph that `operators.merge` has been through, by one kernel each."""
    for node in list(graph.nodes):
        if node.target is cross_entropy_backward and (found := _find(node, _Order(graph))) is not None:
            _replace(graph, node, found)


class _Order:
    """The order of a graph's nodes, and those that depend on gradients of outputs."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: number for number, node in enumerate(graph.nodes)}
        self.backward: set[fx.Node] = set()
        for node in graph.nodes:
            if is_tangent(node) or not self.backward.isdisjoint(node.all_input_nodes):
                self.backward.add(node)

    def is_before(self, node: fx.Node, other: fx.Node) -> bool:
        """True for a node of the forward pass before another node."""
        return node not in self.backward and self.position[node] < self.position[other]


def _find(backward: Any, order: _Order) -> _HeadAndLoss | None:
    """The head and the loss that a gradient is of; None if they have another form, or something else reads them."""
    _, probabilities, target, _, reduction, _, total, *_ = backward.args
    softmax, loss = storages.base(probabilities), total.args[0]
    if str(softmax.target) != "aten._log_softmax.default" or softmax.args[2] or reduction not in (MEAN, SUM):
        return None
    if target.meta["val"].dim() != 1 or storages.base(loss.args[0]) is not softmax:
        return None
    steps: list[tuple[str, Any]] = []
    node: Any = softmax.args[0]
    forward = {softmax, loss}
    while str(node.target) not in _PRODUCTS:
        step = _step(node)
        if step is None:
            return None
        if step[0] == "slice" and any(name == "slice" for name, _ in steps):
            return None
        forward.add(node)
        steps += [step] if step[0] else []
        node = node.args[0]
    if node.meta["val"].dtype == torch.float16:  # gradients would vanish before they are scaled
        return None
    readers = [user for item in loss.users if item.args[1] == 0 for user in item.users]
    before = min((backward, *readers), key=order.position.__getitem__)
    incoming, scales = _scales(backward.args[0], before, order)
    found = _HeadAndLoss(product=node, steps=steps[::-1], scales=scales, incoming=incoming, before=before)
    return found if not node.kwargs and _encloses(found, forward, backward, total) else None


def _scales(incoming: Any, before: fx.Node, order: _Order) -> tuple[Any, list[tuple[str, Any]]]:
    """The gradient of the scaled loss, and the scales that are known before a node, the last one first."""
    scales: list[tuple[str, Any]] = []
    while str(incoming.target) in _BY_NUMBER and len(incoming.args) == 2 and not incoming.kwargs:
        inner, by = incoming.args
        is_number = isinstance(by, (int, float)) or (
            isinstance(by, fx.Node)
            and isinstance(by.meta.get("val"), torch.Tensor)
            and by.meta["val"].dim() == 0
            and order.is_before(by, before)
        )
        if inner not in order.backward or not is_number:
            break
        scales.append((_BY_NUMBER[str(incoming.target)], by))
        incoming = inner
    return incoming, scales[::-1]  # as the backward pass applies them, for the same rounding


def _step(node: Any) -> tuple[str, Any] | None:
    """The step that a node between logits and loss is: ("", None) for a view of rows; None if it isn't known."""
    name = str(node.target)
    if node.op != "call_function":
        return None
    if name in _VIEWS and node.kwargs.get("memory_format", torch.contiguous_format) is torch.contiguous_format:
        same = node.meta["val"].shape[-1:] == node.args[0].meta["val"].shape[-1:]
        return ("", None) if same else None
    if name == _SLICE:
        return _slice(node, node.args[0].meta["val"].shape, *node.args[1:])
    if name == _SLICE_BACK:
        return _slice(node, node.meta["val"].shape, *node.args[2:])
    if name in _BY_NUMBER and isinstance(node.args[1], (int, float)):
        return _BY_NUMBER[name], float(node.args[1])
    if name == "aten.tanh.default":
        return "tanh", None
    if name == "aten._to_copy.default" and not {"memory_format", "non_blocking"} & set(node.kwargs):
        here, before = node.meta["val"], node.args[0].meta["val"]
        if here.device == before.device and here.is_floating_point():
            return "to", str(here.dtype).removeprefix("torch.")
    return None


def _slice(
    node: Any, shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[str, Any] | None:
    """The step that leaves out some logits, by the dimension and the numbers left out before and after."""
    dim, start, end = dim % len(shape), start or 0, sys.maxsize if end is None else end
    if node.kwargs or dim == len(shape) - 1 or step != 1 or {type(start), type(end)} != {int}:
        return None  # numbers that vary with the sizes among them
    if start < 0 or 0 <= end < shape[dim]:
        return None
    return "slice", (tuple(shape[:-1]), dim, start, -end if end < 0 else 0)


def _encloses(found: _HeadAndLoss, forward: set[fx.Node], backward: fx.Node, total: fx.Node) -> bool:
    """Find all that depends on the logits; False if that is more than the loss and gradients for the head."""
    waiting, seen = [found.product], {found.product}
    rows_at, matrix_at, _ = _PRODUCTS[str(found.product.target)]
    rows, matrix = found.product.args[rows_at], found.product.args[matrix_at]
    ends: list[fx.Node] = []
    while waiting:
        node = waiting.pop()
        found.inside.add(node)
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            name = str(user.target)
            if user in forward or user is backward or user is total:
                waiting.append(user)
            elif storages.is_item(user) and user.args[1] == 0 and user.args[0] in forward:
                continue  # the loss
            elif name in ("aten.mm.default", "aten.sum.dim_IntList"):
                ends.append(user)
            elif name == "aten.tanh_backward.default" or name == _TRANSPOSE or _step(user) is not None:
                waiting.append(user)
            else:
                return False
    return all(_is_gradient(found, end, backward, rows, matrix) for end in ends) and bool(
        found.rows or found.matrix
    )


def _is_gradient(found: _HeadAndLoss, end: Any, backward: fx.Node, rows: Any, matrix: Any) -> bool:
    """Note the gradient that a kernel makes of the logits' own; False if it is something else."""
    made, logits = end.meta["val"].shape, found.product.meta["val"].shape
    slope, *others = end.args
    if str(end.target) == "aten.sum.dim_IntList":
        fits = list(others[0]) == [0] and made == (1, logits[1]) and found.bias is None
        found.bias = end
    elif slope in found.inside and slope.meta["val"].shape == logits:
        fits = found.rows is None and _is_transpose(others[0], matrix)
        found.rows = end
    elif others[0] is rows:
        fits = found.matrix is None and slope.meta["val"].shape == logits[::-1]
        found.matrix, found.order = end, BY_CLASS
    else:
        left, slope = end.args
        fits = found.matrix is None and slope.meta["val"].shape == logits and _is_transpose(left, rows)
        found.matrix, found.order = end, BY_FEATURE
    return bool(fits) and _taken_back(slope, backward) == _expected(found)


def _expected(found: _HeadAndLoss) -> list[tuple[str, Any]]:
    """The steps that take the gradient of the loss back to the logits."""
    steps, dtype = [], str(found.product.meta["val"].dtype).removeprefix("torch.")
    for name, value in found.steps:
        steps.append((name, dtype if name == "to" else value))
        dtype = value if name == "to" else dtype
    return steps[::-1]


def _taken_back(node: Any, backward: fx.Node) -> list[tuple[str, Any]] | None:
    """The steps from the gradient of a loss to a node; None if there are others, such as a hook's."""
    steps: list[tuple[str, Any]] = []
    while node is not backward:
        if str(node.target) == "aten.tanh_backward.default":
            steps.append(("tanh", None))
        elif str(node.target) != _TRANSPOSE:
            step = _step(node)
            if step is None:
                return None
            steps += [step] if step[0] else []
        node = node.args[0]
    return steps[::-1]


def _is_transpose(node: Any, other: Any) -> bool:
    """True if two nodes are a matrix and its transpose."""
    here, there = node.meta["val"], other.meta["val"]
    return (
        storages.base(node) is storages.base(other)
        and (here.shape, here.stride()) == (there.shape[::-1], there.stride()[::-1])
        and here.storage_offset() == there.storage_offset()
    )


def _replace(graph: fx.Graph, backward: Any, found: _HeadAndLoss) -> None:
    _, _, target, weight, reduction, ignore_index, total, *_ = backward.args
    loss: Any = total.args[0]
    steps = [step for step in found.steps if step[0] != "slice"]
    if len(steps) < len(found.steps):
        target = _ignoring(graph, found, target, ignore_index)
    rows, matrix, bias = (
        None if at is None else found.product.args[at] for at in _PRODUCTS[str(found.product.target)]
    )
    wanted = (found.rows is not None, found.order, found.bias is not None)
    args: tuple[Any, ...] = (rows, matrix, bias, target, weight, reduction, ignore_index, tuple(steps), wanted, 1)
    args = (*args, tuple(found.scales)) if found.scales else args
    made = [found.rows, found.matrix, found.bias]
    with graph.inserting_before(found.before):
        fused = graph.call_function(linear_cross_entropy, args)
        fused.meta.update(loss.meta)
        items = [graph.call_function(operator.getitem, (fused, at)) for at in range(4)]
    with fake_mode(loss):
        gradients = [None if node is None else torch.empty_like(node.meta["val"]) for node in made]
        fused.meta["val"] = (torch.empty_like(loss.meta["val"][0]), *gradients)
    for item, value in zip(items, fused.meta["val"], strict=True):
        item.meta.update({**loss.meta, "val": value})
    for user in list(loss.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(items[0])
    for item, node in zip(items[1:], made, strict=True):
        if node is None:
            graph.erase_node(item)
            continue
        with graph.inserting_before(node):
            scaled = graph.call_function(torch.ops.aten.mul.Tensor, (item, found.incoming))
        scaled.meta.update(node.meta)
        node.replace_all_uses_with(scaled)
    gone = found.inside | set(loss.users) | {node for node in made if node is not None}
    for node in reversed(list(graph.nodes)):
        if node in gone:
            graph.erase_node(node)


def _ignoring(graph: fx.Graph, found: _HeadAndLoss, target: fx.Node, ignore_index: int) -> fx.Node:
    """Targets for all logits, of targets for those that are not left out: the others are ignored."""
    _, dim, first, last = next(value for name, value in found.steps if name == "slice")
    (back,) = (node for node in found.inside if str(node.target) == _SLICE_BACK)
    sizes_of_logits: Any = back.args[1]
    *shape, _ = sizes_of_logits  # where sizes vary, they are so here, and plain numbers in `meta`
    sizes = [size - first - last if at == dim else size for at, size in enumerate(shape)]
    padding = [0, 0] * (len(shape) - 1 - dim) + [first, last]
    with graph.inserting_before(found.before):
        for function, *args in (
            (torch.ops.aten.view.default, sizes),
            (torch.ops.aten.constant_pad_nd.default, padding, ignore_index),
            (torch.ops.aten.view.default, [math.prod(shape)]),
        ):
            made = graph.call_function(function, (target, *args))
            with fake_mode(target):
                made.meta.update({**target.meta, "val": function(target.meta["val"], *args)})
            target = made
    return target
