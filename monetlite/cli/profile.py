"""`monetlite profile`."""

import json
from typing import Any

import click

from monetlite.cli.options import common_options, cost_options, model_options
from monetlite.cli.pricing import price
from monetlite.cli.running import guard, open_console


@click.command("profile")
@model_options
@cost_options
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Operators to list.")
@common_options
def profile_command(
    spec: str,
    device: str | None,
    optimizer: str | None,
    accumulate: bool,
    autocast: str | None,
    top: int,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Show what each operator of a model's training step costs."""

    def run() -> None:
        from monetlite.reporting.profile import print_profile, profile_facts

        console, quiet = open_console(as_json)
        built, profile = price(spec, device, optimizer, accumulate, autocast, quiet, shape)
        if as_json:
            click.echo(json.dumps(profile_facts(profile)))
        else:
            click.echo(built.description)
            print_profile(console, profile, top)

    guard(run, debug)
