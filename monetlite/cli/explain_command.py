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
    from monetlite.reporting.analysis import analyse
    from monetlite.reporting.analysis_alternatives import Alternative, Around, alternative, lowest_peak
    from monetlite.reporting.text_explain import explanation_facts, print_explanation
    from monetlite.solving.annealing.compiling import ensure_compiled

    opened = open_schedule(schedule, choice, device, terminal)
    profile = opened.profile.within(opened.schedule.tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opening it has told what this device lacks
        steps = bind(opened.schedule, profile.graph)
    analysis = analyse(opened.schedule, profile, opened.plain, steps)
    around = Around()
    if not no_solve:
        # A bound of the budget holds for every smaller one.
        bound_ms = opened.schedule.lower_bound_ms if analysis.as_solved else 0.0
        with terminal.line("looking for the smallest peak"):
            ensure_compiled(math.inf)  # once per machine; not what the time limit is for
            lowest = lowest_peak(profile, steps, solving)

        def solved(percent: int) -> Alternative:
            budget_bytes = opened.schedule.budget_bytes * percent // 100
            with terminal.solving(budget_bytes) as progress:
                return alternative(
                    profile,
                    steps,
                    budget_bytes,
                    solving,
                    known_bound_ms=bound_ms if percent < 100 else 0.0,
                    progress=progress,
                )

        around = Around(limit=lowest, more=solved(110), less=solved(90))
    if terminal.as_json:
        terminal.print_json(explanation_facts(analysis, around))
    else:
        print_explanation(terminal.console, analysis, around)
