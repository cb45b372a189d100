"""`monetlite profile`."""

import json
from pathlib import Path
from typing import Any

import click

from monetlite.cli.options import common_options, cost_options, model_options
from monetlite.cli.pricing import price_layouts
from monetlite.cli.running import check_folder, guard, open_console


@click.command("profile")
@model_options
@cost_options
@click.option(
    "--layout",
    type=click.Choice(["as_traced", "channels_last"]),
    default="as_traced",
    show_default=True,
    help="Of images.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    help="Write it all to a file, which `monetlite solve --profile` takes on any machine.",
)
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Operators to list.")
@common_options
def profile_command(
    spec: str,
    device: str | None,
    optimizer: str | None,
    accumulate: bool,
    autocast: str | None,
    layout: str,
    output: str | None,
    top: int,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Show what each operator of a model's training step costs."""

    def run() -> None:
        from monetlite.reporting.text_profile import print_profile, profile_facts

        console, quiet = open_console(as_json)
        if output is not None:
            check_folder(Path(output))
        built, (profile,) = price_layouts(spec, device, optimizer, accumulate, autocast, quiet, shape, [layout])
        if output is not None:
            profile.save(output)
        if as_json:
            click.echo(json.dumps(profile_facts(profile)))
        else:
            click.echo(built.description)
            print_profile(console, profile, top)
            if output is not None:
                click.echo(f"Written to {output}; monetlite solve --profile {output} --budget … solves for it.")

    guard(run, debug)
