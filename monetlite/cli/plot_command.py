"""`monetlite plot`."""

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from monetlite.cli.command_options import (
    ModelChoice,
    options_of,
    schedule_argument,
    schedule_device_option,
    schedule_model_option,
    size_options,
    time_limit_option,
)
from monetlite.cli.running import Terminal, check_writable, command
from monetlite.cli.subjects import OpenedSchedule, open_schedule
from monetlite.core.errors import MonetliteError
from monetlite.core.options import SolvingOptions

if TYPE_CHECKING:
    from monetlite.reporting.analysis import Analysis

TIMELINE, TRADEOFF, CHOICES, REPORT = "timeline", "tradeoff", "choices", "report"
_PICTURES, _PAGES = (".png", ".svg", ".pdf"), (".html",)
_KIND_OF_OPTION = {"by": TIMELINE, "points": TRADEOFF, "time_limit": TRADEOFF, "seed": TRADEOFF}
"""Options that one kind alone has."""


@command(
    "plot",
    schedule_argument,
    click.option(
        "--output",
        required=True,
        type=click.Path(dir_okay=False),
        help="A picture (.png, .svg or .pdf), or a page (.html).",
    ),
    click.option(
        "--kind",
        type=click.Choice([TIMELINE, TRADEOFF, CHOICES, REPORT]),
        help="timeline: the memory of a step, plain and scheduled, by what it is held for. tradeoff: step time "
        "against memory, beside the baselines and the bound. choices: what is stored, recomputed and run by "
        "another implementation, along the model. report: everything on one page. By default timeline, or report "
        "for .html.",
    ),
    click.option(
        "--x",
        "by",
        type=click.Choice(["time", "operators"]),
        default="time",
        show_default=True,
        help="Horizontal axis of a timeline.",
    ),
    click.option(
        "--points",
        type=click.IntRange(min=2, max=100),
        default=8,
        show_default=True,
        help="Budgets of a trade-off, from the smallest feasible one to plain training's peak.",
    ),
    time_limit_option(
        10.0, "Seconds of solving for each budget of a trade-off. The baselines take about half as long again."
    ),
    options_of(SolvingOptions, "seed", help="Seed of a trade-off's searches."),
    click.option(
        "--csv", "table", type=click.Path(dir_okay=False), help="Write the numbers behind a picture here."
    ),
    schedule_model_option,
    size_options("schedule"),
    schedule_device_option,
)
def plot_command(
    terminal: Terminal,
    schedule: str,
    output: str,
    kind: str | None,
    by: str,
    points: int,
    solving: SolvingOptions,
    table: str | None,
    choice: ModelChoice,
    device: str | None,
) -> None:
    """Draw a schedule: the memory of its step, its choices, or step time against memory.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB.
    """
    kind = _kind(output, kind)
    _check_options(click.get_current_context(), kind)
    if table is not None and kind == REPORT:
        raise click.UsageError("--csv is for pictures; a report has its tables on the page")
    for option, path in (("--output", output), ("--csv", table)):
        try:
            if path is not None:
                check_writable(Path(path))
        except MonetliteError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    if table is not None and Path(table).resolve() == Path(output).resolve():
        raise click.UsageError("--csv and --output name the same file")
    from monetlite.reporting.analysis import analyse

    opened = open_schedule(schedule, choice, device, terminal)
    analysis = analyse(opened.schedule, opened.profile, opened.plain, opened.steps)
    facts: dict[str, Any] = {}
    if kind == REPORT:
        from monetlite.reporting.html import write_report

        write_report(output, analysis)
    elif kind == TRADEOFF:
        facts = _trade_off(terminal, opened, analysis, output, table, points, solving)
    else:
        facts = _picture(analysis, kind, output, table, by == "time")
    if terminal.as_json:
        from monetlite.reporting.text_solve import schedule_facts

        terminal.print_json({"kind": kind, **schedule_facts(opened.schedule, output), "csv": table, **facts})
    else:
        written = output if table is None else f"{output} and {table}"
        terminal.console.print(f"{kind} written to {written}", markup=False, soft_wrap=True)


def _kind(output: str, kind: str | None) -> str:
    """The kind of picture, which the ending of the file has to allow."""
    ending = Path(output).suffix.lower()
    if ending not in _PICTURES + _PAGES:
        raise click.BadParameter(
            f"{output!r} should end in {', '.join(_PICTURES)} for a picture, or in .html for a report",
            param_hint="--output",
        )
    if kind is None:
        return REPORT if ending in _PAGES else TIMELINE
    if (kind == REPORT) != (ending in _PAGES):
        fitting = ".html" if kind == REPORT else ", ".join(_PICTURES)
        raise click.BadParameter(
            f"a {kind} is not written as {ending}; end {output!r} in {fitting}", param_hint="--output"
        )
    return kind


def _check_options(context: click.Context, kind: str) -> None:
    """Refuse options of another kind of picture."""
    for option in context.command.params:
        only = _KIND_OF_OPTION.get(option.name or "")
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if only not in (None, kind) and given:
            raise click.UsageError(f"{option.opts[0]} is for --kind {only}, not {kind}")


def _picture(analysis: "Analysis", kind: str, output: str, table: str | None, by_time: bool) -> dict[str, Any]:
    """Draw a timeline or the choices, and return the facts behind them."""
    from monetlite.reporting import model_columns, timeline_columns
    from monetlite.reporting.plots.choices_plot import draw_choices
    from monetlite.reporting.plots.drawing import save_figure
    from monetlite.reporting.plots.timeline_plot import draw_timeline

    if kind == TIMELINE:
        figure, rows = draw_timeline(analysis, by_time=by_time), timeline_columns.timeline_rows(analysis)
        facts = timeline_columns.timeline_facts(analysis)
    else:
        figure, rows = draw_choices(analysis), model_columns.choices_rows(analysis)
        facts = model_columns.choices_facts(analysis)
    save_figure(figure, output, f"{analysis.title}: {kind}")
    _write_table(table, rows)
    return facts


def _trade_off(
    terminal: Terminal,
    opened: OpenedSchedule,
    analysis: "Analysis",
    output: str,
    table: str | None,
    points: int,
    solving: SolvingOptions,
) -> dict[str, Any]:
    """Solve for one budget after the other, and print and draw the results."""
    from monetlite.planning.tradeoff import trade_off
    from monetlite.reporting.plots.drawing import save_figure
    from monetlite.reporting.plots.tradeoff_plot import draw_tradeoff
    from monetlite.reporting.text_solve import print_tradeoff, tradeoff_facts, tradeoff_rows

    options = replace(solving, tolerance=opened.schedule.tolerance)
    with terminal.named_bar("solving") as progress:
        found = trade_off(opened.profile, opened.plain, opened.steps, options, points=points, progress=progress)
    save_figure(draw_tradeoff(found, analysis), output, f"{analysis.title}: {TRADEOFF}")
    _write_table(table, tradeoff_rows(found))
    if not terminal.as_json:
        print_tradeoff(terminal.console, analysis, found)
    return tradeoff_facts(found)


def _write_table(path: str | None, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as CSV, under the names of their fields."""
    if path is None:
        return
    from monetlite.core.files.atomic import write_atomically

    listed = list(rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(listed[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(listed)
    write_atomically(path, text.getvalue())
