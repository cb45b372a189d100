"""The head of a language model and its loss in a captured graph, which become one kernel that runs in tiles.

The gradients are made in the forward pass, for a gradient of one of what becomes of the loss, and scaled in the
backward pass by the one that comes in. Where the head is in float16, the kernel scales them, too. Where the model
leaves out some of the logits, their targets are ignored ones instead.
"""

import math
import operator
from typing import Any

import torch
from torch import fx

from monetlite.fx.call_encoding import fake_mode
from monetlite.operators.head_search import SLICE_BACK, HeadAndLoss, heads_and_losses
from monetlite.operators.tiled_loss import linear_cross_entropy, multiply_scaled


def has_loss_of_rows(graph: fx.Graph) -> bool:
    """True if a graph may have what `tile_loss` replaces."""
    targets = {str(node.target) for node in graph.nodes}
    return {"aten.nll_loss_forward.default", "aten._log_softmax.default"} <= targets


def tile_loss(graph: fx.Graph) -> None:
    """Replace heads with their losses, in a graph that `operators.merge` has been through, by one kernel each."""
    for found in heads_and_losses(graph):
        _replace(graph, found)


def _replace(graph: fx.Graph, found: HeadAndLoss) -> None:
    _, target, weight, reduction, ignore_index, total = found.gradient.of_loss
    loss: Any = total.args[0]
    steps = [step for step in found.steps if step[0] != "slice"]
    if len(steps) < len(found.steps):
        target = _ignoring(graph, found, target, ignore_index)
    products = tuple(
        (*product.operands[:2], math.prod(product.numbers), product.rows is not None, product.order)
        for product in found.products
    )
    head, *adapters = found.products
    of_loss = (target, weight, reduction, ignore_index, tuple(steps))
    args: tuple[Any, ...] = (products, head.operands[2], *of_loss, head.bias is not None, 1)
    if found.linear:
        args = (*args, *_of_one(graph, found, loss))
    made = [head.rows, head.matrix, head.bias]
    for adapter in adapters:
        made += [adapter.rows, adapter.matrix]
    with fake_mode(loss):
        gradients = [None if node is None else torch.empty_like(node.meta["val"]) for node in made]
        others = [torch.empty_like(node.meta["val"]) for node in found.sums[:1]]
        if narrow := torch.float16 in {product.dtype for product in found.products}:
            others.append(total.meta["val"].new_empty((), dtype=torch.float32))
        results = (torch.empty_like(loss.meta["val"][0]), *gradients, *others)
    with graph.inserting_before(found.before):
        fused = graph.call_function(linear_cross_entropy, args)
        fused.meta.update({**loss.meta, "val": results})
        items = [graph.call_function(operator.getitem, (fused, at)) for at in range(len(results))]
    for item, value in zip(items, results, strict=True):
        item.meta.update({**loss.meta, "val": value})
    for user in list(loss.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(items[0])
    for summed in found.sums:
        summed.replace_all_uses_with(items[1 + len(made)])
    multiply: Any = torch.ops.aten.mul.Tensor
    factor = found.incoming
    if narrow:
        first = min((node for node in made if node is not None), key=list(graph.nodes).index)
        with graph.inserting_before(first), fake_mode(loss):
            factor = graph.call_function(multiply, (found.incoming, items[-1]))
            factor.meta.update({**first.meta, "val": torch.empty_like(items[-1].meta["val"])})
        multiply = multiply_scaled
    for item, node in zip(items[1 : 1 + len(made)], made, strict=True):
        if node is None:
            graph.erase_node(item)
            continue
        with graph.inserting_before(node):
            scaled = graph.call_function(multiply, (item, factor))
        scaled.meta.update(node.meta)
        node.replace_all_uses_with(scaled)
    gone = found.inside | set(loss.users) | {node for node in made if node is not None}
    for node in reversed(list(graph.nodes)):
        if node in gone:
            graph.erase_node(node)


def _of_one(graph: fx.Graph, found: HeadAndLoss, loss: fx.Node) -> list[fx.Node]:
    """The gradients of the loss, and of sums if there are any, for a gradient of one that comes in."""
    for node in found.moved:
        found.before.prepend(node)
    one = found.incoming.meta["val"]
    with graph.inserting_before(found.before):
        options = {"dtype": one.dtype, "device": one.device}
        copies = {found.incoming: graph.call_function(torch.ops.aten.full.default, ([], 1), options)}
        for node in found.linear:
            copies[node] = graph.node_copy(node, lambda item: copies.get(item, item))
    for node, copied in copies.items():
        copied.meta = {**loss.meta, "val": node.meta["val"]}
    ends = (found.gradient.slope, found.gradient.spread)
    return [copies[end] for end in ends if end is not None]


def _ignoring(graph: fx.Graph, found: HeadAndLoss, target: fx.Node, ignore_index: int) -> fx.Node:
    """Targets for all logits, of targets for those that are not left out: the others are ignored."""
    _, dim, first, last = next(value for name, value in found.steps if name == "slice")
    (back,) = (node for node in found.inside if str(node.target) == SLICE_BACK)
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
