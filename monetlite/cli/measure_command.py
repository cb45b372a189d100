"""`monetlite measure`: a model's memory and time on this machine, or what each of its operators costs."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from monetlite.cli.command_options import (
    ModelChoice,
    autocast_option,
    input_options,
    model_option,
    options_of,
    output_option,
    pricing_options,
    repeats_option,
    size_options,
)
from monetlite.cli.option_types import DEVICE_NAME, Integer, ReadBy
from monetlite.cli.running import check_writable, command, only_for, prints_aside
from monetlite.cli.subjects import build, chosen_device, price_layouts
from monetlite.cli.terminal import Terminal
from monetlite.core.command_lines import command_line
from monetlite.core.errors import ModelError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.graph import AS_TRACED
from monetlite.core.options import PricingOptions
from monetlite.models import BuiltModel

MODES = ("inference", "training")
FORMATS = (".md", ".json", ".csv")


def _listed(text: str, read: Callable[[str], Any], problem: str) -> tuple[Any, ...]:
    """Values with commas between, none twice. `read` returns None for what is no value."""
    found = []
    for part in text.split(","):
        item = read(part.strip())
        if item is None:
            raise click.BadParameter(f"{part!r} is {problem}")
        if item in found:
            raise click.BadParameter(f"{item} is there twice; write it once")
        found.append(item)
    return tuple(found)


def _batch(text: str) -> int | None:
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return size or None


BATCHES = ReadBy(
    "N,N,...", partial(_listed, read=_batch, problem="not a batch size; write positive numbers: 1,2,4")
)
MODE_LIST = ReadBy(
    "inference,training",
    partial(_listed, read=lambda text: text if text in MODES else None, problem="neither inference nor training"),
)


OPERATORS_ONLY = ("accumulate", "step_in_backward", "layout", "outputs", "top")
WHOLE_ONLY = ("modes", "repeats", "warmup")
"""Parameters of `--operators`, and of measuring without it."""
_top_option = click.option("--top", type=Integer(min=1), default=15, show_default=True, help="Operators to list.")
_layout_option = options_of(
    PricingOptions, "layout", default=AS_TRACED, help="Form of the step, as for solve.", show_default=True
)


@command(
    "measure",
    model_option(),
    click.option("--batch", "batches", type=BATCHES, help="1,2,4; by default the model's own batch alone."),
    input_options,
    click.option(
        "--device",
        type=DEVICE_NAME,
        help="cpu or cuda, by default the GPU if there is one; with --operators also a device to estimate.",
    ),
    click.option(
        "--mode", "modes", type=MODE_LIST, default=",".join(MODES), show_default=True, help="One, or both."
    ),
    options_of(PricingOptions, "optimizer", help="Take this optimizer's step too, after each backward pass."),
    autocast_option("Run under torch.autocast to this type."),
    repeats_option(5, "Timed runs of each."),
    click.option(
        "--warmup",
        type=Integer(min=0),
        default=1,
        show_default=True,
        help="Runs right before them that are not timed; a few more are made to measure memory.",
    ),
    output_option("Write the table too: a .md, .json or .csv file. With --operators: a file for solve --profile."),
    click.option("--operators", is_flag=True, help="Show what each operator of a training step costs instead."),
    _top_option,
    options_of(PricingOptions, "accumulate", "step_in_backward"),
    _layout_option,
    options_of(PricingOptions, "outputs"),
    rare=OPERATORS_ONLY,
    rare_heading="Options of --operators",
)
def measure_command(
    terminal: Terminal,
    choice: ModelChoice,
    pricing: PricingOptions,
    batches: tuple[int, ...] | None,
    modes: tuple[str, ...],
    repeats: int,
    warmup: int,
    output: Path | None,
    operators: bool,
    top: int,
) -> None:
    """Measure the memory and time of a model on this machine, batch by batch, without any schedule.

    Running out of memory is a result. What larger batches would take is read off a line through those that ran.
    """
    if operators:
        only_for("measuring without --operators", *WHOLE_ONLY)
        if batches and len(batches) > 1:
            raise click.UsageError("--operators is for one --batch")
        profile(terminal, replace(choice, batch=batches[0] if batches else None), pricing, output, top)
        return
    only_for("measure --operators", *OPERATORS_ONLY)
    if "training" not in modes:
        only_for("--mode training", "optimizer")
    if pricing.device not in (None, "cpu", "cuda"):
        raise click.BadParameter(
            f"{pricing.device!r} is neither cpu nor cuda; other devices are for --operators", param_hint="--device"
        )
    if output is not None:
        if output.suffix.lower() not in FORMATS:
            raise click.BadParameter(f"{output} ends in none of {', '.join(FORMATS)}", param_hint="--output")
        check_writable(output)
    device = chosen_device(pricing.device, terminal, advice="measure on the cpu")
    from monetlite.checking.measurements import Mode
    from monetlite.checking.measuring import ModelMeasurer
    from monetlite.reporting import text_measure

    def at(batch: int | None) -> BuiltModel:
        return build(replace(choice, batch=batch), None)

    # Import what the model needs, so that loading it is timed without that; a model that can't be built on the
    # meta device may still be measured.
    with contextlib.suppress(ModelError):
        build(replace(choice, batch=min(batches) if batches else None), terminal, meta=True)
    with terminal.line("starting") as progress, prints_aside():
        measurer = ModelMeasurer(
            at,
            device=device,
            optimizer=pricing.optimizer,
            autocast=choice.autocast,
            warmup=warmup,
            repeats=repeats,
            say=progress,
        )
        found = measurer.run(sorted(batches) if batches else (None,), [Mode(mode) for mode in modes])
    assert choice.spec is not None
    found = replace(found, model=found.model or choice.spec)  # not even the smallest batch may have fitted
    if terminal.as_json:
        terminal.print_json(text_measure.measurement_facts(found))
    else:
        text_measure.print_measurements(terminal.console, found)
    if output is not None:
        write_atomically(output, text_measure.as_text(found, output.suffix.lower()))
        if not terminal.as_json:
            click.echo(f"\nwritten to {output}")


def profile(
    terminal: Terminal, choice: ModelChoice, pricing: PricingOptions, output: Path | None, top: int
) -> None:
    """Show what each operator of a model's training step costs."""
    from monetlite.reporting.text_measure import print_profile, profile_facts

    if output is not None:
        check_writable(output)
    built, (priced,) = price_layouts(choice, pricing, terminal, [pricing.layout or AS_TRACED])
    if output is not None:
        priced.save(output)
    if terminal.as_json:
        terminal.print_json(profile_facts(priced))
        return
    terminal.console.print(built.description, markup=False)
    print_profile(terminal.console, priced, top)
    if output is not None:
        command = command_line("solve", {"profile": output})
        click.echo(f"Written to {output}; {command} --budget … solves for it.")


profile_command = command(
    "profile",
    model_option(),
    size_options(),
    pricing_options,
    _layout_option,
    options_of(PricingOptions, "outputs"),
    output_option("Write the profile to a file, which `monetlite solve --profile` takes on any machine."),
    _top_option,
    now="measure --operators",
)(profile)
