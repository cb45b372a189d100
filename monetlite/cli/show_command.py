"""`monetlite show`: a schedule as a text, a picture or a page, at its own sizes or at others."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monetlite.cli.command_options import (
    BATCH_OF_SCHEDULE,
    ModelChoice,
    options_of,
    output_option,
    schedule_argument,
    schedule_device_option,
    schedule_model_option,
    size_options,
    time_limit_option,
    with_options,
)
from monetlite.cli.option_types import Integer, OutputFile
from monetlite.cli.running import check_writable, command, only_for, was_given
from monetlite.cli.subjects import OpenedSchedule, open_schedule, shapes_text
from monetlite.cli.terminal import Terminal
from monetlite.core.binding import bind
from monetlite.core.costs import Profile
from monetlite.core.errors import MonetliteError
from monetlite.core.files.atomic import write_atomically
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.reporting.analysis import Analysis, analyse

if TYPE_CHECKING:
    from monetlite.planning.tradeoff import Tradeoff
    from monetlite.reporting.analysis_alternatives import Around

PAGE_AROUND_SHARE = 0.2
"""Part of the time of all searches for the sentences of a page; the rest is for its curve."""
TEXT, RESCALED, REPORT, TIMELINE, TRADEOFF, CHOICES = (
    "text",
    "rescaled",
    "report",
    "timeline",
    "tradeoff",
    "choices",
)
SEARCHES = 3
"""Searches that the text makes."""
POINT_SECONDS = 16.0
"""Seconds for each point of a trade-off, by default."""
_PICTURES, _PAGES, _SCHEDULES = (".png", ".svg", ".pdf"), (".html",), (".yaml", ".yml")
_ONLY_FOR = (
    (("by",), (TIMELINE,), "--kind timeline"),
    (("points",), (TRADEOFF, REPORT), "--kind tradeoff and pages"),
    (("time_limit", "seed"), (TRADEOFF, REPORT, TEXT), "--kind tradeoff and pages"),
    (("no_solve",), (TEXT, REPORT), "the text and the page"),
    (("kind", "table"), (REPORT, TIMELINE, TRADEOFF, CHOICES), "pictures; name one by --output"),
)
"""Options, the kinds that have them, and the same in words."""

_kind_option = click.option(
    "--kind",
    type=click.Choice([TIMELINE, TRADEOFF, CHOICES, REPORT]),
    help="timeline: the memory of a step, plain and scheduled, by what it is held for. tradeoff: step time "
    "against memory, beside the baselines and the bound. choices: what is stored, recomputed and run by "
    "another implementation, along the model. report: everything on one page. By default timeline, or report "
    "for .html.",
)
_drawing_options = with_options(
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
        type=Integer(min=2, max=100),
        default=8,
        show_default=True,
        help="Budgets of a trade-off, from the smallest feasible one to plain training's peak.",
    ),
    click.option(
        "--csv",
        "table",
        type=OutputFile(),
        help="Write the numbers behind a picture here.",
    ),
)
_no_solve_option = click.option("--no-solve", is_flag=True, help="Show the schedule alone, and look for no others.")
_search_options = with_options(
    time_limit_option(
        15.0,
        "Seconds of all searches together. The text makes three: 10% more memory, 10% less, the smallest peak. A "
        f"trade-off takes {POINT_SECONDS:g} seconds for each point by default, a third of them for the baselines. "
        "A page has both.",
    ),
    options_of(SolvingOptions, "seed"),
)
_where_options = with_options(schedule_model_option, size_options(BATCH_OF_SCHEDULE), schedule_device_option)


def show(
    terminal: Terminal,
    schedule: str,
    choice: ModelChoice,
    device: str | None,
    output: Path | None,
    solving: SolvingOptions,
    kind: str | None = None,
    by: str = "time",
    points: int = 8,
    table: Path | None = None,
    no_solve: bool = False,
    other_sizes: bool = True,
) -> None:
    """Show a schedule: why it takes its memory and time, as text; with --output as a picture or a page.

    SCHEDULE is a file, or a name such as zoo:resnet50@6GB. At sizes that it wasn't solved for, its choices are
    priced again; `monetlite solve` may find better ones. --output FILE.yaml writes them as a schedule.
    """
    kind = _kind(output, kind)
    for names, kinds, words in _ONLY_FOR:
        if kind not in kinds:
            only_for(words, *names)
    if table is not None and kind == REPORT:
        raise click.UsageError("--csv is for pictures; a report has its tables on the page")
    for option, path in (("--output", output), ("--csv", table)):
        try:
            if path is not None:
                check_writable(path, option)
        except MonetliteError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    if table is not None and output is not None and table.resolve() == output.resolve():
        raise click.UsageError("--csv and --output name the same file")

    opened = open_schedule(schedule, choice, device, terminal, other_sizes=other_sizes)
    if kind == RESCALED or not opened.at_own_sizes:
        opened, given = _rescaled(opened), opened.schedule
        if kind in (TEXT, RESCALED):
            own = shapes_text([spec.shape for spec in given.inputs.values()])
            only_for(f"a schedule at its own sizes: this one was solved for {own}", "time_limit", "seed")
            _print_rescaled(terminal, schedule, given, opened.schedule, output)
            return
    if kind == TEXT:
        _explain(terminal, opened, solving, search=not no_solve)
    else:
        assert output is not None
        _draw(terminal, opened, kind, output, table, points, solving, by_time=by == "time", search=not no_solve)


def _kind(output: Path | None, kind: str | None) -> str:
    """The kind of output, which the ending of the file has to allow."""
    ending = None if output is None else output.suffix.lower()
    if kind == RESCALED:
        return RESCALED
    if ending is None:
        return TEXT
    if ending not in _PICTURES + _PAGES + _SCHEDULES:
        raise click.BadParameter(
            f"{str(output)!r} should end in {', '.join(_PICTURES)} for a picture, in .html for a report, or in "
            ".yaml for the schedule itself",
            param_hint="--output",
        )
    if ending in _SCHEDULES:
        return RESCALED
    if kind is None:
        return REPORT if ending in _PAGES else TIMELINE
    if (kind == REPORT) != (ending in _PAGES):
        fitting = ".html" if kind == REPORT else ", ".join(_PICTURES)
        raise click.BadParameter(
            f"a {kind} is not written as {ending}; end {str(output)!r} in {fitting}", param_hint="--output"
        )
    return kind


def _rescaled(opened: OpenedSchedule) -> OpenedSchedule:
    """The same choices, priced as they were opened."""
    from monetlite.planning.budgets import rescale

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opening it has told what this device lacks
        found = rescale(opened.schedule, opened.profile, opened.plain)
    given = opened.schedule
    same = (found.fingerprint, found.device, found.peak_bytes) == (
        given.fingerprint,
        given.device,
        given.peak_bytes,
    )
    if same and math.isclose(found.latency_ms, given.latency_ms, rel_tol=1e-6):
        return opened  # nothing is priced otherwise: what was proven of it stays
    return replace(opened, schedule=replace(found, source=opened.built.source))


def _print_rescaled(terminal: Terminal, name: str, given: Schedule, found: Schedule, output: Path | None) -> None:
    from monetlite.reporting.text_solve import schedule_facts
    from monetlite.reporting.text_zoo import print_rescaled

    target = None if output is None else str(output)
    if output is not None:
        found.save(output)
    if terminal.as_json:
        before = {**schedule_facts(given), "file": name}
        terminal.print_json({"from": before, "to": schedule_facts(found, target)})
    else:
        print_rescaled(terminal.console, given, found, target)


def _explain(terminal: Terminal, opened: OpenedSchedule, solving: SolvingOptions, *, search: bool) -> None:
    from monetlite.reporting.analysis_alternatives import Around
    from monetlite.reporting.text_explain import explanation_facts, print_explanation

    profile, steps = _allowed(opened)
    analysis = analyse(opened.schedule, profile, opened.plain, steps)
    around = _searched(terminal, opened, analysis, solving) if search else Around()
    if terminal.as_json:
        terminal.print_json(explanation_facts(analysis, around))
    else:
        print_explanation(terminal.console, analysis, around)


def _allowed(opened: OpenedSchedule) -> tuple[Profile, tuple[Step, ...]]:
    """The costs of what the schedule's tolerance allows, and the schedule's steps by those."""
    profile = opened.profile.within(opened.schedule.tolerance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opening it has told what this device lacks
        return profile, bind(opened.schedule, profile.graph)


def _searched(terminal: Terminal, opened: OpenedSchedule, analysis: Analysis, solving: SolvingOptions) -> "Around":
    """Schedules around the present one: the leanest, and those of a tenth more and less memory, of its kind."""
    from monetlite.reporting.analysis_alternatives import Alternative, Around, alternative, lowest_peak
    from monetlite.solving.annealing.compiling import ensure_compiled

    profile, steps = _allowed(opened)
    # A bound of the budget holds for every smaller one.
    bound_ms = opened.schedule.lower_bound_ms if analysis.as_solved else 0.0
    reserved = opened.schedule.reserved_bytes is not None
    with terminal.searching("looking for the smallest peak"):
        ensure_compiled(math.inf)  # once per machine; not what the time limit is for
        each = replace(solving, time_limit=solving.time_limit / SEARCHES, reserved=reserved)
        lowest = lowest_peak(profile, steps, each)

    if reserved and profile.device == "cpu":
        terminal.tell("the budget is of reserved memory, and a CPU reserves none: no other budget is solved for")
        return Around(limit=lowest)

    def solved(percent: int) -> Alternative:
        budget_bytes = opened.schedule.budget_bytes * percent // 100
        with terminal.solving(budget_bytes) as progress:
            return alternative(
                profile,
                steps,
                budget_bytes,
                each,
                known_bound_ms=bound_ms if percent < 100 else 0.0,
                progress=progress,
            )

    return Around(limit=lowest, more=solved(110), less=solved(90))


def _traded(
    terminal: Terminal, opened: OpenedSchedule, analysis: Analysis, points: int, solving: SolvingOptions
) -> "Tradeoff":
    """The trade-off between memory and step time, with a bar."""
    from monetlite.planning.tradeoff import trade_off

    known = (opened.schedule.budget_bytes, opened.schedule.lower_bound_ms) if analysis.as_solved else (0, 0.0)
    options = replace(solving, tolerance=opened.schedule.tolerance)
    with terminal.named_bar("solving") as progress:
        return trade_off(
            opened.profile,
            opened.plain,
            opened.steps,
            options,
            points=points,
            known_bound=known,
            progress=progress,
        )


def _draw(
    terminal: Terminal,
    opened: OpenedSchedule,
    kind: str,
    output: Path,
    table: Path | None,
    points: int,
    solving: SolvingOptions,
    *,
    by_time: bool,
    search: bool,
) -> None:
    """Write a picture or a page, the numbers behind it, and say so."""
    from monetlite.reporting.text_solve import schedule_facts
    from monetlite.reporting.text_tables import csv_table

    with terminal.line("analysing the schedule"):
        analysis = analyse(opened.schedule, opened.profile, opened.plain, opened.steps)
    rows: Iterable[dict[str, Any]] = ()
    facts: dict[str, Any] = {}
    if kind == REPORT:
        from monetlite.reporting.analysis_alternatives import Around
        from monetlite.reporting.html import write_report

        around, tradeoff = Around(), None
        if search:
            around_seconds = PAGE_AROUND_SHARE * solving.time_limit
            around = _searched(terminal, opened, analysis, replace(solving, time_limit=around_seconds))
            left = replace(solving, time_limit=solving.time_limit - around_seconds)
            tradeoff = _traded(terminal, opened, analysis, points, left)
        write_report(output, analysis, around, tradeoff)
    else:
        from monetlite.reporting.plots.drawing import save_figure

        if kind == TIMELINE:
            from monetlite.reporting.plots.timeline_plot import draw_timeline, timeline_facts, timeline_rows

            figure = draw_timeline(analysis, by_time=by_time)
            rows, facts = timeline_rows(analysis), timeline_facts(analysis)
        elif kind == CHOICES:
            from monetlite.reporting.plots.choices_plot import choices_facts, choices_rows, draw_choices

            figure, rows, facts = draw_choices(analysis), choices_rows(analysis), choices_facts(analysis)
        else:
            from monetlite.reporting.plots.tradeoff_plot import draw_tradeoff
            from monetlite.reporting.text_tradeoff import print_tradeoff, tradeoff_facts, tradeoff_rows

            if not was_given("time_limit"):
                solving = replace(solving, time_limit=points * POINT_SECONDS)
            found = _traded(terminal, opened, analysis, points, solving)
            figure, rows, facts = draw_tradeoff(found, analysis), tradeoff_rows(found), tradeoff_facts(found)
            if not terminal.as_json:
                print_tradeoff(terminal.console, analysis, found)
        with terminal.line(f"drawing {output}"):
            save_figure(figure, output, f"{analysis.title}: {kind}")
    if table is not None:
        write_atomically(table, csv_table(rows))
    if terminal.as_json:
        told = schedule_facts(opened.schedule, str(output))
        terminal.print_json({"kind": kind, **told, "csv": table and str(table), **facts})
    else:
        written = str(output) if table is None else f"{output} and {table}"
        terminal.console.print(f"{kind} written to {written}", markup=False, soft_wrap=True)


_any_output = output_option(
    "Write a picture (.png, .svg, .pdf), a page (.html), or the schedule at the sizes given (.yaml)."
)
_picture_output = output_option("A picture (.png, .svg or .pdf), or a page (.html).", required=True)
_schedule_output = output_option("Write the rescaled schedule; by default nothing is written.")

show_command = command(
    "show",
    schedule_argument,
    _any_output,
    _kind_option,
    _drawing_options,
    _search_options,
    _no_solve_option,
    _where_options,
)(show)
explain_command = command(
    "explain", schedule_argument, _search_options, _no_solve_option, _where_options, now="show SCHEDULE"
)(partial(show, output=None, other_sizes=False))
plot_command = command(
    "plot",
    schedule_argument,
    _picture_output,
    _kind_option,
    _drawing_options,
    _search_options,
    _no_solve_option,
    _where_options,
    now="show SCHEDULE --output FILE",
)(partial(show, other_sizes=False))
rescale_command = command(
    "rescale", schedule_argument, _schedule_output, _where_options, now="show SCHEDULE --batch N"
)(partial(show, kind=RESCALED))
