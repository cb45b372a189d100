"""`monetlite measure`."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monetlite.cli.options import INPUT_OPTIONS, MODEL_OPTION, autocast_option, common_options, optimizer_option
from monetlite.cli.pricing import shape_of
from monetlite.cli.running import Telling, check_folder, guard, open_console, prints_aside
from monetlite.core.errors import ModelError

if TYPE_CHECKING:
    from monetlite.models import BuiltModel

MODES = ("inference", "training")
FORMATS = (".md", ".json", ".csv")


class Batches(click.ParamType[tuple[int, ...]]):
    """`1,2,4`: batch sizes, none twice."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        found = []
        for part in str(value).split(","):
            text = part.strip()
            if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
                self.fail(f"{part!r} is not a batch size; write positive numbers: 1,2,4", param, ctx)
            if int(text) in found:
                self.fail(f"{text} is there twice; write each batch size once", param, ctx)
            found.append(int(text))
        return tuple(sorted(found))


class Modes(click.ParamType[tuple[str, ...]]):
    """`inference`, `training`, or both with a comma between them."""

    name = "inference,training"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        found = [part.strip() for part in str(value).split(",")]
        for part in found:
            if part not in MODES:
                self.fail(f"{part!r} is neither inference nor training", param, ctx)
            if found.count(part) > 1:
                self.fail(f"{part} is there twice", param, ctx)
        return tuple(found)


def _known_format(_: click.Context, __: click.Parameter, output: Path | None) -> Path | None:
    """Refuse a file that no table can be written to, before minutes are spent on one."""
    if output is not None and output.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{output} ends in none of {', '.join(FORMATS)}")
    return output


def _options(function: Callable[..., None]) -> Callable[..., None]:
    """What to measure of a model, and how."""
    for option in reversed(
        (
            MODEL_OPTION,
            click.option(
                "--batch", "batches", type=Batches(), help="1,2,4; by default the model's own batch alone."
            ),
            *INPUT_OPTIONS,
            click.option(
                "--device",
                type=click.Choice(["cpu", "cuda"]),
                help="By default the GPU if there is one.",
            ),
            click.option(
                "--mode", "modes", type=Modes(), default=",".join(MODES), show_default=True, help="One, or both."
            ),
            optimizer_option("Take this optimizer's step too, after each backward pass."),
            autocast_option("Run under torch.autocast to this type."),
            click.option(
                "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs of each."
            ),
            click.option(
                "--warmup",
                type=click.IntRange(min=0),
                default=1,
                show_default=True,
                help="Runs right before them that are not timed; a few more are made to measure memory.",
            ),
            click.option(
                "--output",
                type=click.Path(dir_okay=False, path_type=Path),
                callback=_known_format,
                help="Write the table too: a .md, .json or .csv file.",
            ),
        )
    ):
        function = option(function)
    return function


@click.command("measure")
@_options
@common_options
def measure_command(
    spec: str,
    batches: tuple[int, ...] | None,
    device: str | None,
    modes: tuple[str, ...],
    optimizer: str | None,
    autocast: str | None,
    repeats: int,
    warmup: int,
    output: Path | None,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Measure the memory and time of a model on this machine, batch by batch, without any schedule.

    Running out of memory is a result. What larger batches would take is read off a line through those that ran.
    """

    def run() -> None:
        import torch

        from monetlite.checking.measurements import Mode
        from monetlite.checking.measuring import measure
        from monetlite.core.errors import DeviceError
        from monetlite.core.files.atomic import write_atomically
        from monetlite.models import build_model
        from monetlite.reporting import text_measure as reporting

        if output is not None:
            check_folder(output)
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if chosen == "cuda" and not torch.cuda.is_available():
            raise DeviceError("device 'cuda': this machine has no GPU that torch can use; measure on the cpu")
        console, quiet = open_console(as_json)

        def build(batch: int | None, meta: bool = False) -> "BuiltModel":
            return build_model(spec, meta=meta, **shape_of({**shape, "batch": batch}))

        # Import what the model needs, so that loading it is timed without that; a model that can't be built on the
        # meta device may still be measured.
        with contextlib.suppress(ModelError):
            build(batches[0] if batches else None, meta=True)
        with Telling(quiet) as progress, prints_aside():
            found = measure(
                build,
                batches or (None,),
                [Mode(mode) for mode in modes],
                device=chosen,
                optimizer=optimizer,
                autocast=autocast,
                warmup=warmup,
                repeats=repeats,
                progress=progress,
            )
        found = replace(found, model=found.model or spec)  # not even the smallest batch may have fitted
        if output is not None:
            write_atomically(output, reporting.as_text(found, output.suffix.lower()))
        if as_json:
            click.echo(json.dumps(reporting.measurement_facts(found)))
        else:
            reporting.print_measurements(console, found)
            if output is not None:
                click.echo(f"\nwritten to {output}")

    guard(run, debug)
