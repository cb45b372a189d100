"""YAML that other people wrote: plain data or an error, in bounded time and memory."""

import math
import reprlib
import unicodedata
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from monetlite.core.errors import ScheduleFileError

LARGEST_FILE_BYTES = 16 * 2**20
MOST_VALUES = 500_000
"""Names and values in a file; a schedule of a thousand operators has some thousands."""
DEEPEST_NESTING = 16
LARGEST_INTEGER = 2**62
END = "..."
"""YAML's own mark of a document's end: without it, a file cut short after a line would look complete."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_LOADER):  # type: ignore[misc]  # the base is C's where there is one
    """Reads plain data, without whole numbers that no file has: the largest can't even be written."""


def _whole_number(loader: Any, node: yaml.ScalarNode) -> int:
    number: int = loader.construct_yaml_int(node)
    if abs(number) > LARGEST_INTEGER:
        line = node.start_mark.line + 1
        raise ValueError(f"line {line} has a whole number of {number.bit_length()} bits")
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class InLine(list[Any]):
    """A list that is written on one line: a shape, a stride."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # the base is C's where there is one
    """Writes plain data, and `InLine` lists on one line."""


def _in_line(dumper: Any, items: InLine) -> Any:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(InLine, _in_line)


def read_bounded(path: str | PathLike[str], most_bytes: int) -> bytes:
    """A file's bytes, if there are no more than so many.

    Raises:
        ScheduleFileError: it can't be read, or has more.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScheduleFileError(f"{path} can't be read: {reason}") from error
    if len(raw) > most_bytes:
        raise ScheduleFileError(f"{path} is larger than {most_bytes} bytes, which no file of ours is")
    return raw


def load_yaml(path: str | PathLike[str]) -> Any:
    """Read a YAML file as plain data.

    Raises:
        ScheduleFileError: the file can't be read, is too large or too deeply nested, is not YAML, or uses
            tags, anchors, aliases or merge keys, or whole numbers beyond 2⁶², which our files never do.
    """
    raw = read_bounded(path, LARGEST_FILE_BYTES)
    try:
        text = raw.decode("utf-8")
        _check_events(text, path)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError, OverflowError) as error:
        first = " ".join(str(error).split())[:200]
        raise ScheduleFileError(f"{path} is not a complete YAML file: {first}") from error


def dump_yaml(data: Mapping[str, Any], header: str) -> str:
    """Plain data as YAML, keys in the order given, between a comment and the mark of its end."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    body: str = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, explicit_end=True
    )
    return comment + body


def _check_events(text: str, path: object) -> None:
    """Refuse what `yaml.load` would accept but our files never have, before anything is built of it."""
    keys: list[set[str] | None] = []
    """For each collection that is open, the keys seen in it; None for a list."""
    at_key = False
    complete = False
    for number, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if number > MOST_VALUES:
            raise ScheduleFileError(f"{path} has more than {MOST_VALUES} values, which no schedule file has")
        where = f"{path}, line {_line(event)}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ScheduleFileError(f"{where}: anchors and aliases are not allowed")
        tag = getattr(event, "tag", None)
        if tag:
            raise ScheduleFileError(f"{where}: the tag {tag[:80]!r} is not allowed; a schedule file is plain data")
        if isinstance(event, yaml.NodeEvent) and at_key:
            _check_key(event, keys[-1], where)
        if isinstance(event, yaml.CollectionStartEvent):
            keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            if len(keys) > DEEPEST_NESTING:
                raise ScheduleFileError(f"{where}: nested too deeply")
            at_key = keys[-1] is not None
        elif isinstance(event, (yaml.CollectionEndEvent, yaml.ScalarEvent)):
            if isinstance(event, yaml.CollectionEndEvent):
                keys.pop()
                at_key = False
            at_key = bool(keys) and keys[-1] is not None and not at_key
        elif isinstance(event, yaml.DocumentEndEvent):
            complete = bool(event.explicit)
    if not complete:
        raise ScheduleFileError(f"{path} is truncated: its last line should be {END!r}")


def _check_key(event: yaml.Event, seen: set[str] | None, where: str) -> None:
    assert seen is not None
    if not isinstance(event, yaml.ScalarEvent):
        raise ScheduleFileError(f"{where}: a name should stand before the colon")
    if event.value == "<<" and event.implicit[0]:
        raise ScheduleFileError(f"{where}: merge keys are not allowed")
    if event.value in seen:
        raise ScheduleFileError(f"{where}: {event.value[:80]!r} is there twice")
    seen.add(event.value)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0


def shown(value: Any) -> str:
    """A value of a file for an error, shortened."""
    try:
        return f"{_SHORT.repr(value):.80}"
    except ValueError:
        return "a number of thousands of digits"


class Record:
    """A mapping of a file, read field by field with the types they must have; errors say which and where."""

    def __init__(self, data: Any, path: object, where: str = "") -> None:
        self._path, self._where = path, where
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise self._error("", f"should be a mapping of names, not {type(data).__name__}")
        self._refuse_control("", *data)
        self._data = data

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._error(name, f"should be text, not {shown(value)}")
        self._refuse_control(name, value)
        return value

    def _refuse_control(self, name: str, *texts: str) -> None:
        """Refuse what a terminal would obey, in texts that are printed."""
        for text in texts:
            if any(unicodedata.category(item) in ("Cc", "Cs") and item not in "\n\t" for item in text):
                raise self._error(name, f"should be text without control characters, not {shown(text)}")

    def integer(self, name: str, least: int = 0) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_INTEGER:
            raise self._error(
                name, f"should be a whole number from {least} to {LARGEST_INTEGER}, not {shown(value)}"
            )
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST_INTEGER:
            raise self._error(name, f"should be a number that is not negative, not {shown(value)}")
        assert math.isfinite(value)
        return float(value)

    def signed(self, name: str) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_INTEGER:
            raise self._error(name, f"should be a number, not {shown(value)}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._error(name, f"should be true or false, not {shown(value)}")
        return value

    def record(self, name: str) -> "Record":
        return Record(self._get(name), self._path, self._at(name))

    def records(self, name: str) -> "list[Record]":
        items = self.items(name)
        return [Record(item, self._path, f"{self._at(name)}[{number}]") for number, item in enumerate(items)]

    def items(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self._error(name, f"should be a list, not {shown(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        for item in self.items(name):
            if not isinstance(item, str):
                raise self._error(name, f"should be a list of names; {shown(item)} is not one")
            self._refuse_control(name, item)
        return tuple(self.items(name))

    def integers(self, name: str) -> tuple[int, ...]:
        for item in self.items(name):
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= LARGEST_INTEGER:
                raise self._error(name, f"should be a list of whole numbers; {shown(item)} is not one")
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
