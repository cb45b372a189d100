"""`monetlite profile`."""

from pathlib import Path

import click

from monetlite.cli.command_options import (
    ModelChoice,
    model_option,
    options_of,
    output_option,
    pricing_options,
    size_options,
)
from monetlite.cli.running import Terminal, check_writable, command
from monetlite.cli.subjects import price_layouts
from monetlite.core.graph import AS_TRACED
from monetlite.core.options import PricingOptions


@command(
    "profile",
    model_option(),
    size_options(),
    pricing_options,
    options_of(PricingOptions, "layout", default=AS_TRACED, help="Layout of images.", show_default=True),
    output_option("Write the profile to a file, which `monetlite solve --profile` takes on any machine."),
    click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="Operators to list."),
)
def profile_command(
    terminal: Terminal, choice: ModelChoice, pricing: PricingOptions, output: Path | None, top: int
) -> None:
    """Show what each operator of a model's training step costs."""
    from monetlite.reporting.text_profile import print_profile, profile_facts

    if output is not None:
        check_writable(output)
    built, (profile,) = price_layouts(choice, pricing, terminal, [pricing.layout or AS_TRACED])
    if output is not None:
        profile.save(output)
    if terminal.as_json:
        terminal.print_json(profile_facts(profile))
        return
    click.echo(built.description)
    print_profile(terminal.console, profile, top)
    if output is not None:
        click.echo(f"Written to {output}; monetlite solve --profile {output} --budget … solves for it.")
