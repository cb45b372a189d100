"""Outputs beside a model's loss: read as ever, and refused a gradient, which would be lost."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.tracing.model_outputs import Untaken


def guard_outputs(output: Any, detached: Mapping[Any, Sequence[bool]]) -> Any:
    """Make outputs beside the loss refuse a gradient, rather than lose it in silence.

    Args:
        output: a mapping made by `detach_all_but_loss`; its items are replaced.
        detached: for each item beside the loss, by name, which of its tensors were detached.
    """
    anchor = torch.empty(0, requires_grad=True)

    def guard(path: tuple[Any, ...], item: Any) -> Any:
        if isinstance(item, torch.Tensor) and next(was_detached):
            return _RefuseGradient.apply(item, anchor, pytree.keystr(path))  # type: ignore[no-untyped-call]  # torch has no types for it
        return Untaken(f"output{pytree.keystr(path)}") if isinstance(item, Untaken) else item

    for name, flags in detached.items():
        was_detached = iter(flags)
        output[name] = pytree.tree_map_with_path(guard, {name: output[name]})[name]
    return output


class _RefuseGradient(torch.autograd.Function):
    """The same tensor to every reader: not a view to autograd, which would refuse changes in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ModelError(
            f"a gradient reached output{ctx.name}, but a model that returns a loss is scheduled for that loss "
            "alone. Give outputs='trained' beside the budget to train on its other outputs, too; or call .detach() "
            "on this one"
        )
