"""Options that several commands have."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

DEFAULT_ESTIMATE = "rtx-3090"
"""What costs are estimated for when nobody says and there is no GPU: a common 24 GB card."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def finite(_: click.Context, __: click.Parameter, value: float) -> float:
    """Refuse infinite and undefined numbers of seconds."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


def model_options(function: _Function) -> _Function:
    """What model, in what shapes."""
    for option in reversed(
        (
            click.option(
                "--model",
                "spec",
                required=True,
                help="A built-in model (resnet50, vgg16, googlenet, mobilenet_v2, unet), torchvision:NAME, "
                "timm:NAME, hf:NAME, or your own: path/to/file.py:build or package.module:build.",
            ),
            click.option("--batch", type=click.IntRange(min=1), help="Batch size; by default the model's own."),
            click.option("--input-size", type=ImageSize(), help="Image height and width, in pixels."),
            click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence."),
            click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of weights and inputs."),
        )
    ):
        function = option(function)
    return function


def cost_options(function: _Function) -> _Function:
    """What its operators cost."""
    for option in reversed(
        (
            click.option(
                "--device",
                help="cpu or cuda to measure here, or a device to estimate (a100-40gb, rtx-4090, t4, …). "
                f"By default the GPU if there is one, else an estimate for {DEFAULT_ESTIMATE}.",
            ),
            click.option(
                "--optimizer",
                type=click.Choice(["sgd", "momentum", "adam", "adamw"]),
                help="Count this optimizer's state in the peak.",
            ),
            click.option(
                "--autocast",
                type=click.Choice(["bfloat16", "float16"]),
                help="Train under torch.autocast to this type.",
            ),
            click.option(
                "--accumulate",
                is_flag=True,
                help="Count gradients that are there when a step begins: gradient accumulation, or "
                "zero_grad(set_to_none=False).",
            ),
        )
    ):
        function = option(function)
    return function


def common_options(function: _Function) -> _Function:
    """How results and errors are shown."""
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(
        function
    )
    return click.option("--debug", is_flag=True, help="Show the traceback of an error.")(function)
