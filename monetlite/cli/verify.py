"""`monetlite verify`."""

import json
from typing import Any

import click

from monetlite.cli.options import common_options, model_options
from monetlite.cli.pricing import shape_of, to_cuda
from monetlite.cli.running import EXIT_FAILED, guard, open_console


@click.command("verify")
@click.argument("schedule", type=click.Path())
@model_options
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Timed steps of each.")
@click.option("--seed", type=int, default=0, show_default=True)
@common_options
def verify_command(
    schedule: str, spec: str, repeats: int, seed: int, as_json: bool, debug: bool, **shape: Any
) -> None:
    """Train a step by a schedule and plainly on this machine, and compare everything they leave behind.

    A batch smaller than the schedule's needs less memory and is served by the same schedule.
    """

    def run() -> None:
        import torch

        from monetlite.files import load_schedule
        from monetlite.models import build_model
        from monetlite.reporting.solve import print_report, report_facts
        from monetlite.runtime import verify as run_verification

        console, _ = open_console(as_json)
        loaded = load_schedule(schedule)
        built = build_model(spec, **shape_of(shape))
        model, inputs = built.model, built.example_inputs
        if torch.cuda.is_available():
            model, inputs = model.cuda(), to_cuda(inputs)
        report = run_verification(model, loaded, inputs, repeats=repeats, seed=seed)
        if as_json:
            click.echo(json.dumps(report_facts(report)))
        else:
            click.echo(built.description)
            print_report(console, report)
        if not report.passed:
            raise SystemExit(EXIT_FAILED)

    guard(run, debug)
