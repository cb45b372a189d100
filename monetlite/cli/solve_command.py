"""`monetlite solve`."""

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
from monetlite.cli.subjects import load_profiles, price_layouts
from monetlite.core.options import PricingOptions, SolvingOptions


@command(
    "solve",
    model_option(required=False),
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        type=click.Path(dir_okay=False),
        help="A file of `monetlite profile --output`, from any machine, in place of --model. One for each layout.",
    ),
    size_options(),
    click.option(
        "--budget",
        required=True,
        help="Peak of the whole step: 6GB (10⁹ bytes), 6GiB (2³⁰), 6000MB, or 50% of plain training's peak.",
    ),
    pricing_options,
    options_of(PricingOptions, "layout"),
    options_of(SolvingOptions),
    output_option("Schedule file; by default MODEL_BATCH_BUDGET.yaml here."),
    keeps_best=True,
)
def solve_command(
    terminal: Terminal,
    choice: ModelChoice,
    pricing: PricingOptions,
    solving: SolvingOptions,
    profiles: tuple[str, ...],
    budget: str,
    output: Path | None,
) -> None:
    """Find the fastest schedule of a model's training step within a memory budget."""
    from monetlite.core.simulate import simulate
    from monetlite.core.steps import plain_steps
    from monetlite.core.units import parse_budget
    from monetlite.planning.layouts import layouts_to_try, solve_layouts
    from monetlite.reporting import text_solve

    if not profiles and choice.spec is None:
        raise click.UsageError("Missing option '--model', or '--profile' in its place.")
    # Read the budget, and see that the output can be written, before spending a minute on it.
    parse_budget(budget, plain_peak_bytes=2**40)
    if output:
        check_writable(output)
    layouts = layouts_to_try(pricing.layout, solving.tolerance)
    if profiles:
        given = {"model": choice.spec, **vars(choice), **vars(pricing)}
        loaded = load_profiles(
            profiles, pricing.layout, {name: given[name] for name in given if name not in ("spec", "layout")}
        )
        description, batch, costs = loaded.description, loaded.batch, loaded.profiles
    else:
        built, costs = price_layouts(choice, pricing, terminal, layouts, solving)
        description, batch = built.description, built.batch
    target = output or Path(_file_name(costs[0].graph.name, batch, budget))
    check_writable(target)
    budget_bytes = parse_budget(budget, simulate(costs[0], plain_steps(costs[0].graph)).peak_bytes)
    with terminal.solving(budget_bytes) as progress:
        schedule = solve_layouts(costs, budget, solving, layout=pricing.layout, progress=progress)
    replaced = " (in place of an earlier file)" if target.exists() else ""
    schedule.save(target)
    profile = next(item for item in costs if item.graph.layout == schedule.layout)
    if terminal.as_json:
        facts = text_solve.schedule_facts(schedule, str(target))
        terminal.print_json(facts | {"reserved": text_solve.reserved_facts(profile, schedule)})
    else:
        click.echo(description)
        timeline = simulate(profile, schedule)
        text_solve.print_schedule(terminal.console, profile, schedule, timeline, f"{target}{replaced}")


def _file_name(name: str, batch: int, budget: str) -> str:
    stem = name.rpartition("/")[2].replace(":", "-").replace(".py", "")
    return f"{stem}_{batch}_{budget.replace('%', 'pct').replace(' ', '')}.yaml"
