"""Types of options. Each refuses a misspelt value at once, before torch is imported."""

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from monetlite.core.devices import require_device
from monetlite.core.errors import MonetliteError
from monetlite.core.units import check_budget, parse_budget
from monetlite.models import check_spelling

T = TypeVar("T")


class ReadBy(click.ParamType[T]):
    """A text that a function reads; its errors are told as those of the option."""

    def __init__(self, name: str, read: Callable[[str], T]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        try:
            return self._read(str(value))
        except MonetliteError as error:
            self.fail(str(error), param, ctx)


def _device(name: str) -> str:
    require_device(name)
    return name


def _budget(text: str, check: Callable[[str], object] = check_budget) -> str:
    check(text)
    return text


def _image_size(text: str) -> tuple[int, int]:
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(re.fullmatch("0*[1-9][0-9]{0,8}", side) for side in sides):
        raise click.BadParameter(f"{text!r} is not an image size; write 224 or 416x608")
    return int(sides[0]), int(sides[-1])


def share(text: str) -> float:
    """A share as people write it: `10%` or `0.1`."""
    try:
        number = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise click.BadParameter(f"{text!r} is not a share; write 10% or 0.1")
    return number


MODEL_NAME = ReadBy("MODEL", check_spelling)
"""`resnet50`, `hf:gpt2` or `path/to/file.py:build`."""
DEVICE_NAME = ReadBy("DEVICE", _device)
"""`cpu`, `cuda`, or the name of a device to estimate."""
BUDGET = ReadBy("SIZE", _budget)
"""`6GB`, or `50%` of plain training's peak."""
BUDGET_BYTES = ReadBy("SIZE", partial(_budget, check=parse_budget))
"""`6GB`, where plain training's peak is not known."""
IMAGE_SIZE = ReadBy("PIXELS|HxW", _image_size)
"""`224` or `416x608`."""


def choice_of(names: Iterable[str]) -> click.Choice[str]:
    """One of several names, in upper or lower case."""
    return click.Choice(list(names), case_sensitive=False)


class OutputFile(click.Path):
    """A file to write."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value) in ("", "-"):
            self.fail(
                f"{str(value)!r} is no file's name; results are written to a file, such as ./result", param, ctx
            )
        return super().convert(value, param, ctx)


class Integer(click.IntRange):
    """An integer within a range; errors don't call it a range."""

    name = "integer"


class Seconds(click.FloatRange):
    """A finite number of seconds, 0.1 at least."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds
