"""The part of a model's output that a training step returns: all of it, or the loss and what is small beside it."""

from collections import OrderedDict
from dataclasses import is_dataclass
from typing import Any

import torch

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals import torch_pytree as pytree

MAX_DIMENSIONS = 2
"""Outputs beside a loss that have more dimensions are large: a prediction for every token or pixel."""
_OPERATORS = "getitem len iter add radd sub rsub mul rmul truediv matmul rmatmul neg lt le gt ge float int"


class Untaken:
    """An output that is not computed, in the place of its tensor. Reading it raises `ModelError`.

    Args:
        name: of the output, as code reads it.
    """

    _name = "an output"

    def __init__(self, name: str = _name) -> None:
        self._name = name

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<{self}: not computed>"

    def __getattr__(self, name: str) -> Any:
        raise _read(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (item for item in pytree.tree_leaves((args, kwargs or {})) if isinstance(item, Untaken))
        raise _read(next(found))


def _refuse(output: Untaken, *_: Any) -> Any:
    raise _read(output)


for _operator in _OPERATORS.split():
    setattr(Untaken, f"__{_operator}__", _refuse)


class _UntakenRead(ModelError, AttributeError, TypeError):
    """For `hasattr`, an output that is not computed has no attributes; for `iter`, no items."""


def _read(output: Untaken) -> _UntakenRead:
    return _UntakenRead(
        f"{output} is not computed in training: a model that computes its loss returns the loss, and outputs "
        f"of up to {MAX_DIMENSIONS} dimensions. To have all, which then take memory, give outputs='all' "
        "beside the budget (monetlite solve --outputs all), or outputs='trained' to train on them, too"
    )


_UNTAKEN = Untaken()


def detach_all_but_loss(output: Any, keep_all: bool) -> tuple[Any, dict[Any, list[bool]] | None]:
    """Detach all items of a mapping but its scalar `loss`; any other output is returned as it is.

    Args:
        output: of a model.
        keep_all: whether to return computed tensors of more than two dimensions, too, and not `Untaken`.

    Returns:
        The output, and for each other item, by name, which of its tensors had to be detached; None if there is no
        loss.
    """
    if not has_loss(output):
        return output, None

    def detach(tensor: torch.Tensor) -> Any:
        if _is_large(tensor) and not keep_all:
            return _UNTAKEN
        return tensor.detach() if tensor.requires_grad else tensor

    detached = {
        name: [
            leaf.requires_grad
            for leaf in pytree.tree_leaves(item)
            if isinstance(leaf, torch.Tensor) and not (_is_large(leaf) and not keep_all)
        ]
        for name, item in output.items()
        if name != "loss"
    }
    items = {
        name: item if name == "loss" else pytree.tree_map_only(torch.Tensor, detach, item)
        for name, item in output.items()
    }
    return _like(output, items), detached


def _is_large(output: torch.Tensor) -> bool:
    return output.requires_grad and output.dim() > MAX_DIMENSIONS


def _like(output: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same type with these items, whatever that type's constructor takes."""
    if type(output) is dict:
        return items
    if type(output) is OrderedDict:  # of which torch 2.11 can't trace the question below
        return OrderedDict(items)
    if is_dataclass(output):
        return type(output)(**items)  # type: ignore[misc]  # not a class, as far as is_dataclass says
    made = dict.__new__(type(output))
    for name, item in items.items():
        dict.__setitem__(made, name, item)
    if hasattr(output, "__dict__"):
        made.__dict__.update(output.__dict__)
    return made


def has_loss(output: Any) -> bool:
    """Tell whether an output is a mapping (a dict, a transformers ModelOutput) with a scalar tensor `loss`."""
    if not isinstance(output, dict) or "loss" not in output:
        return False
    loss = output["loss"]
    return isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad
