"""Documents: kinds of files, each described once by a msgspec type.

Reading, validating, writing and the JSON Schema of a kind of file all follow from its description.
"""

import dataclasses
import inspect
import types
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from monetlite.core.files.plain_data import Document, Place, PlainData, shown

AnyDocument = TypeVar("AnyDocument", bound=Document)


def read_document(file: PlainData, kind: type[AnyDocument]) -> AnyDocument:
    """Convert a file's contents to the document they should be.

    Fields that the description lacks are skipped: a later monetlite may have written them.

    Raises:
        ScheduleFileError: another format or version, or a field that is missing or not as described; says which
            field, where, and what was expected.
    """
    data, tag = file.data, kind.__struct_config__.tag
    if not isinstance(data, dict):
        raise file.error((), f"should be a mapping of names, not {type(data).__name__}")
    if data.get("format") != tag:
        problem = f"is {shown(data['format'])}; it should be {tag!r}" if "format" in data else "is missing"
        raise file.error(("format",), problem)
    if kind.VERSIONS:
        version, newest = data.get("version"), kind.VERSIONS[-1]
        if type(version) is not int or version not in kind.VERSIONS:
            reads = f"versions {kind.VERSIONS[0]} to {newest}" if len(kind.VERSIONS) > 1 else f"version {newest}"
            raise file.error(
                ("version",), f"is {shown(version)}; this monetlite reads {reads}. {kind.REMEDY}".strip()
            )
        data = {**data, "version": newest}
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:
        place, problem = _problem(data, kind, ())
        raise file.error(place, problem) from None


def plain_data(document: Document) -> dict[str, Any]:
    """A document as dictionaries, lists, texts, numbers, booleans and None."""
    data: dict[str, Any] = msgspec.to_builtins(document, enc_hook=str)  # torch's version is a subclass of str
    return data


def common_fields(kind: Any, *objects: Any) -> dict[str, Any]:
    """The attributes of objects that a described type or a dataclass has, too, by name."""
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else kind.__dataclass_fields__
    return {name: getattr(item, name) for item in objects for name in names if hasattr(item, name)}


def unknown_fields(data: Any, kind: Any) -> Iterator[str]:
    """The places of fields that a description lacks."""
    for place in _unknown(data, kind, ()):
        yield ".".join(map(str, place))


def json_schema(kind: type[Document], title: str, description: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a kind of file. It allows no fields beside those described."""
    schema: dict[str, Any] = msgspec.json.schema(kind)
    for item in schema["$defs"].values():
        item.pop("title", None)
        if "description" in item:
            item["description"] = inspect.cleandoc(item["description"])  # Python 3.13 does so by itself
        if "properties" in item:
            item["additionalProperties"] = False
    head: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
    }
    body: dict[str, Any] = schema["$defs"].pop(kind.__name__)
    return body | head | {"$defs": schema["$defs"]}


def _problem(data: Any, kind: Any, place: Place) -> tuple[Place, str]:
    """Find the innermost value that is not as described, and the problem with it."""
    for step, item, item_kind in _items(data, kind):
        try:
            msgspec.convert(item, item_kind)
        except msgspec.ValidationError:
            return _problem(item, item_kind, (*place, step))
    try:
        msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at ")[0]
    if "missing required field" in message:
        return (*place, message.split("`")[1]), "is missing"
    allowed = _allowed(kind)
    if allowed:
        return place, f"is {shown(data)}; it should be {allowed}"
    for name, words in _WORDS.items():
        message = message.replace(f"`{name}", f"`{words}")
    expected = message.partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return place, f"should be {expected}, not {shown(data)}"


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping of names",
}


def _allowed(kind: Any) -> str:
    """Name the values that a description allows, if it lists them."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((item.title for item in arguments[1:] if item.title), "") or _allowed(arguments[0])
    if origin in (Union, types.UnionType):
        return next(filter(None, map(_allowed, arguments)), "")
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    return f"one of {', '.join(kind)}" if isinstance(kind, type) and issubclass(kind, Enum) else ""


def _items(data: Any, kind: Any) -> Iterator[tuple[str | int, Any, Any]]:
    """Items inside a value of some kind: (name or position, item, the item's kind)."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _items(data, arguments[0])
    elif origin in (Union, types.UnionType):
        for option in arguments:
            yield from _items(data, option)
    elif isinstance(data, dict) and (fields := _fields(kind)):
        yield from ((name, data[name], fields[name]) for name in fields if name in data)
    elif isinstance(data, dict) and origin is dict:
        yield from ((name, item, arguments[1]) for name, item in data.items())
    elif isinstance(data, list) and origin is tuple:
        kinds = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
        yield from ((number, *pair) for number, pair in enumerate(zip(data, kinds, strict=False)))


def _fields(kind: Any) -> dict[str, Any]:
    """The fields of a described mapping by their names in a file, and their kinds."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {item.encode_name: item.type for item in msgspec.structs.fields(kind)}
    return get_type_hints(kind, include_extras=True) if dataclasses.is_dataclass(kind) else {}


def _unknown(data: Any, kind: Any, place: Place) -> Iterator[Place]:
    for option in get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,):
        if isinstance(data, dict) and (fields := _fields(option)):
            head = {"format"} if issubclass(option, Document) else set()
            yield from ((*place, name) for name in data if name not in fields.keys() | head)
    for step, item, item_kind in _items(data, kind):
        yield from _unknown(item, item_kind, (*place, step))
