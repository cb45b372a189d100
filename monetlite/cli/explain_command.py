"""`monetlite explain`."""

import math
import warnings

import click

from monetlite.cli.command_options import (
    ModelChoice,
    options_of,
    schedule_argument,
    schedule_device_option,
    schedule_model_option,
    size_options,
    time_limit_option,
)
from monetlite.cli.running import Terminal, command
from monetlite.cli.subjects import open_schedule
from monetlite.core.options import SolvingOptions


@command(
    "explain",
    schedule_argument,
    schedule_model_option,
    size_options("schedule"),
    schedule_device_option,
    time_limit_option(
        10.0, "Seconds for each of three searches: with 10% more memory, with 10% less, and for the smallest peak."
    ),
    click.option("--no-solve", is_flag=True, help="Explain the schedule alone, and look for no others."),
    options_of(SolvingOptions, "seed"),
)
def explain_command(
    terminal: Terminal,
    schedule: str,
    choice: ModelChoice,
    device: str | None,
    no_solve: bool,
    solving: SolvingOptions,
) -> None:
    """Explain why a schedule takes the memory and the time that it does.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB.
    """
    from monetlite.core.binding import bind
    from monetlite.reporting.analysis_alternatives import Alternative, alternative, limit
    from monetlite.reporting.analysis_tensors import explain
    from monetlite.reporting.text_explain import Around, explanation_facts, print_explanation
    from monetlite.solving.annealing.compiling import ensure_compiled

    opened = open_schedule(schedule, choice, device, terminal)
    profile = opened.profile.within(opened.schedule.tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opening it has told what this device lacks
        steps = bind(opened.schedule, profile.graph)
    found = explain(profile, steps, opened.plain)
    around = Around()
    if not no_solve:
        as_solved = found.as_solved(opened.schedule)
        with terminal.line("looking for the smallest peak"):
            ensure_compiled(math.inf)  # once per machine; not what the time limit is for
            lowest = limit(profile, steps, time_limit=solving.time_limit, seed=solving.seed)

        def solved(percent: int) -> Alternative:
            budget_bytes = opened.schedule.budget_bytes * percent // 100
            with terminal.solving(budget_bytes) as progress:
                return alternative(
                    profile,
                    steps,
                    budget_bytes,
                    time_limit=solving.time_limit,
                    seed=solving.seed,
                    # A bound of the budget holds for every smaller one.
                    known_bound_ms=opened.schedule.lower_bound_ms if percent < 100 and as_solved else 0.0,
                    progress=progress,
                )

        around = Around(limit=lowest, more=solved(110), less=solved(90))
    if terminal.as_json:
        terminal.print_json(explanation_facts(opened.schedule, found, around))
    else:
        print_explanation(terminal.console, opened.schedule, found, around)
