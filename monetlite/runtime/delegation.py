"""A module in front of another: attributes that are set or read, and items, are those of the model behind it."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from monetlite.core.errors import ModelError

OWN = frozenset(vars(nn.Module()))
"""Instance attributes that every module has."""


def _defines(model: nn.Module, name: str) -> bool:
    """Whether a module has an attribute, without evaluating it."""
    registered = (model._parameters, model._buffers, model._modules)
    return name in vars(model) or hasattr(type(model), name) or any(name in items for items in registered)


class Delegating(nn.Module):
    """Has its model in `__dict__["model"]`, and shares its dictionaries of parameters, buffers and submodules."""

    def _keeps(self, name: str) -> bool:
        """Whether an attribute of that name is the wrapper's own, and not the model's.

        Its own are what every module has, and what a library notes, under a private name that the model doesn't
        have, about the module it was given.
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

    def __getitem__(self, index: Any) -> Any:
        container: Any = self.model
        return container[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        container: Any = self.model
        container[index] = value

    def __delitem__(self, index: Any) -> None:
        container: Any = self.model
        del container[index]

    def __len__(self) -> int:
        container: Any = self.model
        return len(container)

    def __iter__(self) -> Iterator[Any]:
        container: Any = self.model
        return iter(container)

    def __contains__(self, item: object) -> bool:
        container: Any = self.model
        return item in container

    def __bool__(self) -> bool:
        return True  # whatever its length, and for models that have none


__all__ = ["Delegating"]
