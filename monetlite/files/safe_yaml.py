"""YAML that other people wrote: plain data or an error, in bounded time and memory."""

import math
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from monetlite.errors import ScheduleFileError

LARGEST_FILE_BYTES = 64 * 2**20
DEEPEST_NESTING = 16
LARGEST_INTEGER = 2**62

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class InLine(list[Any]):
    """A list that is written on one line: a shape, a stride."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes plain data, and `InLine` lists on one line."""


def _in_line(dumper: Any, items: InLine) -> Any:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(InLine, _in_line)


def load_yaml(path: str | PathLike[str]) -> Any:
    """Read a YAML file as plain data.

    Raises:
        ScheduleFileError: the file can't be read, is too large or too deeply nested, is not YAML, or uses
            tags, anchors or aliases, which our files never do.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScheduleFileError(f"{path} can't be read: {reason}") from error
    if len(raw) > LARGEST_FILE_BYTES:
        raise ScheduleFileError(
            f"{path} is larger than {LARGEST_FILE_BYTES} bytes, which no schedule file is"
        )
    try:
        text = raw.decode("utf-8")
        _check_events(text, path)
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError, OverflowError) as error:
        first = " ".join(str(error).split())[:200]
        raise ScheduleFileError(f"{path} is not a complete YAML file: {first}") from error


def dump_yaml(data: Mapping[str, Any], header: str) -> str:
    """Plain data as YAML, keys in the order given, below a comment."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    body: str = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return comment + body


def _check_events(text: str, path: object) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ScheduleFileError(f"{path}, line {_line(event)}: anchors and aliases are not allowed")
        tag = getattr(event, "tag", None)
        if tag:
            raise ScheduleFileError(
                f"{path}, line {_line(event)}: the tag {tag[:80]!r} is not allowed; "
                "a schedule file is plain data"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEEPEST_NESTING:
                raise ScheduleFileError(f"{path}, line {_line(event)}: nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


class Record:
    """A mapping of a file, read field by field with the types they must have; errors say which and where."""

    def __init__(self, data: Any, path: object, where: str = "") -> None:
        self._path, self._where = path, where
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise self._error("", f"should be a mapping of names, not {type(data).__name__}")
        self._data = data

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._error(name, f"should be text, not {value!r:.80}")
        return value

    def integer(self, name: str, least: int = 0) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_INTEGER:
            raise self._error(
                name, f"should be a whole number from {least} to {LARGEST_INTEGER}, not {value!r:.80}"
            )
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 <= value <= LARGEST_INTEGER
        ):
            raise self._error(name, f"should be a number that is not negative, not {value!r:.80}")
        assert math.isfinite(value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._error(name, f"should be true or false, not {value!r:.80}")
        return value

    def record(self, name: str) -> "Record":
        return Record(self._get(name), self._path, self._at(name))

    def items(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self._error(name, f"should be a list, not {value!r:.80}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        for item in self.items(name):
            if not isinstance(item, str):
                raise self._error(name, f"should be a list of names; {item!r:.80} is not one")
        return tuple(self.items(name))

    def integers(self, name: str) -> tuple[int, ...]:
        for item in self.items(name):
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= LARGEST_INTEGER:
                raise self._error(name, f"should be a list of whole numbers; {item!r:.80} is not one")
        return tuple(self.items(name))

    def optional(self, name: str) -> bool:
        """Whether a field is there and is not null."""
        return self._data.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def _get(self, name: str) -> Any:
        if name not in self._data:
            raise self._error(name, "is missing")
        return self._data[name]

    def _at(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def _error(self, name: str, problem: str) -> ScheduleFileError:
        at = self._at(name) if name else self._where
        return ScheduleFileError(f"{self._path}: {at or 'the file'} {problem}")

    def error(self, name: str, problem: str) -> ScheduleFileError:
        """An error about a field of this record."""
        return self._error(name, problem)
