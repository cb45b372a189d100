"""Cross-entropy: its gradient as one operator, some rows at a time, and over the log-probabilities.

The gradient of `nll_loss` is as large as the log-probabilities, often the largest tensor of a language model, and
is zero in all but one place a row; `log_softmax`'s gradient turns it into (softmax − one-hot)·g. Captured graphs
have them as two kernels; as one, the first one's result need never be whole in memory. Every row is made by the
same two kernels, so no bit differs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetlite.core.graph import Call, Implementation
from monetlite.fx.storages import base
from monetlite.operators.implementations import (
    TracedKernel,
    alternatives_for,
    function,
    function_pair,
    slices,
    tensor_at,
)
from monetlite.operators.normalization import float32_bytes
from monetlite.operators.strides import is_contiguous

_LOSS = "aten.nll_loss_backward.default"
_SOFTMAX = "aten._log_softmax_backward_data.default"
CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**24}
"""Log-probabilities at a time."""


def merge_backward(graph: fx.Graph) -> None:
    """Replace the pair of kernels by one, wherever nobody else reads what passes between them."""
    for node in list(graph.nodes):
        if str(node.target) != _SOFTMAX or not isinstance(node.args[0], fx.Node):
            continue
        loss, log_probabilities, dim, _ = node.args
        if str(loss.target) != _LOSS or len(loss.users) != 1 or base(loss.args[1]) is not base(log_probabilities):
            continue
        if log_probabilities.meta["val"].dim() != 2 or dim not in (1, -1):
            continue
        if loss.args[1].meta["val"].shape != log_probabilities.meta["val"].shape:
            continue
        with graph.inserting_before(node):
            merged = graph.call_function(cross_entropy_backward, (*loss.args, *node.args[2:]), loss.kwargs)
        merged.meta.update(node.meta)
        node.replace_all_uses_with(merged)
        graph.erase_node(node)
        graph.erase_node(loss)


def _classes(call: Call) -> int:
    return tensor_at(call, 1).spec.shape[1]


@function("cross_entropy_backward", passes=2.0, workspace_bytes=float32_bytes, integers=_classes)
def cross_entropy_backward(gradient: Tensor, log_probabilities: Tensor, *rest: Any) -> Tensor:
    """Gradient of `nll_loss(log_softmax(x), target)` for x, by the two kernels that torch has for it.

    Args:
        gradient: of the loss; a scalar, or of shape (rows,) without reduction.
        log_probabilities: of shape (rows, classes).
        rest: target of shape (rows,), int64; weight of the classes or None, reduction, ignore_index and
            total_weight as `nll_loss_backward` takes them; dim and dtype as `_log_softmax_backward_data` does.
    """
    *of_loss, dim, dtype = rest
    loss = torch.ops.aten.nll_loss_backward.default(gradient, log_probabilities, *of_loss)
    result: Tensor = torch.ops.aten._log_softmax_backward_data.default(loss, log_probabilities, dim, dtype)
    return result


@alternatives_for("monetlite.cross_entropy_backward")
def by_rows(kernel: TracedKernel) -> Iterator[Implementation]:
    """The same, some rows at a time: into new memory, or over the log-probabilities."""
    log_probabilities, result = tensor_at(kernel.call, 1), kernel.results[0]
    if result is None or result.dtype != log_probabilities.spec.dtype or not is_contiguous(log_probabilities.spec):
        return
    yield kernel.implement("by_rows", cross_entropy_backward_by_rows)
    if overwrites := kernel.over(log_probabilities):
        yield kernel.implement("inplace", cross_entropy_backward_, overwrites=overwrites)


def _by_rows(result: Tensor, gradient: Tensor, log_probabilities: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """`cross_entropy_backward`, some rows at a time."""
    *of_loss, dim, dtype = rest
    rows, classes = log_probabilities.shape
    chunk = CHUNK_ELEMENTS.get(result.device.type, CHUNK_ELEMENTS["cpu"])
    for some in slices(rows, chunk // max(1, classes)):
        of_rows = gradient[some] if gradient.dim() else gradient
        loss = torch.ops.aten.nll_loss_backward.default(of_rows, log_probabilities[some], target[some], *of_loss)
        torch.ops.aten._log_softmax_backward_data.out(loss, log_probabilities[some], dim, dtype, out=result[some])
        del loss  # before the next one is made
    return result


cross_entropy_backward_by_rows, cross_entropy_backward_ = function_pair(
    _by_rows,
    *("cross_entropy_backward_by_rows", "cross_entropy_backward_"),
    over=1,
    passes=2.0,
    workspace_bytes=lambda call: min(float32_bytes(call), 4 * CHUNK_ELEMENTS["cuda"]),
    integers=_classes,
)
