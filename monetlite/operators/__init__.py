"""Operator families: how each kernel can be split into operators, and the ways each operator can be run.

One file per family. A family offers implementations beside the default one, which runs what was traced;
each is a call that can be priced and lowered. See CONTRIBUTING.md.
"""

from collections.abc import Callable, Iterator

import torch

from monetlite.graph import Call, Implementation
from monetlite.operators import batch_norm, convolution, elementwise, pooling, random, relu, softmax
from monetlite.operators.kernel import Kernel
from monetlite.operators.random import is_random

_FAMILIES: tuple[Callable[[Kernel], Iterator[Implementation]], ...] = (
    elementwise.in_place,
    relu.backward_from_input,
    pooling.backward_without_input,
    softmax.in_place,
    random.dropout_backward_in_place,
)

_FUNCTIONS: dict[str, Callable[..., object]] = {
    "monetlite.max_pool2d_backward_from_indices": pooling.max_pool2d_backward_from_indices,
    "monetlite.dropout_backward_": random.dropout_backward_,
    random.REPLAY: random.replay,
    random.STATE: random.rng_state,
}


def alternatives(kernel: Kernel) -> Iterator[Implementation]:
    """Every implementation of a kernel beside its default one."""
    for family in _FAMILIES:
        yield from family(kernel)


def split(call: Call) -> Iterator[tuple[str, Call]]:
    """The operators that a call becomes: (suffix of the name, call)."""
    yield from convolution.split_backward(call)


def again(call: Call) -> Call | None:
    """What a re-run calls, for an operator that must not be called again as it was."""
    return batch_norm.without_running_statistics(call)


def resolve(target: str) -> Callable[..., object]:
    """The function behind a call's target.

    Raises:
        KeyError: no such function.
    """
    if target in _FUNCTIONS:
        return _FUNCTIONS[target]
    parts = target.split(".")
    if len(parts) != 3:
        raise KeyError(target)
    namespace, name, overload = parts
    try:
        function: Callable[..., object] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise KeyError(target) from error
    return function


__all__ = ["Kernel", "again", "alternatives", "is_random", "resolve", "split"]
