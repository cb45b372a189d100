"""`monetlite measure`."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monetlite.cli.command_options import (
    ModelChoice,
    autocast_option,
    here_option,
    input_options,
    model_option,
    options_of,
    output_option,
    repeats_option,
)
from monetlite.cli.running import Terminal, check_writable, command, prints_aside
from monetlite.cli.subjects import build, chosen_device
from monetlite.core.errors import ModelError
from monetlite.core.options import PricingOptions

if TYPE_CHECKING:
    from monetlite.models import BuiltModel

MODES = ("inference", "training")
FORMATS = (".md", ".json", ".csv")


class BatchList(click.ParamType[tuple[int, ...]]):
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


class ModeList(click.ParamType[tuple[str, ...]]):
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


@command(
    "measure",
    model_option(),
    click.option("--batch", "batches", type=BatchList(), help="1,2,4; by default the model's own batch alone."),
    input_options,
    here_option,
    click.option(
        "--mode", "modes", type=ModeList(), default=",".join(MODES), show_default=True, help="One, or both."
    ),
    options_of(PricingOptions, "optimizer", help="Take this optimizer's step too, after each backward pass."),
    autocast_option("Run under torch.autocast to this type."),
    repeats_option(5, "Timed runs of each."),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Runs right before them that are not timed; a few more are made to measure memory.",
    ),
    output_option("Write the table too: a .md, .json or .csv file.", callback=_known_format),
)
def measure_command(
    terminal: Terminal,
    choice: ModelChoice,
    batches: tuple[int, ...] | None,
    device: str | None,
    modes: tuple[str, ...],
    optimizer: str | None,
    repeats: int,
    warmup: int,
    output: Path | None,
) -> None:
    """Measure the memory and time of a model on this machine, batch by batch, without any schedule.

    Running out of memory is a result. What larger batches would take is read off a line through those that ran.
    """
    from monetlite.checking.measurements import Mode
    from monetlite.checking.measuring import measure
    from monetlite.core.files.atomic import write_atomically
    from monetlite.reporting import text_measure

    if output is not None:
        check_writable(output)
    device = chosen_device(device, advice="measure on the cpu")

    def at(batch: int | None, meta: bool = False) -> "BuiltModel":
        return build(replace(choice, batch=batch), meta=meta)

    # Import what the model needs, so that loading it is timed without that; a model that can't be built on the
    # meta device may still be measured.
    with contextlib.suppress(ModelError):
        at(batches[0] if batches else None, meta=True)
    with terminal.line("starting") as progress, prints_aside():
        found = measure(
            at,
            batches or (None,),
            [Mode(mode) for mode in modes],
            device=device,
            optimizer=optimizer,
            autocast=choice.autocast,
            warmup=warmup,
            repeats=repeats,
            progress=progress,
        )
    assert choice.spec is not None
    found = replace(found, model=found.model or choice.spec)  # not even the smallest batch may have fitted
    if output is not None:
        write_atomically(output, text_measure.as_text(found, output.suffix.lower()))
    if terminal.as_json:
        terminal.print_json(text_measure.measurement_facts(found))
        return
    text_measure.print_measurements(terminal.console, found)
    if output is not None:
        click.echo(f"\nwritten to {output}")
