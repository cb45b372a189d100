"""`torch.utils.checkpoint` around every block: all of it computed again, or all but the expensive operators."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monetlite.checking.comparison.blocks import wrap_blocks
from monetlite.checking.comparison.contenders import Contender, Task, Unsupported, copy_of
from monetlite.checking.comparison.data import Peer
from monetlite.operators.traits import operation_formula

_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""How transformers calls it, from version 6 on and before."""


def every_block(task: Task) -> list[Contender]:
    """Checkpointing of every block, by the model's own method where it is one of transformers'."""
    return [_contender(Peer.CHECKPOINT, task, {})]


def selective(task: Task) -> list[Contender]:
    """Selective activation checkpointing of every block: matrix products, convolutions and attention are kept.

    A saved result may not be overwritten. Where layers overwrite what they read, both are tried: the model as it
    is, and with those layers told not to.
    """
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _kept_or_recomputed)}
    contender = _contender(Peer.SELECTIVE, task, options)
    if not any(vars(module).get("inplace") for module in task.model.modules()):
        return [contender]

    def nothing_in_place(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if "inplace" in vars(module):
                vars(module)["inplace"] = False
        return contender.prepare(model)

    other = replace(contender, setting=f"{contender.setting}, nothing in place", prepare=nothing_in_place)
    return [contender, other]


def _kept_or_recomputed(context: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    counted = operation_formula(str(operator)) is not None
    return CheckpointPolicy.MUST_SAVE if counted else CheckpointPolicy.PREFER_RECOMPUTE


def _contender(peer: Peer, task: Task, options: dict[str, Any]) -> Contender:
    arguments = {"use_reentrant": False, **options}
    if getattr(task.model, "supports_gradient_checkpointing", False):
        method = next(name for name in _ENABLE if hasattr(task.model, name))

        def enable(model: nn.Module) -> nn.Module:
            getattr(model, method)(arguments)
            return model

        return Contender(peer=peer, setting=f"{method}()", label=str(peer), prepare=enable)

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(_checkpointed, forward, arguments)

    def wrap(model: nn.Module) -> nn.Module:
        wrap_blocks(model, around)
        return model

    found = wrap_blocks(copy_of(task.model), around)
    if not found:
        raise Unsupported("there is nothing to wrap: no kind of module occurs more than once")
    return Contender(peer=peer, setting=found, label=str(peer), prepare=wrap)


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a call; lists of tensors are taken apart, for a caller's may be longer by the backward pass."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        positional, named = pytree.tree_unflatten(leaves, spec)
        return forward(*positional, **named)

    return checkpoint(run, *leaves, **options)


__all__ = ["every_block", "selective"]
