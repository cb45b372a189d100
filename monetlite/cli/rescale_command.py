"""`monetlite rescale`."""

from dataclasses import replace
from pathlib import Path

from monetlite.cli.command_options import (
    ModelChoice,
    output_option,
    schedule_argument,
    schedule_device_option,
    schedule_model_option,
    size_options,
)
from monetlite.cli.running import Terminal, command
from monetlite.cli.subjects import model_of, price_for
from monetlite.core.errors import ModelError


@command(
    "rescale",
    schedule_argument,
    schedule_model_option,
    size_options("schedule"),
    schedule_device_option,
    output_option("Write the rescaled schedule; by default nothing is written."),
)
def rescale_command(
    terminal: Terminal, schedule: str, choice: ModelChoice, device: str | None, output: Path | None
) -> None:
    """Show the peak and step time of a schedule at other sizes, or on another device.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB. Its choices stay as they are; `monetlite solve` may find
    better ones for the new sizes.
    """
    from monetlite.reporting.text_solve import schedule_facts
    from monetlite.reporting.text_zoo import print_rescaled
    from monetlite.zoo import load_schedule
    from monetlite.zoo.repricing import rescale

    given = load_schedule(schedule)
    choice = model_of(given, schedule, choice)
    device = device or (given.device if given.kind == "estimated" else None)
    if device is None:
        raise ModelError(f"{schedule} was measured; say what to measure or estimate: --device cpu, cuda, t4, ...")
    built, profiles = price_for(given, choice, device, terminal)
    found = replace(rescale(given, profiles[-1], profiles[0]), source=built.source)
    target = None if output is None else str(output)
    if output is not None:
        found.save(output)
    if terminal.as_json:
        terminal.print_json({"from": schedule_facts(given, schedule), "to": schedule_facts(found, target)})
    else:
        print_rescaled(terminal.console, given, found, target)
