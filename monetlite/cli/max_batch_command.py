"""`monetlite max-batch`."""

from dataclasses import replace

import click

from monetlite.cli.command_options import (
    ModelChoice,
    model_option,
    options_of,
    pricing_options,
    size_options,
    time_limit_option,
)
from monetlite.cli.running import Terminal, command
from monetlite.cli.subjects import price_layouts
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.options import PricingOptions, SolvingOptions

DEFAULT_BATCH = 32
"""Batch to begin from."""
STEP, SMALL_BATCH = 8, 16
"""Batches are multiples of the first; if the largest is below the second, any."""


@command(
    "max-batch",
    model_option(),
    size_options(),
    click.option("--budget", required=True, help="Peak of the whole step in bytes: 16GB, 16GiB."),
    pricing_options,
    options_of(SolvingOptions, "tolerance", "reserved", "seed"),
    time_limit_option(120.0, "Seconds for searching and solving; tracing each batch comes on top."),
    click.option(
        "--multiple-of",
        type=click.IntRange(min=1),
        help=f"Look at multiples of this batch only; by default {STEP}, or 1 where the largest is below "
        f"{SMALL_BATCH}.",
    ),
)
def max_batch_command(
    terminal: Terminal,
    choice: ModelChoice,
    budget: str,
    pricing: PricingOptions,
    solving: SolvingOptions,
    multiple_of: int | None,
) -> None:
    """Find the largest batch that trains within a memory budget, and the throughput on the way.

    --batch says where to begin. Nothing is run out of memory: each batch is traced and bounded.
    """
    from monetlite.core.units import parse_budget
    from monetlite.planning.batches import BatchLimit, largest_batch
    from monetlite.reporting.text_solve import batches_facts, print_batches

    budget_bytes = parse_budget(budget)
    known: dict[int, Profile] = {}

    def priced(batch: int) -> Profile:
        if batch not in known:
            _, (known[batch],) = price_layouts(replace(choice, batch=batch), pricing, terminal, solving=solving)
        return known[batch]

    def progress(batch: int, found: str) -> None:
        if not terminal.quiet:
            click.echo(f"batch {batch}: {found}", err=True)

    def search(step: int) -> BatchLimit:
        first = choice.batch or DEFAULT_BATCH
        return largest_batch(priced, budget_bytes, solving, first=first, step=step, progress=progress)

    try:
        found = search(multiple_of or STEP)
    except InfeasibleBudget:
        if multiple_of is not None:
            raise
        found = search(1)
    else:
        if multiple_of is None and found.largest < SMALL_BATCH:
            found = search(1)
    profile = known[found.largest]
    if terminal.as_json:
        terminal.print_json(batches_facts(profile.graph.name, profile, found))
    else:
        print_batches(terminal.console, profile.graph.name, profile, found)
