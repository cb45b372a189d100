"""Outputs of a model that returns a loss: a gradient that reaches any other of them is refused, never lost."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from monetlite.errors import ModelError


def guard_outputs(output: Any) -> Any:
    """Make every output beside the loss refuse a gradient, rather than lose it in silence."""
    anchor = torch.empty(0, requires_grad=True)

    def guard(path: tuple[Any, ...], item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.is_floating_point() and path[0] != pytree.MappingKey("loss"):
            return _Refuse.apply(item, anchor, pytree.keystr(path))  # type: ignore[no-untyped-call]  # torch has no types for it
        return item

    guarded = {
        name: item if name == "loss" else pytree.tree_map_with_path(guard, {name: item})[name]
        for name, item in output.items()
    }
    return type(output)(**guarded)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ModelError(
            f"a gradient reached output{ctx.name}, but a model that returns a loss is scheduled for that loss "
            "alone. Compute everything that is trained on inside the model's loss, or call .detach() on the output"
        )
