"""Parts that pictures share: colours that also differ in lightness, units on axes, and files that are reproducible.

Everything is drawn on a `Figure` of its own, with matplotlib's defaults and not a person's settings; no state
outlives a call.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from monetlite.core.files.atomic import write_atomically
from monetlite.reporting.palette import Fill

INK, PALE, PAPER = "#222222", "#767676", "#ffffff"
BUDGET = "#b00020"


class PointStyle(NamedTuple):
    """Colour and marker of points, and the style of the line that joins them; the meaning is for a legend."""

    colour: str
    marker: str
    line: str = ""
    meaning: str = ""
    filled: bool = True


_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.0,
    "text.color": INK,
    "text.parse_math": False,  # a module's name may hold two dollars
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "monetlite",  # names within the file are the same each time
    "pdf.fonttype": 42,
}
_METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": "monetlite"},
    "svg": {"Creator": "monetlite", "Date": None},
    "pdf": {"Creator": "monetlite", "Producer": "monetlite", "CreationDate": None},
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw with these settings instead of a person's own, which are back afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. Text is measured as Agg draws it: its size is the same in every format."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | Path, title: str) -> None:
    """Write a figure in the format that the file's ending names, atomically.

    Raises:
        ScheduleFileError: the file can't be written; what was there before is unchanged.
    """
    kind = Path(path).suffix[1:].lower()
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format=kind, dpi=figure.dpi, metadata={**_METADATA[kind], "Title": title})
    write_atomically(path, buffer.getvalue())


def heading(figure: Figure, title: str, lines: list[str], left: float) -> None:
    """A title and the lines below it, at the top; `left` in inches."""
    width, height = (float(side) for side in figure.get_size_inches())
    room = width - left - 0.1
    figure.text(
        left / width,
        1 - 0.2 / height,
        fitted(figure, title, room, size=12, weight="bold"),
        size=12,
        weight="bold",
        va="top",
    )
    for number, line in enumerate(lines):
        text = fitted(figure, line, room, size=9)
        figure.text(left / width, 1 - (0.47 + 0.19 * number) / height, text, color="#444444", va="top")


def add_axes(
    figure: Figure, left: float, bottom: float, width: float, height: float, share_x: Axes | None = None
) -> Axes:
    """Axes at a place in inches."""
    whole_width, whole_height = figure.get_size_inches()
    return figure.add_axes(
        (left / whole_width, bottom / whole_height, width / whole_width, height / whole_height), sharex=share_x
    )


def bytes_axis(axis: Axis, largest_bytes: float, label: str, below: Callable[[float], str] | None = None) -> None:
    """Ticks in the decimal unit that suits the largest size, each with the text that `below` returns for it."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    factor, unit = next(((factor, unit) for factor, unit in units if largest_bytes >= factor), (1.0, "bytes"))
    _scaled(axis, factor, f"{label} ({unit})", below)


def time_axis(axis: Axis, largest_ms: float, label: str) -> None:
    """Ticks in milliseconds, or in seconds where there are many."""
    factor, unit = (1000.0, "s") if largest_ms >= 10_000 else (1.0, "ms")
    _scaled(axis, factor, f"{label} ({unit})")


def _scaled(axis: Axis, factor: float, label: str, below: Callable[[float], str] | None = None) -> None:
    def tick(value: float, _: object) -> str:
        text = f"{value / factor:g}"
        return text if below is None else f"{text}\n{below(value)}"

    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(tick))
    axis.set_label_text(label)


def stack_areas(
    axes: Axes, layers: Iterable[tuple[str, Sequence[int], Fill]], edges: Sequence[float], line_width: float
) -> list[int]:
    """Draw areas (label, height of each column, fill) from the bottom up, and a line on top, which is returned."""
    below = [0] * (len(edges) - 1)
    for label, heights, fill in layers:
        above = [base + height for base, height in zip(below, heights, strict=True)]
        axes.stairs(
            above,
            edges,
            baseline=below,
            fill=True,
            facecolor=fill.colour,
            edgecolor=INK,
            hatch=fill.hatch,
            linewidth=0,
            label=label,
        )
        below = above
    axes.stairs(below, edges, color=INK, linewidth=line_width)
    return below


def add_legend(
    to: Axes | Figure, entries: Iterable[tuple[Fill, str]], title: str, at: tuple[float, float], **more: Any
) -> Legend:
    """A legend of areas, with its upper left corner at a place in fractions of the axes or the figure."""
    patches = [
        Patch(facecolor=fill.colour, edgecolor=INK, hatch=fill.hatch, linewidth=0.4, label=label)
        for fill, label in entries
    ]
    places: Any = {"loc": "upper left", "bbox_to_anchor": at, "borderaxespad": 0, "alignment": "left"}
    return to.legend(handles=patches, title=title, **places, **more)


def add_note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """A text so many points (1/72 inch) from a place in data coordinates, or in those of `xycoords`."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **style)


def fitted(figure: Figure, text: str, width: float, *, size: float, weight: str = "normal") -> str:
    """A text shortened in its middle to fit into so many inches."""
    note = figure.text(0, 0, text, size=size, weight=weight)
    most = len(text)
    while most > 1 and note.get_window_extent().width > width * figure.dpi:
        most -= max(1, most // 20)
        note.set_text(elided(text, most))
    note.remove()
    return note.get_text()


def elided(text: str, most: int) -> str:
    """A name shortened in its middle to so many characters."""
    if len(text) <= most:
        return text
    front = (most - 1) // 2
    return f"{text[:front]}…{text[len(text) - (most - 1 - front) :]}"
