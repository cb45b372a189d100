"""Calls of what `torch.compile` has made by a backend: their module and arguments, and what surrounds each.

A backend gets one graph at a time. It isn't told which call of which module the graph is of.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `_TorchCompileWrapper` | one `torch.compile` with its backend, `compiler_fn`; calls would not be surrounded |
| `.kwargs` | arguments of its backend, which tell its code from others'; models would run each other's pieces |
| `.backend_ctx_ctor` | makes a context manager around each call; the same as first |
| `_TorchDynamoContext.__call__.<locals>.compile_wrapper` | function around a call; the same |
| `fn`, `args`, `kwargs` | its variables: what is called, and by which arguments; the same |
| `nn.Module._call_impl` | function between call and forward pass; whole models would be taken for pieces |
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo import convert_frame as _convert_frame
from torch._dynamo import eval_frame as _eval_frame
from torch.nn.modules import module as _module

_AROUND = "compile_wrapper"
_TO_FORWARD = ("_call_impl", "_wrapped_call_impl", "inner")
_thread = threading.local()


class CompiledCall:
    """A call that runs.

    Attributes:
        model: the module that `torch.compile` was called on; None for a function.
        args, kwargs: of the call.
        starts_here: True if the code that is being compiled begins where the module's forward pass does.
    """

    def __init__(self, frame: FrameType, inner: list[FrameType], compilation: Any) -> None:
        known = frame.f_locals
        self.args: tuple[Any, ...] = known["args"]
        self.kwargs: dict[str, Any] = known["kwargs"]
        called = inspect.unwrap(known["fn"])  # a module of torch's own is called by a function
        owner = getattr(called, "__self__", called)
        self.model: nn.Module | None = owner if isinstance(owner, nn.Module) else None
        own = {id(owner), id(getattr(owner, "module", owner))}
        first = next((item for item in inner if not _leads_to_forward(item, own)), None)
        self.starts_here = first is not None and first.f_code.co_filename == _convert_frame.__file__
        self._compilation = compilation

    @property
    def given(self) -> dict[str, Any]:
        """Arguments that the backend gets beside each graph of the same `torch.compile`, from the next one on.

        Code that was compiled with other arguments serves other calls only.
        """
        found: dict[str, Any] = self._compilation.kwargs
        return found

    @property
    def notes(self) -> dict[str, Any]:
        """Knowledge of all calls of the same `torch.compile`."""
        found: dict[str, Any] = vars(self._compilation).setdefault("_monetlite", {})
        return found


def surround_calls(backend: Callable[..., Any], around: Callable[[], AbstractContextManager[None]]) -> None:
    """Have each call of what a backend compiles run in a block, for as long as the process lives.

    Torch copies the attributes of a compilation, so each has to have its block as its own, from the moment on in
    which its backend is found. The first of a process is being made while this runs.
    """

    def get(compilation: Any) -> Any:
        return vars(compilation)["compiler_fn"]

    def put(compilation: Any, found: Any) -> None:
        vars(compilation)["compiler_fn"] = found
        if found is backend:
            compilation.backend_ctx_ctor = lambda: _surrounded(compilation, around)

    torch._TorchCompileWrapper.compiler_fn = property(get, put)  # type: ignore[assignment]  # an attribute otherwise


@contextlib.contextmanager
def _surrounded(compilation: Any, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    before, _thread.compilation = getattr(_thread, "compilation", None), compilation
    try:
        with around():
            yield
    finally:
        _thread.compilation = before


def current_call() -> CompiledCall | None:
    """The call that the present code runs inside of; None if it is in no call that is surrounded."""
    compilation, frame = getattr(_thread, "compilation", None), sys._getframe(1)
    inner: list[FrameType] = []
    while compilation is not None and frame is not None:
        if frame.f_code.co_name == _AROUND and frame.f_code.co_filename == _eval_frame.__file__:
            return CompiledCall(frame, inner[::-1], compilation)
        inner.append(frame)
        frame = frame.f_back  # type: ignore[assignment]  # None behind the last
    return None


def _leads_to_forward(frame: FrameType, own: set[int]) -> bool:
    """True for the code by which a module's call reaches its forward pass."""
    code = frame.f_code
    if code.co_filename != _module.__file__ or code.co_name not in _TO_FORWARD:
        return False
    return id(frame.f_locals.get("self")) in own
