"""The repeated blocks of any model, which people wrap in `torch.utils.checkpoint`."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def wrap_blocks(model: nn.Module, around: Callable[[Forward], Forward]) -> str:
    """Have the forward pass of every block of a model run within something, and say in words what was wrapped.

    A block is an outermost module of a class that occurs more than once (a residual block, a transformer layer),
    inside of whatever holds several of those (a stage, an encoder). In `nn.Sequential`s of single layers, which
    are nobody's block, it is a convolution or a matrix with what follows up to the next.

    Args:
        model: changed in place: its blocks' `forward` are replaced.
        around: makes a block's new forward function of its own.

    Returns:
        What was wrapped, as in `16 Bottleneck`; empty if there is nothing to wrap.
    """
    occurrences = Counter(type(module) for module in model.modules() if _is_composite(module))
    wrapped: Counter[str] = Counter()

    def visit(module: nn.Module) -> None:
        if _is_row_of_layers(module):
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
    """Whether a module has modules of its own, and is more than a container of them."""
    return type(module) not in _CONTAINERS and not _is_list(module) and any(True for _ in module.children())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_row_of_layers(module: nn.Module) -> bool:
    """Whether a module is a plain `nn.Sequential` of layers that have no modules of their own."""
    return type(module) is nn.Sequential and len(module) > 0 and all(_depth(child) == 0 for child in module)


def _holds_blocks(module: nn.Module) -> bool:
    """Whether there are several of one class inside that are more than one layer deep themselves."""
    inside = Counter(type(child) for child in module.modules() if child is not module and _is_composite(child))
    deep = {type(child) for child in module.modules() if _is_composite(child) and _depth(child) > 1}
    return any(count > 1 and kind in deep for kind, count in inside.items())


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


__all__ = ["wrap_blocks"]
