"""`monetlite measure`."""

import contextlib
from collections.abc import Callable
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


class CommaList(click.ParamType[tuple[Any, ...]]):
    """Values with commas between, none twice."""

    def __init__(self, name: str, read: Callable[[str], Any], problem: str) -> None:
        self.name, self._read, self._problem = name, read, problem

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        found = []
        for part in str(value).split(","):
            item = self._read(part.strip())
            if item is None:
                self.fail(f"{part!r} is {self._problem}", param, ctx)
            if item in found:
                self.fail(f"{item} is there twice; write it once", param, ctx)
            found.append(item)
        return tuple(found)


def _batch(text: str) -> int | None:
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return size or None


BATCHES = CommaList("N,N,...", _batch, "not a batch size; write positive numbers: 1,2,4")
MODE_LIST = CommaList(
    "inference,training",
    lambda text: text if text in MODES else None,
    "neither inference nor training",
)


def _known_format(_: click.Context, __: click.Parameter, output: Path | None) -> Path | None:
    """Refuse a file that no table can be written to, before minutes are spent on one."""
    if output is not None and output.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{output} ends in none of {', '.join(FORMATS)}")
    return output


@command(
    "measure",
    model_option(),
    click.option("--batch", "batches", type=BATCHES, help="1,2,4; by default the model's own batch alone."),
    input_options,
    here_option,
    click.option(
        "--mode", "modes", type=MODE_LIST, default=",".join(MODES), show_default=True, help="One, or both."
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
        at(min(batches) if batches else None, meta=True)
    with terminal.line("starting") as progress, prints_aside():
        found = measure(
            at,
            sorted(batches) if batches else (None,),
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
