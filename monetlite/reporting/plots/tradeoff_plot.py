"""Step time against memory: monetlite's curve, the proven bound, and the baselines."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from monetlite.core.units import format_bytes
from monetlite.planning.tradeoff import CHECKMATE, GIST, GREEDY, Tradeoff, TradeoffPoint
from monetlite.reporting.analysis import Analysis
from monetlite.reporting.plots.drawing import (
    INK,
    PALE,
    PAPER,
    PointStyle,
    add_axes,
    add_note,
    bytes_axis,
    heading,
    new_figure,
    styled,
)
from monetlite.reporting.plots.point_labels import Label, place_labels
from monetlite.reporting.text_solve import smallest_in_words
from monetlite.reporting.text_tradeoff import OURS, single_points

WIDTH, HEIGHT = 10.0, 6.4
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.8, 2.4, 1.2, 0.65


_CURVES = {
    OURS: PointStyle("#0b5394", "o", "-", "monetlite"),
    CHECKMATE: PointStyle("#d55e00", "s", "--", "Checkmate: what is kept\nand recomputed alone"),
    GIST: PointStyle("#1b8a6b", "^", "-.", "Gist: masks, and nothing\nrecomputed"),
    GREEDY: PointStyle("#8c6bb1", "D", ":", "greedy: dropping what is\ncheap to recompute"),
}
_SINGLES = (
    PointStyle(INK, "o", filled=False),
    PointStyle("#b00020", "*"),
    PointStyle("#666666", "X"),
    PointStyle("#666666", "P"),
)
"""Styles of plain training, this schedule, and the two ways of checkpointing."""
_MIN_SPAN = 0.02
"""Smallest difference between overheads that fills the picture."""
_ABOVE = 0.5
"""Height above monetlite's and all single points that curves are shown to, as a share of those points' span."""
_IMPOSSIBLE = "#d9d9d9"


@styled()
def draw_tradeoff(tradeoff: Tradeoff, analysis: Analysis) -> Figure:
    """Overhead over budget, with the region in which it is proven that no schedule can be."""
    figure = new_figure(WIDTH, HEIGHT)
    lines = [f"costs {analysis.costs}", f"smallest budget: {smallest_in_words(tradeoff)}"]
    heading(figure, f"{analysis.title}: step time against memory", lines, _LEFT)
    axes = add_axes(figure, _LEFT, _BOTTOM, WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM)
    ours = tuple(dict.fromkeys(item.best for item in tradeoff.budgets if item.best is not None))
    curves = {OURS: ours, **{name: tradeoff.others.get(name, ()) for name in (CHECKMATE, GIST, GREEDY)}}
    _limit(axes, tradeoff, curves)
    _shade_impossible(axes, tradeoff)
    axes.axhline(0, color=PALE, linewidth=0.8, zorder=1)
    for name, points in curves.items():
        if points:
            look = _CURVES[name]
            worst = max(tradeoff.overhead(point.latency_ms) for point in points)
            beyond = f"\n(up to {worst:+.0%})" if worst > axes.get_ylim()[1] else ""
            axes.plot(
                [point.peak_bytes for point in points],
                [tradeoff.overhead(point.latency_ms) for point in points],
                look.line,
                color=look.colour,
                marker=look.marker,
                markersize=5,
                markeredgecolor=PAPER,
                markeredgewidth=0.6,
                linewidth=2.2 if name == OURS else 1.3,
                zorder=4 if name == OURS else 3,
                label=look.meaning + beyond,
            )
    _label_points(figure, axes, tradeoff, curves)
    _name_axes(axes, tradeoff)
    axes.legend(loc="upper left", bbox_to_anchor=(1.03, 1.0), borderaxespad=0, handlelength=3, labelspacing=0.9)
    return figure


def _limit(axes: Axes, tradeoff: Tradeoff, curves: Mapping[str, Sequence[TradeoffPoint]]) -> None:
    """Set limits that show everything but baselines far above the rest."""
    singles = single_points(tradeoff)
    points = [*singles.values(), *(point for of in curves.values() for point in of)]
    least = min(tradeoff.smallest_proven_bytes, *(point.peak_bytes for point in points))
    most = max(point.peak_bytes for point in points)
    wide = (most - least) or most
    axes.set_xlim(least - 0.06 * wide, most + 0.06 * wide)
    bounds = [tradeoff.overhead(item.lower_bound_ms) for item in tradeoff.budgets]
    overheads = [tradeoff.overhead(point.latency_ms) for point in (*singles.values(), *curves[OURS])]
    low, high = min(0.0, *bounds, *overheads), max(overheads)
    every = [tradeoff.overhead(point.latency_ms) for point in points]
    high = min(max(every), high + _ABOVE * (high - low)) if high > low else max(every)
    tall = max(high - low, _MIN_SPAN)
    axes.set_ylim(low - 0.08 * tall, max(high, low + tall) + 0.12 * tall)


def _shade_impossible(axes: Axes, tradeoff: Tradeoff) -> None:
    """Shade the region below the bounds, and the budgets below the smallest feasible one."""
    left, _ = axes.get_xlim()
    bottom, _ = axes.get_ylim()
    budgets = [item.budget_bytes for item in tradeoff.budgets]
    bounds = [tradeoff.overhead(item.lower_bound_ms) for item in tradeoff.budgets]
    proven = min(tradeoff.smallest_proven_bytes, budgets[0])
    axes.axvspan(left, proven, color=_IMPOSSIBLE, linewidth=0, zorder=0)
    axes.stairs(
        bounds,
        [proven, *budgets],
        baseline=bottom,
        fill=True,
        color=_IMPOSSIBLE,
        linewidth=0,
        zorder=0,
        label="no schedule can be here\n(proven)",
    )
    axes.stairs(bounds, [proven, *budgets], baseline=None, color=PALE, linewidth=0.9, zorder=2)
    axes.axvline(proven, color=PALE, linewidth=0.9, zorder=2)
    across = axes.get_xaxis_transform()
    text = f"nothing fits below {format_bytes(proven)}"
    style = {"rotation": 90, "ha": "right", "va": "top", "size": 8}
    add_note(axes, text, (proven, 0.98), (-3, 0), xycoords=across, **style)
    reached = tradeoff.smallest_reached_bytes
    if reached > proven:
        axes.axvline(reached, color=_CURVES[OURS].colour, linewidth=0.9, linestyle=(0, (2, 2)), zorder=2)
        text = f"smallest peak reached: {format_bytes(reached)}"
        add_note(axes, text, (reached, 1), (-2, 4), xycoords=across, size=8, color=_CURVES[OURS].colour)


def _bound_line(tradeoff: Tradeoff) -> list[tuple[float, float]]:
    """The corners of the bound's line: each bound holds up to its budget."""
    corners: list[tuple[float, float]] = []
    left: float = tradeoff.smallest_proven_bytes
    for item in tradeoff.budgets:
        bound = tradeoff.overhead(item.lower_bound_ms)
        corners += [(left, bound), (item.budget_bytes, bound)]
        left = item.budget_bytes
    return corners


