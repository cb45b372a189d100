"""`monetlite solve`: the fastest schedule within a budget, or the largest batch that trains within it."""

import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import click

from monetlite.cli.command_options import (
    ModelChoice,
    model_option,
    options_of,
    output_option,
    pricing_options,
    size_options,
    time_limit_option,
)
from monetlite.cli.option_types import BUDGET, BUDGET_BYTES, Integer
from monetlite.cli.output_names import name_from_profile, schedule_name
from monetlite.cli.running import check_writable, command, only_for, suggested, was_given
from monetlite.cli.subjects import load_profiles, price_layouts
from monetlite.cli.terminal import Terminal
from monetlite.core.costs import Profile
from monetlite.core.graph import AS_TRACED, TILED_ROWS
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import REORDERED_SUMS, PricingOptions, SolvingOptions, allowing_compiled
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import parse_budget

FIRST_BATCH = 32
"""Batch to begin from."""
MAX_BATCH_SECONDS = 120.0
_RARE = (
    "profiles",
    "layout",
    "compile",
    "outputs",
    "accumulate",
    "step_in_backward",
    "implementations",
    "gap",
    "solver",
    "seed",
    "multiple_of",
)
_multiple_option = click.option(
    "--multiple-of",
    type=Integer(min=1),
    default=1,
    show_default=True,
    help="With --max-batch: look at multiples of this batch only.",
)


@command(
    "solve",
    model_option(required=False),
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        type=click.Path(dir_okay=False),
        help="A file of `monetlite measure --operators --output`, from any machine, in place of --model. One for "
        "each layout.",
    ),
    size_options(),
    click.option(
        "--budget",
        type=BUDGET,
        required=True,
        help="Peak of the whole step: 6GB (10⁹ bytes), 6GiB (2³⁰), 6000MB, or 50% of plain training's peak (not "
        "with --max-batch).",
    ),
    pricing_options,
    options_of(PricingOptions, "layout", "compile", "outputs"),
    options_of(SolvingOptions),
    output_option(
        "Schedule file; by default MODEL_BUDGET.yaml here, with the batch and other options in its name if given."
    ),
    click.option(
        "--max-batch",
        is_flag=True,
        help="Find the largest batch that trains within the budget instead, from --batch on; by default in 120 "
        "seconds.",
    ),
    _multiple_option,
    keeps_best=True,
    rare=_RARE,
)
def solve_command(
    terminal: Terminal,
    choice: ModelChoice,
    pricing: PricingOptions,
    solving: SolvingOptions,
    profiles: tuple[str, ...],
    budget: str,
    output: Path | None,
    max_batch: bool,
    multiple_of: int,
) -> None:
    """Find the fastest schedule of a model's training step within a memory budget."""
    from monetlite.planning.layouts import layouts_to_try, solve_layouts
    from monetlite.reporting import text_solve
    from monetlite.solving.annealing.compiling import await_compiled

    solving = allowing_compiled(pricing, solving)
    if not profiles and choice.spec is None:
        raise click.UsageError("Missing option '--model', or '--profile' in its place.")
    if was_given("solver"):
        from monetlite.solving.program import check_solver

        check_solver(solving.solver)
    if max_batch:
        only_for("solve without --max-batch", "profiles", "layout", "compile", "output", "force")
        if not was_given("time_limit"):
            solving = replace(solving, time_limit=MAX_BATCH_SECONDS)
        with interrupts_kept():
            find_largest_batch(terminal, choice, budget, pricing, solving, multiple_of)
        return
    only_for("solve --max-batch", "multiple_of")
    layouts = layouts_to_try(pricing.layout, solving.tolerance, pricing.compile)
    if profiles:
        only_for("solve --model", "compile")
        said = {"model": choice.spec, **vars(choice), **vars(pricing)}
        for name in ("spec", "layout", *([] if was_given("outputs") else ["outputs"])):
            del said[name]
        costs, batch, description = load_profiles(profiles, pricing.layout, said)
        target = output or name_from_profile(costs[0], batch, budget, pricing.layout, solving)
        check_writable(target)
    else:
        target = output or schedule_name(choice, budget, pricing, solving)
        check_writable(target)
        built, costs = price_layouts(choice, pricing, terminal, layouts, solving)
        description = built.description
    await_compiled(terminal.tell)
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
        terminal.console.print(description, markup=False)
        timeline = simulate(profile, schedule)
        text_solve.print_schedule(terminal.console, profile, schedule, timeline, f"{target}{replaced}")


def find_largest_batch(
    terminal: Terminal,
    choice: ModelChoice,
    budget: str,
    pricing: PricingOptions,
    solving: SolvingOptions,
    multiple_of: int,
) -> None:
    """Find the largest batch that trains within a memory budget, and the throughput on the way.

    --batch says where to begin. Nothing is run out of memory: a few batches are traced, and every one is bounded.
    """
    from monetlite.planning.batches import largest_batch
    from monetlite.reporting.text_solve import batches_facts, print_batches

    # Rows in tiles can do all that the step as it is does, and less memory is what the largest batch takes.
    layouts = [AS_TRACED] if solving.tolerance < REORDERED_SUMS else [AS_TRACED, TILED_ROWS]

    @cache
    def priced(batch: int) -> list[Profile]:
        _, profiles = price_layouts(replace(choice, batch=batch), pricing, terminal, layouts, solving)
        return profiles

    def progress(batch: int, found: str) -> None:
        click.echo(f"{time.monotonic() - began:4.0f} s  batch {batch}: {found}", err=True)

    began = time.monotonic()
    found = largest_batch(
        lambda batch: priced(batch)[-1],
        parse_budget(budget),
        solving,
        first=choice.batch or FIRST_BATCH,
        step=multiple_of,
        progress=progress,
        price_plain=lambda batch: priced(batch)[0],
    )
    if terminal.as_json:
        terminal.print_json(batches_facts(found))
    else:
        command = suggested("solve", without=("max_batch", "multiple_of"), batch=found.largest)
        print_batches(terminal.console, found, command)


max_batch_command = command(
    "max-batch",
    model_option(),
    size_options(),
    click.option(
        "--budget", type=BUDGET_BYTES, required=True, help="Peak of the whole step in bytes: 16GB, 16GiB."
    ),
    pricing_options,
    options_of(SolvingOptions, "tolerance", "reserved", "seed"),
    time_limit_option(MAX_BATCH_SECONDS, "Seconds in all."),
    _multiple_option,
    now="solve --max-batch",
)(find_largest_batch)
