"""Operator families: one file each, with the ways to run its operators.

A family offers implementations beside the default one, which runs the traced call. Each is a call that can be
priced and lowered. Every file of this folder is imported here, which registers what it offers
(`implementations.py`). Facts about ATen operators are in `traits.py`.
"""

import importlib
import pkgutil
from collections.abc import Callable

from torch import fx

from monetlite.core.graph import Call
from monetlite.fx.torch_internals.torch_dispatch import OpOverload, named_operator, schema_of
from monetlite.operators.implementations import FUNCTIONS, TracedKernel, alternatives, returns_tuple

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from monetlite.operators import changing, cross_entropy, dropout, elementwise, random  # noqa: E402 (after all of them are there)
from monetlite.operators.random import is_random  # noqa: E402
from monetlite.operators.taking_apart import take_apart  # noqa: E402


def merge(graph: fx.Graph) -> None:
    """Replace, in a captured graph, kernels that are better run as one, otherwise or not at all."""
    changing.by_name(graph)
    elementwise.remove_copies(graph)
    cross_entropy.merge_backward(graph)
    dropout.round_as_plain_training(graph)


def resolve(target: str) -> Callable[..., object]:
    """The function behind a call's target.

    Raises:
        KeyError: no such function.
    """
    registered = FUNCTIONS.get(target)
    if registered is not None:
        return registered.run
    try:
        return named_operator(target)
    except (AttributeError, ValueError) as error:
        raise KeyError(target) from error


def returns_tensor(call: Call) -> bool:
    """Tell whether a call returns one tensor, and not a tuple of its results."""
    target = call.target
    if target == random.REPLAY:
        target = str(call.args[2])
    registered = FUNCTIONS.get(target)
    if registered is not None:
        return not returns_tuple(registered.run)
    function = resolve(target)
    assert isinstance(function, OpOverload)
    returns = schema_of(function).returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


__all__ = [
    "TracedKernel",
    "alternatives",
    "is_random",
    "merge",
    "resolve",
    "returns_tensor",
    "take_apart",
]
