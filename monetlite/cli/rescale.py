"""`monetlite rescale`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from monetlite.cli.opening import model_of
from monetlite.cli.options import common_options, size_options
from monetlite.cli.pricing import price_layouts
from monetlite.cli.running import guard, open_console
from monetlite.core.errors import ModelError


@click.command("rescale")
@click.argument("schedule")
@click.option(
    "--model", "spec", help="The model that it is for, where the file doesn't say how to build it: file.py:build."
)
@size_options
@click.option(
    "--device", help="cpu or cuda to measure here, or a device to estimate; by default the schedule's own."
)
@click.option("--output", type=click.Path(dir_okay=False), help="By default nothing is written.")
@common_options
def rescale_command(
    schedule: str,
    spec: str | None,
    device: str | None,
    output: str | None,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """What a schedule takes at other sizes, or on another device: its peak and step time there.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB. Its choices stay as they are; `monetlite solve` may find
    better ones for the new sizes.
    """

    def run() -> None:
        from monetlite.reporting.text_solve import schedule_facts
        from monetlite.reporting.text_zoo import print_rescaled
        from monetlite.zoo import load_schedule
        from monetlite.zoo.rescale import rescale

        console, quiet = open_console(as_json)
        given = load_schedule(schedule)
        model, sizes = model_of(given, schedule, spec, shape)
        priced = device or (given.device if given.kind == "estimated" else None)
        if priced is None:
            raise ModelError(
                f"{schedule} was measured; say what to measure or estimate: --device cpu, cuda, t4, ..."
            )
        layouts = list(dict.fromkeys(("as_traced", given.layout)))
        built, profiles = price_layouts(
            model, priced, given.optimizer, given.accumulate, given.autocast or None, quiet, sizes, layouts
        )
        found = replace(rescale(given, profiles[-1], profiles[0]), source=built.source)
        if output is not None:
            found.save(Path(output))
        if as_json:
            click.echo(json.dumps({"from": schedule_facts(given, schedule), "to": schedule_facts(found, output)}))
        else:
            print_rescaled(console, given, found, output)

    guard(run, debug)
