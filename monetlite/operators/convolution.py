"""Convolution: its backward pass as two operators, which need different things.

The weight gradient reads the input; the input gradient reads the weight. Apart, each can be scheduled and
implemented on its own, and the input is dropped before the input gradient is made.
"""

from collections.abc import Iterator
from dataclasses import replace

from monetlite.graph import Call

_TARGET = "aten.convolution_backward.default"


def split_backward(call: Call) -> Iterator[tuple[str, Call]]:
    """The weight (and bias) gradient, then the input gradient, as far as each is needed."""
    if call.target != _TARGET:
        yield "", call
        return
    names = call.outputs
    for suffix, wanted in (("_weight", (False, True, True)), ("_input", (True, False, False))):
        mask = tuple(want and name is not None for want, name in zip(wanted, names, strict=True))
        if any(mask):
            outputs = tuple(name if want else None for want, name in zip(mask, names, strict=True))
            yield suffix, replace(call, args=(*call.args[:-1], mask), outputs=outputs)
