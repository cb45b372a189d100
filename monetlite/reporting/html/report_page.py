"""The page: its words, and the files in `page/` filled with them and with a schedule's figures."""

import base64
import hashlib
import json
from importlib import resources
from os import PathLike
from string import Template
from typing import TYPE_CHECKING

from monetlite.core.costs import cost_source
from monetlite.core.files.atomic import write_atomically
from monetlite.core.graph import TensorSpec
from monetlite.core.step_analysis import Holding
from monetlite.core.units import format_bytes, format_ms
from monetlite.reporting.analysis import Analysis, budget_in_words
from monetlite.reporting.analysis_alternatives import Around
from monetlite.reporting.html.explanation_html import HtmlWriter, html_text, row_html, table_html
from monetlite.reporting.html.page_data import page_data, tradeoff_data
from monetlite.reporting.palette import page_colours
from monetlite.reporting.text_explain import write_explanation
from monetlite.reporting.text_solve import exactness, smallest_in_words
from monetlite.reporting.text_tradeoff import tradeoff_table

if TYPE_CHECKING:
    from monetlite.planning.tradeoff import Tradeoff  # imports the search

_SCRIPTS = (
    "format.js",
    "elements.js",
    "run.js",
    "scales.js",
    "chart.js",
    "view.js",
    "pointing.js",
    "panel.js",
    "table.js",
    "tables.js",
    "search.js",
    "tradeoff.js",
    "main.js",
)
"""Each needs only those before it."""


def write_report(
    path: str | PathLike[str],
    analysis: Analysis,
    around: Around | None = None,
    tradeoff: "Tradeoff | None" = None,
) -> None:
    """Write a schedule as an HTML page that loads nothing and sends nothing, atomically.

    The page has the same bytes for the same schedule and costs, and the same results of searches.

    Args:
        path: the file.
        analysis: the schedule and plain training.
        around: results of searches around the schedule, for the sentences.
        tradeoff: the curve to draw, if there is one.

    Raises:
        ScheduleFileError: the file can't be written; what was there before is unchanged.
    """
    schedule = analysis.schedule
    explanation = HtmlWriter()
    write_explanation(explanation, analysis, around or Around())
    batch = f", batch {schedule.source.batch}" if schedule.source else ""
    style = page_colours() + _read("style.css")
    # In one function, so that nothing is global; strict from its first statement on.
    script = '(() => {\n"use strict";\n' + "".join(_read(name) for name in _SCRIPTS) + "})();\n"
    page = Template(_read("page.html")).substitute(
        title=html_text(f"{schedule.name}{batch}, within {budget_in_words(schedule)}"),
        introduction=html_text(
            "One training step by its schedule, and as plain training runs it. "
            f"Memory and latency are {analysis.costs}. "
            f"Solved in {schedule.seconds:.1f} s by {schedule.solver}: {schedule.status}."
        ),
        figures="".join(
            f'<div class="figure"><dt>{html_text(label)}</dt><dd><b>{html_text(value)}</b>'
            f"<span>{html_text(note)}</span></dd></div>\n"
            for label, value, note in _figures(analysis)
        ),
        details="".join(
            f"<dt>{html_text(what)}</dt><dd>{html_text(said)}</dd>\n" for what, said in _details(analysis)
        ),
        at_peaks="".join(map(row_html, _at_peaks(analysis))),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        explanation=explanation.written,
        tradeoff="" if tradeoff is None else _tradeoff(tradeoff),
        data=_data(page_data(analysis) | {"tradeoff": None if tradeoff is None else tradeoff_data(tradeoff)}),
    )
    write_atomically(path, page)


def _figures(analysis: Analysis) -> list[tuple[str, str, str]]:
    """(label, figure in large type, its comparison)."""
    schedule, scheduled, plain = analysis.schedule, analysis.scheduled, analysis.plain
    spare = schedule.budget_bytes - scheduled.peak_bytes
    within = f"{format_bytes(spare)} above the peak" if spare >= 0 else f"exceeded by {format_bytes(-spare)}"
    of_plain = f"{scheduled.peak_bytes / plain.peak_bytes:.0%} of plain training's {format_bytes(plain.peak_bytes)}"
    over_plain = f"{analysis.overhead:+.1%} over plain training's {format_ms(plain.latency_ms)}, {analysis.costs}"
    gap, bound = "unknown", "no bound on the step time is proven"
    if schedule.lower_bound_ms > 0:
        solved = cost_source(schedule)
        other_costs = "" if solved == analysis.costs else f" (costs {solved})"
        gap = f"{schedule.gap:.1%}"
        bound = f"no schedule within the budget is faster than {format_ms(schedule.lower_bound_ms)}{other_costs}"
    return [
        ("Budget", budget_in_words(schedule), within),
        ("Peak", format_bytes(scheduled.peak_bytes), of_plain),
        ("Step time", format_ms(scheduled.latency_ms), over_plain),
        ("Gap", gap, bound),
    ]


def _details(analysis: Analysis) -> list[tuple[str, str]]:
    """Everything else about a schedule, as (name, in words)."""
    schedule, profile = analysis.schedule, analysis.scheduled.profile
    inputs = ", ".join(f"{name} {_layout(spec)}" for name, spec in schedule.inputs.items())
    environment = ", ".join(f"{name} {value}" for name, value in sorted(profile.environment.items()))
    return [
        ("Inputs", inputs or "none"),
        ("Costs", analysis.costs + (f" ({environment})" if environment else "")),
        ("Results", exactness(schedule)),
        ("Peak at", f"{analysis.scheduled.peak_operator}; plain training: {analysis.plain.peak_operator}"),
        ("Fingerprint", schedule.fingerprint),
    ]


def _at_peaks(analysis: Analysis) -> list[tuple[str, ...]]:
    """(held for, scheduled, plain) at the peak of each: a page without a script shows it instead of pictures."""
    sides = (analysis.scheduled, analysis.plain)
    rows = [(holding, *(format_bytes(side.peak_bytes_of[holding]) for side in sides)) for holding in Holding]
    return [
        *rows,
        ("in all", *(format_bytes(side.peak_bytes) for side in sides)),
        ("at operator", *(side.peak_operator for side in sides)),
        ("step time", *(format_ms(side.latency_ms) for side in sides)),
    ]


def _tradeoff(tradeoff: "Tradeoff") -> str:
    """The section of the curve, with the numbers that it is drawn from."""
    limit = f"{tradeoff.time_limit:.2g} s"
    return (
        '<section id="tradeoff" aria-labelledby="tradeoff-heading">\n'
        '<h2 id="tradeoff-heading">Step time against memory</h2>\n'
        f"<p>Smallest budget: {html_text(smallest_in_words(tradeoff))}. Each budget was solved for {limit}; "
        "--time-limit gives it more. In the picture, no schedule can be in the grey region (proven).</p>\n"
        f'<figure id="curve" class="scripted" hidden></figure>\n{table_html(*tradeoff_table(tradeoff))}</section>\n'
    )


def _layout(spec: TensorSpec) -> str:
    return f"{'×'.join(map(str, spec.shape)) or 'scalar'} {spec.dtype}"


def _data(columns: object) -> str:
    """JSON that can't end the script element which it stands in, whatever its texts are."""
    return json.dumps(columns, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _read(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy allows a style or a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
