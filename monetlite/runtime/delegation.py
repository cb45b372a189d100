"""A module in front of another: attributes, items, modes and state are those of the model behind it."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals.torch_modules import apply_to_tensors, own_contents, share_contents

OWN = frozenset(vars(nn.Module()))
"""Instance attributes that every module has."""


class ForwardOfModel:
    """The attribute `forward`: calls `_forward`, and has the model's own signature, which callers look at."""

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        if instance is None:
            found: Callable[..., Any] = owner._forward
            return found
        call = functools.partial(instance._forward)
        functools.update_wrapper(call, instance.model.forward)
        return call


def _of_model(operation: Callable[..., Any]) -> Any:
    """A method that applies an operation to the model."""

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return operation(self.__dict__["model"], *arguments, **keywords)

    return method


def _defines(model: nn.Module, name: str) -> bool:
    """Look for an attribute of a module without evaluating it."""
    return name in vars(model) or hasattr(type(model), name) or name in own_contents(model)


class Delegating(nn.Module):
    """A module in front of a model, which shares the model's parameters, buffers and submodules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Sharing the dictionaries, rather than registering the model as a child, makes names and state_dict
        # keys the model's own and keeps both views consistent whatever is replaced in either.
        share_contents(self, model)
        self.__dict__["training"] = model.training
        self.__dict__["model"] = model

    forward = ForwardOfModel()
    __getitem__ = _of_model(operator.getitem)
    __setitem__ = _of_model(operator.setitem)
    __delitem__ = _of_model(operator.delitem)
    __len__ = _of_model(len)
    __iter__ = _of_model(iter)
    __contains__ = _of_model(operator.contains)

    def __bool__(self) -> bool:
        return True  # whatever its length, and for models that have none

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        self.model.train(mode)
        self.__dict__["training"] = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        apply_to_tensors(self.model, fn, recurse)
        return self

    def _keeps(self, name: str) -> bool:
        """Tell whether an attribute of that name is the wrapper's own, and not the model's.

        Its own are those that every module has, and notes that a library makes about the module it was given, under
        a private name that the model doesn't have.
        """
        model = self.__dict__.get("model")
        if model is None or name in OWN or hasattr(type(self), name):
            return True
        return name.startswith("_") and not _defines(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self.__dict__[name] = value
            if "model" in self.__dict__:
                self.model.training = value
        elif name in ("model", "schedule") and "model" in self.__dict__:
            raise ModelError(
                f"wrapper.{name} can't be replaced: what is compiled depends on it. Wrap again, "
                "MONeTWrapper(model, schedule); an attribute of that name of the model itself is set by "
                f"wrapper.model.{name} = ..."
            )
        elif self._keeps(name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._keeps(name):
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or "model" not in self.__dict__:
                raise
            return getattr(self.__dict__["model"], name)
