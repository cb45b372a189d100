"""`monetlite max-batch`."""

import json
from typing import Any

import click

from monetlite.cli.options import (
    SEED,
    common_options,
    cost_options,
    model_options,
    reserved_option,
    time_limit_option,
    tolerance_option,
)
from monetlite.cli.pricing import price
from monetlite.cli.running import guard, open_console


@click.command("max-batch")
@model_options
@click.option("--budget", required=True, help="The whole step's peak, as for solve, in bytes: 16GB, 16GiB.")
@cost_options
@tolerance_option("As for solve.")
@reserved_option
@time_limit_option(120.0, "Seconds for searching and solving; tracing each batch comes on top.")
@click.option(
    "--multiple-of",
    type=click.IntRange(min=1),
    help="Look at multiples of this batch only; by default 8, or 1 where the largest is below 16.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the search.")
@common_options
def max_batch_command(
    spec: str,
    budget: str,
    device: str | None,
    optimizer: str | None,
    accumulate: bool,
    autocast: str | None,
    tolerance: float,
    reserved: bool,
    time_limit: float,
    multiple_of: int | None,
    seed: int,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Find the largest batch that trains within a memory budget, and the throughput on the way.

    --batch says where to begin. Nothing is run out of memory: each batch is traced and bounded.
    """

    def run() -> None:
        from monetlite.core.costs import Profile
        from monetlite.core.errors import InfeasibleBudget
        from monetlite.core.options import SolvingOptions
        from monetlite.core.units import parse_budget
        from monetlite.planning.batches import largest_batch
        from monetlite.reporting.text_batches import batches_facts, print_batches

        console, quiet = open_console(as_json)
        budget_bytes = parse_budget(budget)
        known: dict[int, Profile] = {}
        name = ""

        def at(batch: int) -> Profile:
            nonlocal name
            if batch not in known:
                built, known[batch] = price(
                    spec, device, optimizer, accumulate, autocast, quiet, {**shape, "batch": batch}, tolerance
                )
                name = built.name
            return known[batch]

        def progress(batch: int, found: str) -> None:
            if not quiet:
                click.echo(f"batch {batch}: {found}", err=True)

        def search(step: int) -> Any:
            return largest_batch(
                at,
                budget_bytes,
                first=shape.get("batch") or 32,
                step=step,
                options=SolvingOptions(tolerance=tolerance, reserved=reserved, time_limit=time_limit, seed=seed),
                progress=progress,
            )

        try:
            found = search(multiple_of or 8)
        except InfeasibleBudget:
            if multiple_of is not None:
                raise
            found = search(1)
        else:
            if multiple_of is None and found.largest < 16:
                found = search(1)
        profile = known[found.largest]
        if as_json:
            click.echo(json.dumps(batches_facts(name, profile, found)))
        else:
            print_batches(console, name, profile, found)

    guard(run, debug)
