"""Functions that the programs of a step call beside its operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import has_side_effect

from monetlite.fx.torch_internals.torch_dispatch import suggest_memory_format
from monetlite.operators.implementations import function
from monetlite.operators.traits import aten_name, traits_of


@function("deliver", passes=0.0)
def deliver(*gradients: torch.Tensor) -> None:
    """Mark, in a backward program, where some of its results are final (`monetlite.runtime`). It does nothing."""


has_side_effect(deliver)


class GuardFailed(Exception):
    """Weights that some operators' implementations can't be run with; nothing of the step has run yet.

    Attributes:
        operators: their names.
    """

    def __init__(self, operators: list[str]) -> None:
        super().__init__(", ".join(operators))
        self.operators = operators


def prepared(target: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function to run for a call's target: with operands in order, and with a compact result."""
    return _compacting(target, _in_order(target, run))


def _in_order(target: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function to run for a call's target, whose operands are in the order that its kernel can read.

    A capture leaves out the copy where its fake tensors are in order. Real ones may not be: a dimension of one has
    any stride.
    """
    positions = traits_of(target).reads_in_order
    if not positions:
        return run

    def ordered(*args: Any, **kwargs: Any) -> Any:
        decides = args[positions[-1]]
        order = suggest_memory_format(decides) if decides.device.type == "cpu" else torch.contiguous_format
        read = [item.contiguous(memory_format=order) if at in positions else item for at, item in enumerate(args)]
        return run(*read, **kwargs)

    ordered.__name__ = ordered.__qualname__ = f"ordered_{aten_name(target)}"  # by which generated code calls it
    return ordered


def _compacting(target: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The function to run for a call's target, whose result takes no more memory than it needs.

    PyTorch returns some results in larger storages, which a step would hold for as long as the result: two
    megabytes, say, for the one number that is a loss.
    """
    if not traits_of(target).larger_storages:
        return run

    def compact(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = run(*args, **kwargs)
        return made.clone() if made.untyped_storage().nbytes() > made.nbytes else made

    compact.__name__ = compact.__qualname__ = f"compact_{aten_name(target)}"  # by which generated code calls it
    return compact
