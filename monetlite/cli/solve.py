"""`monetlite solve`."""

import json
from pathlib import Path
from typing import Any

import click

from monetlite.cli.options import (
    SEED,
    common_options,
    cost_options,
    model_or_profile_options,
    reserved_option,
    time_limit_option,
    tolerance_option,
)
from monetlite.cli.pricing import price_layouts
from monetlite.cli.profiled import load_profiles
from monetlite.cli.running import Solving, check_folder, guard, open_console


@click.command("solve")
@model_or_profile_options
@click.option(
    "--budget",
    required=True,
    help="The whole step's peak: 6GB (10⁹ bytes), 6GiB (2³⁰), 6000MB, or 50% of plain training's peak.",
)
@cost_options
@time_limit_option(60.0, "Seconds.")
@tolerance_option(
    "How far an operator's result may be from plain training's: 0 for the same bits, 1e-5 for sums in another "
    "order, 1e-4 for normalisations differentiated from their output."
)
@click.option(
    "--layout",
    type=click.Choice(["as_traced", "channels_last"]),
    help="Of images; by default whichever is faster, where the tolerance allows it.",
)
@click.option(
    "--implementations",
    type=click.Choice(["all", "default"]),
    default="all",
    show_default=True,
    help="default: store and recompute only, every operator running as it was traced.",
)
@reserved_option
@click.option("--solver", type=click.Choice(["SCIP", "HIGHS", "GUROBI"]), default="SCIP", show_default=True)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the search.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    help="Schedule file; by default MODEL_BATCH_BUDGET.yaml here.",
)
@common_options
def solve_command(
    spec: str | None,
    profiles: tuple[str, ...],
    budget: str,
    device: str | None,
    optimizer: str | None,
    accumulate: bool,
    autocast: str | None,
    time_limit: float,
    tolerance: float,
    layout: str | None,
    implementations: str,
    reserved: bool,
    solver: str,
    seed: int,
    output: str | None,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Find the fastest schedule of a model's training step within a memory budget."""

    def run() -> None:
        from monetlite.core.options import SolvingOptions
        from monetlite.core.simulate import simulate
        from monetlite.core.steps import plain_steps
        from monetlite.core.units import parse_budget
        from monetlite.planning.layouts import layouts_to_try, solve_layouts
        from monetlite.reporting import text_solve as reporting

        console, quiet = open_console(as_json)
        # Read the budget, and see that the output can be written, before spending a minute on it.
        parse_budget(budget, plain_peak_bytes=2**40)
        if output:
            check_folder(Path(output))
        layouts = layouts_to_try(layout, tolerance)
        if profiles:
            given = {"model": spec, "device": device, "optimizer": optimizer, "autocast": autocast}
            priced = load_profiles(profiles, layout, given | {"accumulate": accumulate or None} | shape)
            description, batch = priced.description, priced.batch
            costs = priced.profiles
        else:
            assert spec is not None
            built, costs = price_layouts(
                spec, device, optimizer, accumulate, autocast, quiet, shape, layouts, tolerance
            )
            description, batch = built.description, built.batch
        name = costs[0].graph.name
        target = Path(output or _file_name(name, batch, budget))
        check_folder(target)
        budget_bytes = parse_budget(budget, simulate(costs[0], plain_steps(costs[0].graph)).peak_bytes)
        with Solving(quiet, budget_bytes) as progress:
            schedule = solve_layouts(
                costs,
                budget,
                SolvingOptions(
                    tolerance=tolerance,
                    implementations=implementations,
                    reserved=reserved,
                    time_limit=time_limit,
                    solver=solver,
                    seed=seed,
                ),
                layout=layout,
                progress=progress,
            )
        replaced = " (in place of an earlier file)" if target.exists() else ""
        schedule.save(target)
        profile = next(item for item in costs if item.graph.layout == schedule.layout)
        if as_json:
            facts = reporting.schedule_facts(schedule, str(target))
            click.echo(json.dumps(facts | {"reserved": reporting.reserved_facts(profile, schedule)}))
        else:
            click.echo(description)
            reporting.print_schedule(console, profile, schedule, simulate(profile, schedule), f"{target}{replaced}")

    if not profiles and spec is None:
        raise click.UsageError("Missing option '--model', or '--profile' in its place.")
    guard(run, debug, keeps_best=True)


def _file_name(name: str, batch: int, budget: str) -> str:
    stem = name.rpartition("/")[2].replace(":", "-").replace(".py", "")
    return f"{stem}_{batch}_{budget.replace('%', 'pct').replace(' ', '')}.yaml"
