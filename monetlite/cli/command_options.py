"""Options of the commands. Those of pricing and solving are made from the fields of the option dataclasses."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import click

from monetlite.cli.option_types import DEVICE_NAME, IMAGE_SIZE, MODEL_NAME, Integer, OutputFile, Seconds, choice_of
from monetlite.core.options import PricingOptions, SolvingOptions

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
DEFAULT_ESTIMATE = "rtx-3090"
"""Device to estimate by default where there is no GPU: a common 24 GB card."""
MAX_INT32 = 2**31 - 1
"""Largest batch and seed that torch takes."""
SEED = Integer(0, MAX_INT32)
ESTIMATED = "cpu or cuda to measure here, or a device to estimate"


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The model that a command is given: its name, sizes (None: the model's own), and dtypes."""

    spec: str | None = None
    batch: int | None = None
    input_size: tuple[int, int] | None = None
    sequence_length: int | None = None
    dtype: str | None = None
    autocast: str | None = None


_TYPES: dict[str, click.ParamType[Any]] = {
    "device": DEVICE_NAME,
    "tolerance": click.FloatRange(min=0, max=1, max_open=True),
    "gap": click.FloatRange(min=0, max=1, max_open=True),
    "time_limit": Seconds(min=0.1),
    "seed": SEED,
}


def with_options(*options: Decorator) -> Decorator:
    """Several options as one decorator, shown in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def options_of(kind: type[Any], *names: str, **changes: Any) -> Decorator:
    """Make options from fields of a dataclass: flags, types, defaults and explanations.

    Args:
        kind: `PricingOptions` or `SolvingOptions`.
        names: of the fields; all of them by default.
        changes: settings of `click.option` that are other for this command.
    """
    made = []
    for item in fields(kind):
        if names and item.name not in names:
            continue
        settings: dict[str, Any] = {"help": item.metadata["help"], "default": item.default}
        if isinstance(item.default, bool):
            settings["is_flag"] = True
        else:
            choices = item.metadata["choices"]
            settings["type"] = choice_of(choices) if choices else _TYPES.get(item.name)
            settings["show_default"] = item.default is not None
        made.append(click.option(f"--{item.name.replace('_', '-')}", item.name, **{**settings, **changes}))
    return with_options(*made)


input_options = with_options(
    click.option("--input-size", type=IMAGE_SIZE, help="Image height and width, in pixels."),
    click.option("--sequence-length", type=Integer(min=1), help="Tokens of a sequence."),
    click.option(
        "--dtype",
        type=choice_of(["float32", "bfloat16"]),
        help="Dtype of weights and inputs.",
    ),
)


BATCH_OF_SCHEDULE = "the schedule's own, or that of path/to/file.py:build"


def size_options(batch: str = "the model's own") -> Decorator:
    """Sizes of the inputs, with the batch that the words say by default."""
    option = click.option("--batch", type=Integer(1, MAX_INT32), help=f"Batch size; by default {batch}.")
    return with_options(option, input_options)


def model_option(*, required: bool = True) -> Decorator:
    """Name of the model."""
    return click.option(
        "--model",
        "spec",
        type=MODEL_NAME,
        required=required,
        help="A built-in model (resnet18, resnet50, vgg16, googlenet, mobilenet_v2, unet, …), torchvision:NAME, "
        "timm:NAME, hf:NAME, or your own: path/to/file.py:build or package.module:build.",
    )


schedule_argument = click.argument("schedule")
schedule_model_option = click.option(
    "--model",
    "spec",
    type=MODEL_NAME,
    help="Model of the schedule, if the file doesn't say how to build it: path/to/file.py:build.",
)
schedule_device_option = click.option(
    "--device", type=DEVICE_NAME, help=f"{ESTIMATED}; by default the schedule's own."
)
here_option = click.option("--device", type=choice_of(["cpu", "cuda"]), help="By default the GPU if there is one.")


def autocast_option(help: str = "Train under torch.autocast to this type.") -> Decorator:
    """Dtype of `torch.autocast`."""
    return click.option("--autocast", type=choice_of(["bfloat16", "float16"]), help=help)


pricing_options = with_options(
    options_of(
        PricingOptions,
        "device",
        help=f"{ESTIMATED} (a100-40gb, rtx-4090, t4, …). By default the GPU if there is one, else an estimate for "
        f"{DEFAULT_ESTIMATE}.",
    ),
    options_of(PricingOptions, "optimizer", "accumulate", "step_in_backward"),
    autocast_option(),
)


def time_limit_option(seconds: float, help: str) -> Decorator:
    """A time limit with this command's own default."""
    return options_of(SolvingOptions, "time_limit", default=seconds, help=help)


def repeats_option(times: int, help: str = "Timed steps of each.") -> Decorator:
    """Number of timed runs."""
    return click.option("--repeats", type=Integer(min=1), default=times, show_default=True, help=help)


force_option = click.option("--force", is_flag=True, help="Replace files that are there.")


def output_option(help: str, **settings: Any) -> Decorator:
    """A file to write, and leave to replace one."""
    output = click.option("--output", type=OutputFile(), help=help, **settings)
    return with_options(output, force_option)
