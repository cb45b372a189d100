"""Tensors and submodules that a module holds, and the function that is called in its place.

A wrapper is the wrapped module under another class: it shares these dictionaries, so that names and `state_dict`
keys are the module's own whatever is replaced in either. If torch keeps a further one, a wrapper misses what is in
it. `nn.Module.compile` has a module call another function in place of its own; `within` does the same. If torch
looks that function up elsewhere, a module is called without it, and trains without its schedule.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

CONTENTS = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes of `nn.Module`: parameters, buffers, submodules, names of unsaved buffers, and hooks of states."""
HOLDERS = ("__dict__", "_modules")
"""Attributes by which Dynamo reaches submodules, where a module defines `__getattr__` as those of peft do."""


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


def load_own_contents(module: nn.Module, *arguments: Any) -> None:
    """Call the method by which a module takes its part of the `state_dict` of a module that holds it."""
    module._load_from_state_dict(*arguments)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module behind one that `torch.compile` has wrapped; any other module itself.

    The wrapped module's forward pass takes `*args, **kwargs`. If the attribute changes, keyword arguments are in
    another order than parameters of the forward pass.
    """
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def called_instead(model: nn.Module) -> Callable[..., Any] | None:
    """The function that a call of a module runs in place of the module's own; None if there is none."""
    return model._compiled_call_impl


def call_instead(model: nn.Module, function: Callable[..., Any] | None) -> None:
    """Have calls of a module run another function, as `nn.Module.compile` does, or its own again for None.

    Copies of the module, by `copy.deepcopy` or pickle, don't have it.
    """
    if function is None:
        model.__dict__.pop("_compiled_call_impl", None)
    else:
        model.__dict__["_compiled_call_impl"] = function


def call_itself(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module itself, with its hooks, whatever is called in its place."""
    return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types for it
