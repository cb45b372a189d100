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


class Share(click.ParamType[float]):
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


def finite(_: click.Context, __: click.Parameter, value: float) -> float:
    """Refuse infinite and undefined numbers of seconds."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


INPUT_OPTIONS = (
    click.option("--input-size", type=ImageSize(), help="Image height and width, in pixels."),
    click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sequence."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of weights and inputs."),
)
LARGEST = 2**31 - 1
"""Of batches, and of seeds."""
SEED = click.IntRange(0, LARGEST)
SIZE_OPTIONS = (
    click.option("--batch", type=click.IntRange(1, LARGEST), help="Batch size; by default the model's own."),
    *INPUT_OPTIONS,
)
MODEL_HELP = (
    "A built-in model (resnet50, vgg16, googlenet, mobilenet_v2, unet), torchvision:NAME, "
    "timm:NAME, hf:NAME, or your own: path/to/file.py:build or package.module:build."
)
MODEL_OPTION = click.option("--model", "spec", required=True, help=MODEL_HELP)


def time_limit_option(seconds: float, help: str) -> Callable[[_Function], _Function]:
    """How long to look for schedules."""
    return click.option(
        "--time-limit",
        type=click.FloatRange(min=0.1),
        callback=finite,
        default=seconds,
        show_default=True,
        help=help,
    )


def tolerance_option(help: str) -> Callable[[_Function], _Function]:
    """How far results may be from plain training's."""
    return click.option(
        "--tolerance", type=click.FloatRange(min=0, max=1, max_open=True), default=0.0, show_default=True, help=help
    )


def reserved_option(function: _Function) -> _Function:
    """Whether a budget is of what a GPU's allocator reserves."""
    return click.option(
        "--reserved",
        is_flag=True,
        help="The budget is of what torch's CUDA allocator reserves, as nvidia-smi shows, in a training script "
        "that calls monetlite.limit_reserved(BUDGET).",
    )(function)


def optimizer_option(help: str) -> Callable[[_Function], _Function]:
    """Whose step is part of training."""
    return click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam", "adamw"]), help=help)


def autocast_option(help: str) -> Callable[[_Function], _Function]:
    """What `torch.autocast` converts to."""
    return click.option("--autocast", type=click.Choice(["bfloat16", "float16"]), help=help)


def size_options(function: _Function) -> _Function:
    """In what shapes."""
    for option in reversed(SIZE_OPTIONS):
        function = option(function)
    return function


def model_options(function: _Function) -> _Function:
    """What model, in what shapes."""
    for option in reversed((MODEL_OPTION, *SIZE_OPTIONS)):
        function = option(function)
    return function


def model_or_profile_options(function: _Function) -> _Function:
    """What model, in what shapes; or files that say that, and what it costs."""
    profile = click.option(
        "--profile",
        "profiles",
        multiple=True,
        type=click.Path(dir_okay=False),
        help="A file of `monetlite profile --output`, from wherever it was measured, in place of --model. One for "
        "each layout.",
    )
    for option in reversed((click.option("--model", "spec", help=MODEL_HELP), profile, *SIZE_OPTIONS)):
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
            optimizer_option("Count this optimizer's state in the peak."),
            autocast_option("Train under torch.autocast to this type."),
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
