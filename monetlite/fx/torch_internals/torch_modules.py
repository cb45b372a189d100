"""Tensors and submodules that a module holds.

A wrapper is the wrapped module under another class: it shares these dictionaries, so that names and `state_dict`
keys are the module's own whatever is replaced in either. If torch keeps a further one, a wrapper misses what is in
it.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

CONTENTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of `nn.Module`: parameters, buffers, submodules, and names of buffers that are not saved."""


def share_contents(wrapper: nn.Module, model: nn.Module) -> None:
    """Make a module hold the same parameters, buffers and submodules as another, now and later."""
    for name in CONTENTS:
        wrapper.__dict__[name] = model.__dict__[name]


def own_contents(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and submodules by name, without those of submodules."""
    return {**module._parameters, **module._buffers, **module._modules}


def apply_to_tensors(module: nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> None:
    """Call the method behind `to`, `cuda`, `half` and the like."""
    module._apply(function, recurse)  # type: ignore[no-untyped-call]  # torch has no types for it


def uncompiled(model: nn.Module) -> nn.Module:
    """The module behind one that `torch.compile` has wrapped; any other module itself.

    The wrapped module's forward pass takes `*args, **kwargs`. If the attribute changes, keyword arguments are in
    another order than parameters of the forward pass.
    """
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found
