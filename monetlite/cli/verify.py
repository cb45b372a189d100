"""`monetlite verify`."""

import json
from typing import Any

import click

from monetlite.cli.opening import model_of
from monetlite.cli.options import SEED, Share, common_options, size_options
from monetlite.cli.pricing import shape_of, to_cuda
from monetlite.cli.running import EXIT_FAILED, Exit, guard, open_console, prints_aside

DEFAULT_OPERATORS = 10
"""How many operators that differ are printed."""


@click.command("verify")
@click.argument("schedule")
@click.option(
    "--model", "spec", help="The model that it is for, where the file doesn't say or to say another: file.py:build."
)
@size_options
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Timed steps of each.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of weights, inputs and dropout.")
@click.option(
    "--operators",
    type=click.IntRange(min=0),
    is_flag=False,
    flag_value=DEFAULT_OPERATORS,
    metavar="[N]",
    help="Compare what every operator writes, too, and print the N that differ most. Keeps a step's values in main "
    f"memory. By default {DEFAULT_OPERATORS}, but only where training differs by more than is allowed; 0: never.",
)
@click.option(
    "--max-difference",
    type=Share("FRACTION"),
    help="Fail above this relative difference of a gradient, buffer or loss. By default 1e-6, or what the "
    "schedule's tolerance makes of this model.",
)
@click.option("--max-peak-error", type=Share(), help="Fail if the peak is further than this from the predicted.")
@click.option(
    "--max-latency-error", type=Share(), help="Fail if the step time is further than this from the predicted."
)
@click.option("--no-budget-check", is_flag=True, help="Pass though the peak is over the budget.")
@common_options
def verify_command(
    schedule: str,
    spec: str | None,
    repeats: int,
    seed: int,
    operators: int | None,
    max_difference: float | None,
    max_peak_error: float | None,
    max_latency_error: float | None,
    no_budget_check: bool,
    as_json: bool,
    debug: bool,
    **shape: Any,
) -> None:
    """Train a step by a schedule and plainly on this machine, and compare everything they leave behind.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB. A batch smaller than the schedule's (--batch) needs less
    memory and is served by the same schedule.

    Exit code 0: it passed; 4: it did not, and the last line (or "reasons" of --json) says why.
    """

    def run() -> None:
        import torch

        from monetlite.checking.report import VerificationLimits
        from monetlite.checking.verification import verify
        from monetlite.models import build_model
        from monetlite.reporting.text_verify import print_report, report_facts
        from monetlite.zoo import load_schedule

        console, _ = open_console(as_json)
        loaded = load_schedule(schedule)
        name, sizes = model_of(loaded, schedule, spec, shape)
        torch.manual_seed(seed)
        built = build_model(name, **shape_of(sizes))
        model, inputs = built.model, built.example_inputs
        if torch.cuda.is_available():
            model, inputs = model.cuda(), to_cuda(inputs)
        with prints_aside():
            report = verify(
                model,
                loaded,
                inputs,
                repeats=repeats,
                seed=seed,
                operators=None if operators is None else operators > 0,
                limits=VerificationLimits(
                    difference=max_difference,
                    budget=not no_budget_check,
                    peak_error=max_peak_error,
                    latency_error=max_latency_error,
                ),
            )
        if as_json:
            click.echo(json.dumps(report_facts(report)))
        else:
            click.echo(built.description)
            print_report(console, report, DEFAULT_OPERATORS if operators is None else operators)
        if not report.passed:
            raise Exit(EXIT_FAILED)

    guard(run, debug)
