"""Names of other libraries' models, read from the text of their source: an import takes seconds."""

import contextlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

from monetlite.core.errors import ModelError

_MODEL_TYPE = r'"([\w.-]+)"\s*[,:]\s*"\w+Config"'
_REGISTERED = r"^@register_model.*\n(?:@.*\n|\s.*\n|\)\n)*def (\w+)\("
_SOURCES = {
    "hf": ("transformers", "models/auto/*.py", _MODEL_TYPE),
    "torchvision": ("torchvision", "models/*.py", _REGISTERED),
    "timm": ("timm", "models/*.py", _REGISTERED),
}
"""The package, the files that list its models, and the pattern of an entry."""
_FEWEST = 20
"""Fewer names than these are not the whole list: the source is laid out in another way."""


def source_folder(library: str) -> Path | None:
    """The folder of an installed package; None if it can't be told without an import.

    Raises:
        ModelError: the package is not installed.
    """
    package = _SOURCES[library][0]
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module that was made by hand
        return None
    if found is None:
        raise ModelError(f"{library}: models need {package}, which is not installed; run: pip install {package}")
    return Path(found.origin).parent if found.origin else None


def names_in_source(library: str) -> frozenset[str] | None:
    """Names of a library's models; None if they can't be told from its source, or it is imported already.

    Raises:
        ModelError: the library is not installed.
    """
    folder = source_folder(library)
    if folder is None or sys.modules.get(_SOURCES[library][0]) is not None:
        return None
    return _names(library, folder)


@cache
def _names(library: str, folder: Path) -> frozenset[str] | None:
    _, files, pattern = _SOURCES[library]
    found: set[str] = set()
    for path in folder.glob(files):
        with contextlib.suppress(OSError):
            found.update(re.findall(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE))
    return frozenset(found) if len(found) >= _FEWEST else None
