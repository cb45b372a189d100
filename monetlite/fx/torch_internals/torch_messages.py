"""Messages of captured code: log messages, prints and warnings, which would take a model's graph apart.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `ignore_logging_functions` | functions that captures leave out; graphs would break at each |
| `reorderable_logging_functions` | functions whose calls come after the graph; the same |
| `_get_dynamo_config_for_logging` | fails in torch 2.11 on a set of methods, and prints a traceback |
| `DebuggingVariable` | a call of such a function; those of submodules would be lost |
| `utils.warn_once` | TorchDynamo's advice on what it can't capture; it would come beside the warning of pieces |
"""

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch._dynamo import config as _config
from torch._dynamo import utils as _utils
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import DebuggingVariable

from monetlite.core.announcing import warn
from monetlite.fx.torch_internals.patching import patched

_METHODS = ("debug", "info", "warning", "error", "critical", "log", "warning_once", "warning_advice")
"""Names of loggers' methods; the last two are transformers' own."""
_log_settings = _utils._get_dynamo_config_for_logging
_told: set[tuple[str, int]] = set()
"""Files and lines of prints that a person was told of."""
_warned: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
"""For each file, the warnings that came, of which Python shows each once."""


class LoggerMethods(set[Callable[..., Any]]):
    """Methods of loggers, those that a library adds later (as transformers does) included."""

    def __contains__(self, item: object) -> bool:
        return any(item is method for method in self)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        yield from (method for name in _METHODS if (method := getattr(logging.Logger, name, None)))
        yield from super().__iter__()


def messages_left_out() -> AbstractContextManager[None]:
    """Have captures skip log messages, and warn and print as plain code does, for the time of a block.

    Otherwise each of them would take a model's graph apart. A warning comes at the capture, a print after the graph
    in each run. Prints of tensors, and of what varies, are left out, with a warning. TorchDynamo's advice to
    write to PyTorch's developers is left out, too.
    """
    return patched(
        mock.patch.object(_utils, "warn_once"),
        mock.patch.object(_utils, "_get_dynamo_config_for_logging", _settings_if_sortable),
        mock.patch.object(DebuggingVariable, "call_function", _said),
        _config.patch(**_settings()),
    )


def leave_messages_out() -> None:
    """The same for as long as the process lives (since torch 2.13: for the calling thread's compilations)."""
    _utils._get_dynamo_config_for_logging = _settings_if_sortable
    DebuggingVariable.call_function = _said  # type: ignore[assignment]  # ours takes any
    for name, value in _settings().items():
        setattr(_config, name, value)


def _settings() -> dict[str, Any]:
    return {
        "ignore_logging_functions": LoggerMethods(set.__iter__(_config.ignore_logging_functions)),
        "reorderable_logging_functions": _config.reorderable_logging_functions | {print, warnings.warn},
    }


def _settings_if_sortable() -> str | None:
    try:
        return _log_settings()
    except TypeError:
        return None


def _said(self: Any, translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A call of `print` or `warnings.warn` in captured code."""
    where = translator.frame_summary()
    line = (where.filename, where.lineno or 1)
    if all(item.is_python_constant() for item in (*args, *kwargs.values())):
        if self.value is warnings.warn:
            text, category = (*(item.as_python_constant() for item in args), UserWarning)[:2]
            if "category" in kwargs:
                category = kwargs["category"].as_python_constant()
            warnings.warn_explicit(text, category, *line, registry=_warned[where.filename])
        else:  # TorchDynamo writes what the outermost function says; that is the only one that it looks at
            translator.output.root_tx.debug_locals.append((self, list(args)))
    elif line not in _told:
        _told.add(line)
        warn(
            f"{line[0]}:{line[1]}: a print of tensors, or of what varies, is left out of the captured step. With "
            "@torch.compiler.disable on its function it is printed, and that function runs as it is"
        )
    return ConstantVariable.create(None)