def _label_points(
    figure: Figure, axes: Axes, tradeoff: Tradeoff, curves: Mapping[str, Sequence[TradeoffPoint]]
) -> None:
    labels = []
    for (name, point), look in zip(single_points(tradeoff).items(), _SINGLES, strict=False):
        overhead = tradeoff.overhead(point.latency_ms)
        axes.plot(
            [point.peak_bytes],
            [overhead],
            look.marker,
            color=look.colour,
            markersize=12 if look.marker == "*" else 8.5,
            markeredgecolor=PAPER if look.filled else look.colour,
            markerfacecolor=look.colour if look.filled else "none",
            markeredgewidth=0.8 if look.filled else 1.5,
            zorder=6,
        )
        text = f"{name}\n{format_bytes(point.peak_bytes)}"
        if point is not tradeoff.plain:
            text += f", {overhead:+.1%}"
        labels.append(Label(text=text, x=point.peak_bytes, y=overhead))
    lines: list[list[tuple[float, float]]] = [
        [(point.peak_bytes, tradeoff.overhead(point.latency_ms)) for point in points] for points in curves.values()
    ]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    lines += [[(left, 0.0), (right, 0.0)], [(tradeoff.smallest_reached_bytes, end) for end in (bottom, top)]]
    place_labels(figure, axes, labels, [*lines, _bound_line(tradeoff)])


def _name_axes(axes: Axes, tradeoff: Tradeoff) -> None:
    """Memory in bytes and as a share of plain training's, overhead in percent."""
    plain_bytes = tradeoff.plain.peak_bytes
    bytes_axis(axes.xaxis, axes.get_xlim()[1], "peak memory", lambda size: f"{size / plain_bytes:.0%}")
    axes.set_xlabel(f"{axes.get_xlabel()}, and as a share of plain training's")
    bottom, top = axes.get_ylim()
    digits = 0 if top - bottom > 0.1 else 1
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:+.{digits}%}" if share else "0%"))
    axes.set_ylabel("step time over plain training's")
