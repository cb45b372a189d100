"""Plain data from files that other people wrote: YAML or JSON, or an error, in bounded time and memory."""

import json
import math
import re
import reprlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import yaml

from monetlite.core.errors import ScheduleFileError
from monetlite.core.units import MAX_INTEGER

MAX_YAML_BYTES = 16 * 2**20
MAX_JSON_BYTES = 64 * 2**20
MAX_VALUES = 500_000
"""Names and values in a YAML file. A schedule of a thousand operators has some thousands."""
MAX_NESTING = 16
END = "..."
"""YAML's own mark of a document's end. Without it, a file cut short after a line would look complete."""

Place = tuple[str | int, ...]
"""The names and positions that lead to a value in nested data."""

_BASE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document(msgspec.Struct, frozen=True, kw_only=True, tag_field="format"):
    """Base of the descriptions of kinds of files. A subclass's tag is what its files have as `format`.

    A version that only adds optional fields is read like the newest one.
    """

    VERSIONS: ClassVar[range] = range(0)
    """Versions that can be read; empty for a kind without versions."""
    REMEDY: ClassVar[str] = ""
    """Advice for a person whose file has another version."""
    CALLED: ClassVar[str] = ""
    """Name for people."""
    MADE_BY: ClassVar[str] = ""
    """Command that makes such a file."""

    @classmethod
    def refuse_others(cls, raw: bytes, path: object) -> None:
        """Refuse the contents of a file of another kind.

        Raises:
            ScheduleFileError: the format is nowhere in it.
        """
        tag = str(cls.__struct_config__.tag)
        if re.search(rb"format[\"']?\s*:\s*[^\n]*" + tag.encode(), raw):
            return
        other = re.search(rb"format[\"']?\s*:\s*[\"']?(monetlite-[a-z]+)", raw)
        what = f"its format is {other[1].decode()}" if other else f"it has no line `format: {tag}`"
        if not raw.strip():
            what = "it is empty"
        elif b"\0" in raw[:1024]:
            what = "it is binary"
        raise ScheduleFileError(f"{path} is not a {cls.CALLED}: {what}. {cls.MADE_BY} makes one")


@dataclass(frozen=True, kw_only=True)
class PlainData:
    """The contents of a file.

    Attributes:
        path: the file, for errors.
        data: nested dictionaries, lists, texts, numbers, booleans and None.
        text: the YAML text, in which errors look up their line; empty for JSON.
    """

    path: object
    data: Any
    text: str = ""

    def error(self, place: Place, problem: str) -> ScheduleFileError:
        """Make an error about one value: file, line, the value's place and the problem."""
        name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")
        line = f", line {self._line(place)}" if self.text and place else ""
        return ScheduleFileError(f"{self.path}{line}: {name:.160}{' ' if name else 'the file '}{problem}")

    def _line(self, place: Place) -> int:
        node: Any = yaml.compose(self.text, Loader=_BASE_LOADER)
        line = node.start_mark.line + 1
        for step in place:
            if isinstance(node, yaml.MappingNode):
                key, node = next((pair for pair in node.value if pair[0].value == step), (None, None))
                line = key.start_mark.line + 1 if key else line
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                node = node.value[step]
                line = node.start_mark.line + 1
        return int(line)


def load_yaml(path: str | PathLike[str], kind: type[Document]) -> PlainData:
    """Read a YAML file.

    Raises:
        ScheduleFileError: the file can't be read, is of another kind, too large or too deeply nested, not YAML, or
            uses tags, anchors, aliases, merge keys, control characters or whole numbers beyond 2⁶².
    """
    raw = read_bounded(path, MAX_YAML_BYTES, kind.CALLED)
    kind.refuse_others(raw, path)
    try:
        text = raw.decode("utf-8")
        _check_events(text, path)
        return PlainData(path=path, data=yaml.load(text, Loader=_Loader), text=text)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        if not raw.rstrip().endswith(END.encode()):
            raise _truncated(path) from error
        reason = " ".join(str(error).split())[:200]
        raise ScheduleFileError(f"{path} is not a complete YAML file: {reason}") from error


def load_json(path: str | PathLike[str], kind: type[Document]) -> PlainData:
    """Read a JSON file.

    Raises:
        ScheduleFileError: the file can't be read, is of another kind, too large, not JSON, or has a name twice in
            one object, control characters or a number that is none.
    """
    raw = read_bounded(path, MAX_JSON_BYTES, kind.CALLED)
    kind.refuse_others(raw, path)
    try:
        loaded = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ScheduleFileError(f"{path} is not a complete JSON file: {str(error)[:200]}") from error
    return PlainData(path=path, data=loaded)


