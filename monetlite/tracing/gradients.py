"""Which gradients autograd keeps as a step hands them over, and which it copies.

A leaf's first gradient becomes its `.grad` if nobody else holds the tensor and it is laid out as the leaf is;
otherwise autograd copies it (AccumulateGrad). The gradient of a mean is a number, expanded; those of two parameters
that were joined are slices of one tensor; that of a sum is the same for every operand: they are copied.
"""

from collections.abc import Container, Sequence

import torch
from torch import fx

from monetlite.fx import storages
from monetlite.fx.torch_internals.torch_aot import is_tangent


def copied_for(gradient: fx.Node, inputs: Sequence[fx.Node], backward: Container[fx.Node]) -> list[fx.Node]:
    """Those inputs, of the ones that a tensor is the gradient of, for which autograd copies it.

    `backward`: what depends on the gradients of outputs. Such a gradient itself, and what is computed before there
    are any, others may hold: it counts as copied, though autograd may keep a view of it.
    """
    base = storages.base(gradient)
    if is_tangent(base) or base not in backward:
        return list(inputs)
    # All but the last leaf to get a tensor find that others will.
    kept = [item for item in inputs if _is_laid_out_as(gradient.meta["val"], item.meta["val"])]
    return [item for item in inputs if item not in kept[:1]]


def _is_laid_out_as(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """What torch calls the layout contract of gradients: a dense leaf's strides, or else contiguous."""
    if torch.empty_like(leaf).stride() != leaf.stride():  # with gaps or overlaps
        return gradient.is_contiguous()
    pairs = zip(leaf.shape, gradient.stride(), leaf.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in pairs)
