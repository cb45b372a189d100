"""`monetlite explain`."""

import json
import math
import warnings
from typing import Any

import click

from monetlite.cli.opening import open_schedule, opening_options
from monetlite.cli.options import SEED, common_options, time_limit_option
from monetlite.cli.running import Solving, Telling, guard, open_console


@click.command("explain")
@click.argument("schedule")
@opening_options
@time_limit_option(
    10.0, "Seconds for each of three searches: with 10% more memory, with 10% less, and for the smallest peak."
)
@click.option("--no-solve", is_flag=True, help="Explain the schedule alone, and look for no others.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the searches.")
@common_options
def explain_command(
    schedule: str,
    spec: str | None,
    device: str | None,
    time_limit: float,
    no_solve: bool,
    seed: int,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Explain why a schedule takes the memory and the time that it does.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB.
    """

    def run() -> None:
        from monetlite.core.binding import bind
        from monetlite.reporting.analysis_alternatives import Alternative, alternative, limit
        from monetlite.reporting.analysis_tensors import explain
        from monetlite.reporting.text_explain import Around, explanation_facts, print_explanation
        from monetlite.solving.compiling import ensure_compiled

        console, quiet = open_console(as_json)
        opened = open_schedule(schedule, spec, device, quiet, shape)
        profile = opened.profile.within(opened.schedule.tolerance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # opening it has told what this device lacks
            steps = bind(opened.schedule, profile.graph)
        found = explain(profile, steps, opened.plain)
        around = Around()
        if not no_solve:
            as_solved = found.as_solved(opened.schedule)
            with Telling(quiet) as tell:
                if tell is not None:
                    tell("looking for the smallest peak")
                ensure_compiled(math.inf)  # once per machine; not what the time limit is for
                lowest = limit(profile, steps, time_limit=time_limit, seed=seed)

            def solved(percent: int) -> Alternative:
                budget_bytes = opened.schedule.budget_bytes * percent // 100
                with Solving(quiet, budget_bytes) as progress:
                    return alternative(
                        profile,
                        steps,
                        budget_bytes,
                        time_limit=time_limit,
                        seed=seed,
                        # What no schedule within the budget does, none within a smaller one does.
                        known_bound_ms=opened.schedule.lower_bound_ms if percent < 100 and as_solved else 0.0,
                        progress=progress,
                    )

            around = Around(limit=lowest, more=solved(110), less=solved(90))
        if as_json:
            click.echo(json.dumps(explanation_facts(opened.schedule, found, around)))
        else:
            print_explanation(console, opened.schedule, found, around)

    guard(run, debug)
