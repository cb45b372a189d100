"""Blocks of a model, which checkpointing runs again one at a time."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from monetlite.fx.torch_internals import torch_pytree as pytree

Forward = Callable[..., Any]


def checkpointed(forward: Forward, options: dict[str, Any]) -> Forward:
    """A function in its place that `torch.utils.checkpoint` runs again in the backward pass."""
    return functools.partial(_checkpointed, forward, options)


def _checkpointed(forward: Forward, options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a call. Lists of tensors are taken apart: the caller may extend one before the backward pass."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        positional, named = pytree.tree_unflatten(leaves, spec)
        return forward(*positional, **named)

    return checkpoint(run, *leaves, **options)


def selective_contexts(saves: Callable[[str, bool], bool]) -> Any:
    """Contexts of a checkpoint that keeps what operators make, where `saves` says so.

    Args:
        saves: called with an operator's name, and True where it runs again.
    """

    def policy(context: Any, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        saved = saves(str(operator), context.is_recompute)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch has no types for it


def wrap_blocks(model: nn.Module, around: Callable[[Forward], Forward]) -> str:
    """Replace the forward function of every block of a model, and name what was wrapped, as in `16 Bottleneck`.

    A block is an outermost module of a class that occurs more than once (a residual block, a transformer layer),
    inside whatever holds several of those (a stage, an encoder). In an `nn.Sequential` of single layers it is a
    convolution or a matrix with what follows up to the next.

    Args:
        model: changed in place.
        around: makes a block's new forward function of its own.
    """
    occurrences = Counter(type(module) for module in model.modules() if _is_composite(module))
    wrapped: Counter[str] = Counter()

    def visit(module: nn.Module) -> None:
        if type(module) is nn.Sequential and len(module) > 0 and all(_depth(child) == 0 for child in module):
            wrapped.update(_wrap_layers(module, around))
        elif _is_composite(module) and occurrences[type(module)] > 1 and not _holds_blocks(module):
            module.forward = around(module.forward)
            wrapped[type(module).__name__] += 1
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return ", ".join(f"{count} {name}" for name, count in wrapped.most_common())


def _is_composite(module: nn.Module) -> bool:
    """Tell whether a module has modules of its own, and is more than a container of them."""
    container = type(module) is nn.Sequential or isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not container and any(True for _ in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether there are several of one class inside that are more than one layer deep themselves."""
    inside = [child for child in module.modules() if child is not module and _is_composite(child)]
    counts = Counter(map(type, inside))
    return any(counts[type(child)] > 1 and _depth(child) > 1 for child in inside)


def _depth(module: nn.Module) -> int:
    return max((1 + _depth(child) for child in module.children()), default=0)


def _wrap_layers(row: nn.Module, around: Callable[[Forward], Forward]) -> list[str]:
    """Wrap each layer that multiplies by a weight together with what follows; one alone has nothing to drop."""
    groups: list[list[nn.Module]] = [[]]
    for layer in row.children():
        if _multiplies(layer) and any(_multiplies(before) for before in groups[-1]):
            groups.append([])
        groups[-1].append(layer)
    wrapped = [group for group in groups if len(group) > 1 and any(_multiplies(layer) for layer in group)]
    functions = [around(_in_turn(group)) if group in wrapped else _in_turn(group) for group in groups]
    if wrapped:
        row.forward = _in_turn(functions)
    return ["-".join(type(layer).__name__ for layer in group) for group in wrapped]


def _multiplies(layer: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in layer.parameters())


def _in_turn(functions: Sequence[Forward]) -> Forward:
    def run(x: torch.Tensor) -> Any:
        for function in functions:
            x = function(x)
        return x

    return run
