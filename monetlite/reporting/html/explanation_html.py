"""An explanation as HTML: the sentences of `monetlite show` on the page."""

import html
from collections.abc import Iterable, Sequence


def html_text(text: str) -> str:
    """A text as HTML shows it, whatever it contains; half a surrogate pair, which no file can hold, becomes `?`."""
    return html.escape(text.encode(errors="replace").decode())


class HtmlWriter:
    """An explanation as HTML; `written` has it."""

    def __init__(self) -> None:
        self.written = ""

    def heading(self, text: str) -> None:
        self.written += f"<h3>{html_text(text)}</h3>\n"

    def say(self, text: str) -> None:
        self.written += f"<p>{html_text(text)}</p>\n"

    def list_sizes(self, rows: Iterable[tuple[str, str, str]]) -> None:
        self.written += table_html((), rows)

    def list_stories(self, rows: Iterable[tuple[str, str]]) -> None:
        items = (f"<li>{html_text(title)}<br>{html_text(sentences)}</li>\n" for title, sentences in rows)
        self.written += f"<ol>\n{''.join(items)}</ol>\n"

    def list_figures(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.written += table_html(columns, rows)


def table_html(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column has names; those that begin with spaces belong to the row above."""
    heads = "".join(f'<th scope="col">{html_text(column)}</th>' for column in columns)
    head = f"<thead><tr>{heads}</tr></thead>\n" if columns else ""
    body = "".join(map(row_html, rows))
    table = f'<table class="figures-table">\n{head}<tbody>\n{body}</tbody></table>'
    return f'<div class="scroller">{table}</div>\n'


def row_html(cells: Sequence[str]) -> str:
    """A row of a table, named by its first cell."""
    first, *rest = cells
    inner = ' class="inner"' if first.startswith(" ") else ""
    others = "".join(f"<td>{html_text(cell)}</td>" for cell in rest)
    return f'<tr><th scope="row"{inner}>{html_text(first.strip())}</th>{others}</tr>\n'
