"""The inputs of a call in one order, however they were passed."""

import inspect
from collections.abc import Mapping

import torch
from torch import nn

from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_modules import uncompiled


def leaves_in_order(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
    """What a call passes, in the order of the forward pass's parameters; what `**kwargs` takes by its names.

    A forward pass that takes only `*args, **kwargs` doesn't say which of its positional arguments has which name.
    Arguments that don't fit the signature come as they are: the model itself refuses them.
    """
    if not kwargs:
        return pytree.tree_leaves(args)
    try:
        signature = inspect.signature(uncompiled(model).forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return pytree.tree_leaves((args, dict(kwargs)))
    rest = [name for name, item in signature.parameters.items() if item.kind is inspect.Parameter.VAR_KEYWORD]
    for name in rest:
        bound[name] = dict(sorted(bound.get(name, {}).items()))
    return pytree.tree_leaves(list(bound.values()))


def tensors_in_order(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    """Of those, the tensors."""
    return [leaf for leaf in leaves_in_order(model, args, kwargs) if isinstance(leaf, torch.Tensor)]


__all__ = ["leaves_in_order", "tensors_in_order"]
