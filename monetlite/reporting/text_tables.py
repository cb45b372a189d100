"""Tables without lines, for the terminal and for Markdown; tables as CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

MIN_FOLDED = 12
"""Narrowest first column whose texts are folded."""


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Names in bold, each beside a text that may take several lines. Texts are shown as they are, not as markup."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, escape(text))
    return table


class FiguresTable(Table):
    """A table; its rows one after another where it is too wide, so that no figure is cut off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [[Text.from_markup(str(cell)) for cell in (item.header, *item.cells)] for item in self.columns]
        widths = [max(text.cell_len for text in column) for column in columns]
        if not self.columns[0].no_wrap:
            widths[0] = min(widths[0], MIN_FOLDED)
        if sum(widths) + 2 * (len(widths) - 1) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield self.title
        heads, *rows = zip(*columns, strict=True)
        for row in rows:
            facts = Table(box=None, show_header=False, pad_edge=False)
            facts.add_column(style="bold", overflow="fold")
            facts.add_column(overflow="fold")
            for head, text in zip(heads, row, strict=True):
                if text.plain:
                    facts.add_row(head, text)
            yield facts
            yield ""


def figures_table(
    columns: Iterable[str], rows: Iterable[Sequence[str]] = (), *, left: Sequence[str] = ("",), title: str = ""
) -> Table:
    """Figures below the names of their columns, all to the right but for those of the columns `left`.

    The texts of the first column may be folded, if it is one of those.
    """
    table = FiguresTable(title=title or None, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        if column in left:
            table.add_column(column, overflow="fold", no_wrap=number > 0)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ("",)) -> list[str]:
    """The lines of a table in Markdown."""
    rules = (" --- " if column in left else " ---: " for column in columns)
    lines = [f"| {' | '.join(columns)} |".replace("|  |", "| |"), f"|{'|'.join(rules)}|"]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]


def csv_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as CSV, under the names of their fields."""
    first, *others = rows
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(first), lineterminator="\n")
    writer.writeheader()
    writer.writerows([first, *others])
    return text.getvalue()
