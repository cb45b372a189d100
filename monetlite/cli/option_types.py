"""Types of options. Each refuses a misspelt value at once, before torch is imported."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from monetlite.core.devices import require_device
from monetlite.core.errors import BudgetError, DeviceError, ModelError
from monetlite.core.units import parse_budget
from monetlite.models import check_spelling


class ModelName(click.ParamType[str]):
    """`resnet50`, `hf:gpt2` or `path/to/file.py:build`."""

    name = "MODEL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return check_spelling(str(value))
        except ModelError as error:
            self.fail(str(error), param, ctx)


class DeviceName(click.ParamType[str]):
    """`cpu`, `cuda`, or the name of a device to estimate."""

    name = "DEVICE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            require_device(str(value))
        except DeviceError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Budget(click.ParamType[str]):
    """`6GB`, and `50%` where plain training's peak is known."""

    name = "SIZE"

    def __init__(self, *, percent: bool = True) -> None:
        self._plain_peak_bytes = 2**40 if percent else None

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_budget(value, self._plain_peak_bytes)
        except BudgetError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class ImageSize(click.ParamType[tuple[int, int]]):
    """`224` or `416x608`."""

    name = "PIXELS|HxW"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sides = str(value).lower().replace("×", "x").split("x")
        if len(sides) > 2 or not all(side.isascii() and side.isdigit() and int(side) > 0 for side in sides):
            self.fail(f"{value!r} is not an image size; write 224 or 416x608", param, ctx)
        return int(sides[0]), int(sides[-1])


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


class Percentage(click.ParamType[float]):
    """`10%` or `0.1`."""

    def __init__(self, name: str = "PERCENT") -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 <= share < math.inf:
            self.fail(f"{value!r} is not a share; write 10% or 0.1", param, ctx)
        return share


class Seconds(click.FloatRange):
    """A finite number of seconds, 0.1 at least."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds
