"""Hooks by which transformers models record what their layers give, and a capture of models that have them."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn

from monetlite.fx.torch_internals.patching import patched

_RECORDS = "_output_capturing_hooks_installed"
"""Mark of transformers at models that have their recording hooks."""


def install_recorders(model: nn.Module, error: Exception) -> bool:
    """Put the hooks on a transformers model that record its hidden states, if its capture failed for want of them.

    Transformers puts them on at a model's first call, under a lock, which can't be captured.

    Returns:
        True if there were any to put on, so that another capture may succeed.
    """
    transformers: Any = _output_capturing()
    install = getattr(transformers, "maybe_install_capturing_hooks", None)
    if install is None or "output_capturing" not in str(error):
        return False
    lacking = [
        module
        for module in model.modules()
        if getattr(module, "_can_record_outputs", None) and not getattr(module, _RECORDS, False)
    ]
    install_all = transformers.install_all_output_capturing_hooks

    def install_once(module: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(module, _RECORDS, False):
            install_all(module, *args, **kwargs)

    # A model puts hooks on the models within it, though these may have theirs. Each would record twice.
    with mock.patch.object(transformers, "install_all_output_capturing_hooks", install_once):
        for module in lacking:
            install(module)
    return bool(lacking)


@contextlib.contextmanager
def recorders_captured() -> Iterator[None]:
    """Have hooks find what they record into without an end of a piece, for the time of a block.

    transformers keeps that in a context variable, which can't be captured. Where a model is captured in pieces,
    some of it is not, so the variable's stand-in for captures is not set. Here, all get and set the stand-in. It
    begins with what a model around this one records into.
    """
    variable: Any = getattr(_output_capturing(), "_active_collector", None)
    if variable is None or not hasattr(variable, "context_var"):
        yield
        return
    methods = {"get": _get, "set": _set, "reset": _reset}
    changes = (mock.patch.object(type(variable), name, method) for name, method in methods.items())
    around = variable.context_var.get()
    with patched(
        *changes, mock.patch.object(variable, "global_var", variable.global_var if around is None else around)
    ):
        yield


def _get(self: Any) -> Any:
    return self.global_var


def _set(self: Any, value: Any) -> Any:
    before, self.global_var = self.global_var, value
    return (before,)


def _reset(self: Any, token: Any) -> None:
    (self.global_var,) = token


def _output_capturing() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")
