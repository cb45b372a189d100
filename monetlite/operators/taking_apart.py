"""Batch norm and dropout in two parts, for steps whose regions are compiled.

Each has a part that must stay as it is (the statistics of the batch and the running ones; the draw of a mask), and
one that is computed element by element and belongs to a region.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from monetlite.fx.call_encoding import fake_mode
from monetlite.operators.batch_norm import along
from monetlite.operators.dropout import draws, dropout, scale_of
from monetlite.operators.implementations import function, target_of

_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_DROPOUT = "aten.native_dropout.default"


@function("batch_norm_statistics", limit="normalization", passes=2)
def batch_norm_statistics(
    source: Tensor, running_mean: Tensor, running_variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Statistics of a batch: (mean, 1/σ, the new running mean, the new running variance), each (channels,)."""
    running = running_mean.clone(), running_variance.clone()
    mean, variance = torch.ops.aten.batch_norm_update_stats.default(source, *running, momentum)
    return mean, variance.add_(eps).rsqrt_(), *running


@function("normalized", passes=1)
def normalized(source: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor) -> Tensor:
    """The normalisation of a tensor (batch, channels, …) by the statistics of its channels."""
    scale = inverse if weight is None else inverse * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    return torch.addcmul(along(shift, source), source, along(scale, source))


@function("kept_elements", random=True)
def kept_elements(shape: tuple[int, ...], stride: tuple[int, ...], probability: float) -> Tensor:
    """The elements that a dropout on the CPU keeps, as a bool tensor."""
    return torch.empty_strided(shape, stride, dtype=torch.bool).bernoulli_(1 - probability)


FUSIBLE: frozenset[Callable[..., Any]] = frozenset({normalized})
"""Functions of ours that are computed element by element."""


def take_apart(graph: fx.Graph) -> None:
    """Replace batch norms and dropouts of a captured graph by their parts."""
    for node in list(graph.nodes):
        target = target_of(node) if node.op == "call_function" else ""
        if target == _BATCH_NORM:
            _take_batch_norm_apart(graph, node)
        elif target == _DROPOUT or node.target is dropout:
            _take_dropout_apart(graph, node)


def _take_batch_norm_apart(graph: fx.Graph, node: fx.Node) -> None:
    source, weight, bias, mean, variance, training, momentum, eps = node.args
    tensors = [item.meta["val"] for item in node.all_input_nodes]
    if training is not True or any(item.dtype is not torch.float32 for item in tensors):
        return
    made = node.meta["val"]
    with graph.inserting_before(node):
        statistics = graph.call_function(batch_norm_statistics, (source, mean, variance, momentum, eps))
        items = [graph.call_function(operator.getitem, (statistics, at)) for at in range(4)]
        result = graph.call_function(normalized, (source, weight, bias, *items[:2]))
    statistics.meta = {**node.meta, "val": made[1:]}
    result.meta = {**node.meta, "val": made[0]}
    for item, value in zip(items, made[1:], strict=True):
        item.meta = {**node.meta, "val": value}
    _exchange(graph, node, [result, *items])


def _take_dropout_apart(graph: fx.Graph, node: fx.Node) -> None:
    source, probability, *training = node.args
    made, kept = node.meta["val"]
    if not draws(probability, *training) or made.device.type != "cpu" or not made.is_floating_point():
        return
    with graph.inserting_before(node):
        mask = graph.call_function(kept_elements, (tuple(kept.shape), tuple(kept.stride()), probability))
        masked = graph.call_function(torch.ops.aten.mul.Tensor, (source, mask))
        result = graph.call_function(torch.ops.aten.mul.Tensor, (masked, scale_of(node)))
    with fake_mode(node):
        masked.meta = {**node.meta, "val": torch.empty_like(made)}
    mask.meta = {**node.meta, "val": kept}
    result.meta = {**node.meta, "val": made}
    _exchange(graph, node, [result, mask])


def _exchange(graph: fx.Graph, node: fx.Node, results: list[fx.Node]) -> None:
    """Have other nodes in the place of a kernel's results."""
    for user in list(node.users):
        position: Any = user.args[1]
        user.replace_all_uses_with(results[position])
        graph.erase_node(user)
    graph.erase_node(node)
