"""Operators that draw random numbers: run again from the generator's state, they draw the same ones.

The state is a few bytes (5,056 on the CPU, 16 on a GPU), so a dropout mask need not be kept: before the first
run the state is noted, and a re-run puts it back for as long as it takes. The generator is left as it was
found, so a step leaves it exactly as plain training does.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monetlite.core.graph import Call, TensorRef
from monetlite.fx.call_encoding import fake_mode
from monetlite.fx.torch_internals.torch_dispatch import schema_of
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.operators.changing import called_operator
from monetlite.operators.implementations import FUNCTIONS, PREFIX, function, target_of

STATE = PREFIX + "rng_state"
REPLAY = PREFIX + "replay"


def is_random(node: fx.Node) -> bool:
    """Tell whether a kernel draws from the random number generator, so that running it again differs.

    Operators of other libraries often don't say so, but name the probability by which they drop.
    """
    operator = called_operator(node)
    if operator is None:
        registered = FUNCTIONS.get(target_of(node))
        return registered is not None and registered.random
    tagged = torch.Tag.nondeterministic_seeded in operator.tags
    if tagged or operator.namespace != "aten":
        for position, argument in enumerate(schema_of(operator).arguments):
            if argument.name == "dropout_p":
                given = *node.args[position:], node.kwargs.get(argument.name, argument.default_value)
                return bool(given[0] != 0)
    return tagged


def note_state(node: fx.Node) -> fx.Node:
    """Put, right before a random kernel of a captured graph, a node that stands for the generator's state."""
    device = tensors_among(node.meta["val"])[0].device.type
    with node.graph.inserting_before(node):
        state = node.graph.call_function(rng_state, (device,))
    with fake_mode(node):
        state.meta["val"] = torch.empty(state_bytes(device), dtype=torch.uint8)
    return state


def replayed(call: Call, state: TensorRef, device: str) -> Call:
    """The same call with the numbers drawn from a noted state."""
    return replace(call, target=REPLAY, args=(state, device, call.target, *call.args))


def drawn_call(call: Call) -> Call:
    """The call that a replay makes."""
    _, _, target, *args = call.args
    assert isinstance(target, str)
    return replace(call, target=target, args=tuple(args))


def state_bytes(device: str) -> int:
    """The size of the result of `rng_state`."""
    return 16 if device == "cuda" else torch.get_rng_state().numel()


@function("rng_state")
def rng_state(device: str) -> torch.Tensor:
    """The state of a device's default generator, a tensor of bytes."""
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


@function("replay", like=drawn_call)
def replay(state: torch.Tensor, device: str, target: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator with a device's default generator in an earlier state, and put the present one back.

    The keywords are the operator's, which may be called as the parameters here are: `torch.rand` takes a `device`.
    """
    from monetlite.operators import resolve

    with drawing_from(state, device):
        return resolve(target)(*args, **kwargs)


@contextlib.contextmanager
def drawing_from(state: torch.Tensor, device: str) -> Iterator[None]:
    """Put a device's default generator in an earlier state for a while."""
    now = rng_state(device)
    restore = torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state
    restore(state)
    try:
        yield
    finally:
        restore(now)


def forked_state(device: str) -> contextlib.AbstractContextManager[None]:
    """Leave the default generators of the CPU, and of the current GPU if that is the device, as they are found."""
    forked: contextlib.AbstractContextManager[None] = torch.random.fork_rng(
        [torch.cuda.current_device()] if device == "cuda" else []
    )
    return forked
