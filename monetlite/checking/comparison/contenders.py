"""What a way to train is made of: how a copy of the model is changed, before it takes the same steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from monetlite.checking.comparison.data import Peer
from monetlite.checking.trainee import copied


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every contender trains: the model (to look at, never to change) and the arguments of one call of it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train in one setting.

    Attributes:
        setting: in words. label: in a word or two, for pictures.
        prepare: makes what is trained of a copy of the model, which it may change, but for its parameters: those
            are every contender's. Parameters and buffers keep their names.
        asked_bytes: the budget, where it takes one.
        limit_bytes: what torch's CUDA allocator may reserve for the step, where that is limited.
    """

    peer: Peer
    setting: str
    prepare: Callable[[nn.Module], nn.Module]
    label: str = ""
    asked_bytes: int | None = None
    limit_bytes: int | None = None


def copy_of(model: nn.Module) -> nn.Module:
    """A copy with modules and buffers of its own, and the same parameters: nobody changes those."""
    return copied(model, {id(parameter): parameter for parameter in model.parameters()})


class Unsupported(Exception):
    """A way to train that this model, or this machine, doesn't allow; the message is the reason."""


__all__ = ["Contender", "Task", "Unsupported", "copy_of"]
