"""The JSON Schema of schedule files, for other people's tools, and checking a file against it."""

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from os import PathLike
from typing import Any

from monetlite.core.files.migrations import migrate
from monetlite.core.files.safe_yaml import load_yaml


@cache
def schema() -> dict[str, Any]:
    """The schema (JSON Schema, draft 2020-12) of the version that is written now."""
    text = resources.files(__package__).joinpath("schedule.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def schema_problems(path: str | PathLike[str]) -> Iterator[str]:
    """Where a file departs from the schema, once brought forward to the present version.

    Raises:
        ScheduleFileError: it is not YAML of our kind at all.
    """
    from jsonschema import Draft202012Validator

    data = load_yaml(path)
    data = migrate(data) if isinstance(data, dict) else data
    for error in Draft202012Validator(schema()).iter_errors(data):
        where = ".".join(map(str, error.absolute_path)) or "the file"
        yield f"{where}: {error.message:.200}"


__all__ = ["schema", "schema_problems"]
