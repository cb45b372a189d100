"""The page: its skeleton, style and script from `page/`, filled with a schedule's figures and written to a file."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from importlib import resources
from os import PathLike
from string import Template

from monetlite.core.costs import Profile
from monetlite.core.files.atomic import write_atomically
from monetlite.core.schedule import Schedule
from monetlite.reporting.html import page_facts as facts
from monetlite.reporting.html.page_data import columns_of
from monetlite.reporting.html.page_steps import Pair, pair_up

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
    "main.js",
)
"""In the order in which they need each other."""


def write_report(path: str | PathLike[str], schedule: Schedule, profile: Profile, plain: Profile) -> None:
    """Write a schedule as an HTML page that loads nothing and sends nothing, atomically.

    Args:
        path: where to.
        schedule: what to show.
        profile: the graph and the costs that it is shown with.
        plain: those of plain training, whose images may be laid out otherwise.

    Raises:
        ScheduleMismatch, IllegalSchedule: the schedule is not one of the profile's graph.
        ScheduleFileError: the file can't be written; what was there before is left as it was.
    """
    write_atomically(path, page_of(pair_up(schedule, profile, plain)))


def page_of(pair: Pair) -> str:
    """The page as text: the same bytes for the same schedule and costs."""
    style = _read("style.css")
    # In one function, so that nothing is global; strict from its first statement on.
    script = '(() => {\n"use strict";\n' + "".join(_read(name) for name in _SCRIPTS) + "})();\n"
    return Template(_read("page.html")).substitute(
        title=_text(facts.title_of(pair)),
        introduction=_text(facts.introduction(pair)),
        figures="".join(
            f'<div class="figure"><dt>{_text(item.label)}</dt><dd><b>{_text(item.value)}</b>'
            f"<span>{_text(item.note)}</span></dd></div>\n"
            for item in facts.figures(pair)
        ),
        details="".join(f"<dt>{_text(what)}</dt><dd>{_text(said)}</dd>\n" for what, said in facts.details(pair)),
        at_peaks="".join(_row(row) for row in facts.at_peaks(pair)),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_data(columns_of(pair)),
    )


def _data(columns: object) -> str:
    """JSON that can't end the script element which it stands in, whatever its texts are."""
    return json.dumps(columns, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _text(text: str) -> str:
    """A text as HTML shows it, whatever it contains; half a surrogate pair, which no file can hold, becomes `?`."""
    return html.escape(text.encode(errors="replace").decode())


def _row(cells: Iterable[str]) -> str:
    first, *rest = (_text(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>\n"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a Content-Security-Policy allows a style or a script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


__all__ = ["page_of", "write_report"]
