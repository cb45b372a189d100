"""Ways to write an explanation: on a terminal; `html` has the one on a page."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from monetlite.reporting.text_tables import figures_table


class ExplanationWriter(Protocol):
    """Headings, sentences, lists and tables, one below the other: on a terminal or on a page."""

    def heading(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def list_sizes(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Rows of a name, a size, and a note."""

    def list_stories(self, rows: Iterable[tuple[str, str]]) -> None:
        """Numbered rows of a title, and sentences below it."""

    def list_figures(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table, whose last row is a sum. Names that belong to the row above begin with spaces."""


class TerminalWriter:
    """An explanation on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def heading(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(text, style="bold"))

    def say(self, text: str) -> None:
        self._console.print(Padding(Text(text), 0))

    def list_sizes(self, rows: Iterable[tuple[str, str, str]]) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for name, size, note in rows:
            table.add_row(Text(f"  {name}"), size, note)
        self._console.print(table)

    def list_stories(self, rows: Iterable[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right")
        table.add_column(overflow="fold")
        for number, (title, sentences) in enumerate(rows, 1):
            table.add_row(Text(f"{number}."), Text(f"{title}\n{sentences}"))
        self._console.print(table)

    def list_figures(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = figures_table(columns, rows)
        table.rows[-1].style = "bold"
        self._console.print(table)