def dump_yaml(data: Mapping[str, Any], header: str) -> str:
    """Write plain data as YAML, keys in the order given, between a comment and the mark of its end."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    body: str = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, explicit_end=True
    )
    return comment + body


def json_text(facts: object, indent: int | None = None) -> str:
    """Write facts as JSON; numbers that it doesn't have, infinite ones and NaN, are null."""
    return json.dumps(_finite(facts), indent=indent, allow_nan=False)


def _finite(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def shown(value: Any) -> str:
    """Shorten a value of a file for an error."""
    try:
        return f"{_SHORT.repr(value):.80}"
    except ValueError:
        return "a number of thousands of digits"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class _Loader(_BASE_LOADER):  # type: ignore[misc]  # the base is C's where there is one
    """Loader that refuses whole numbers that no file has: the largest can't even be written."""


def _whole_number(loader: Any, node: yaml.ScalarNode) -> int:
    number: int = loader.construct_yaml_int(node)
    if abs(number) > MAX_INTEGER:
        line = node.start_mark.line + 1
        raise ValueError(f"line {line} has a whole number of {number.bit_length()} bits")
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]  # the base is C's where there is one
    """Dumper that writes lists of numbers (shapes, strides) on one line."""


def _list(dumper: Any, items: Sequence[Any]) -> Any:
    numbers = bool(items) and all(isinstance(item, int) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=numbers)


for _kind in (list, tuple):
    _Dumper.add_representer(_kind, _list)


def read_bounded(path: str | PathLike[str], max_bytes: int, called: str) -> bytes:
    """Read a file of somebody else's.

    Raises:
        ScheduleFileError: it can't be read, or is too large to be what it is called.
    """
    try:
        if Path(path).is_dir():
            raise ScheduleFileError(f"{path} can't be read: it is a folder, not a {called}")
        with Path(path).open("rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise ScheduleFileError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > max_bytes:
        raise ScheduleFileError(f"{path} is larger than {max_bytes} bytes, which no {called} is")
    return raw


def _check_events(text: str, path: object) -> None:
    """Refuse what `yaml.load` would accept but no schedule file has, before anything is built of it."""
    keys: list[set[str] | None] = []
    """For each collection that is open, the keys seen in it; None for a list."""
    at_key = False
    complete = False
    for number, event in enumerate(yaml.parse(text, Loader=_BASE_LOADER)):
        if number > MAX_VALUES:
            raise ScheduleFileError(f"{path} has more than {MAX_VALUES} values, which no schedule file has")
        where = f"{path}, line {event.start_mark.line + 1 if event.start_mark else 0}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ScheduleFileError(f"{where}: anchors and aliases are not allowed")
        tag = getattr(event, "tag", None)
        if tag:
            raise ScheduleFileError(f"{where}: the tag {tag[:80]!r} is not allowed; a schedule file is plain data")
        if isinstance(event, yaml.ScalarEvent) and _has_control_character(event.value):
            raise ScheduleFileError(f"{where}: {shown(event.value)} has control characters, which are not allowed")
        if isinstance(event, yaml.NodeEvent) and at_key:
            _check_key(event, keys[-1], where)
        if isinstance(event, yaml.CollectionStartEvent):
            keys.append(set() if isinstance(event, yaml.MappingStartEvent) else None)
            if len(keys) > MAX_NESTING:
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
        raise _truncated(path)


def _truncated(path: object) -> ScheduleFileError:
    return ScheduleFileError(f"{path} is truncated: its last line should be {END!r}")


def _check_key(event: yaml.Event, seen: set[str] | None, where: str) -> None:
    assert seen is not None
    if not isinstance(event, yaml.ScalarEvent):
        raise ScheduleFileError(f"{where}: a name should stand before the colon")
    if event.value == "<<" and event.implicit[0]:
        raise ScheduleFileError(f"{where}: merge keys are not allowed")
    if event.value in seen:
        raise ScheduleFileError(f"{where}: {event.value[:80]!r} is there twice")
    seen.add(event.value)


def _has_control_character(text: str) -> bool:
    """Find what a terminal would obey, and what can't be written as UTF-8."""
    return not text.isprintable() and any(
        unicodedata.category(item) in ("Cc", "Cs") and item not in "\n\t" for item in text
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice in one object")
    for text in (*made, *made.values()):
        if isinstance(text, str) and _has_control_character(text):
            raise ValueError(f"{shown(text)} has control characters")
    return made
