"""Labels beside points, clear of each other and of the lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import cos, hypot, pi, sin

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

_ANGLES = [2 * pi * (number + 0.5) / 24 for number in range(24)]
_DISTANCES = (5, 10, 16, 24, 34, 46, 60, 80, 105)
"""From a point to its label, in points (1/72 inch)."""
_JOINED = 12.0
"""A label further away than this is joined to its point by a line."""
_CLEARANCE = 3.0
_CROSSING = 1e6
"""Cost of a joining line that runs over another point or label: more than covering any text."""
_OVER_TEXT, _OVER_LINE = 20.0, 20.0
"""Costs of covering a square pixel of a label or of a point, and a piece of a line."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text, and its point in data coordinates."""

    text: str
    x: float
    y: float


def place_labels(
    figure: Figure, axes: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]]
) -> None:
    """Put each label as near to its point as there is room; where there is none, where it covers least.

    Args:
        figure: that holds the axes.
        axes: with their final limits.
        labels: in the order in which they choose.
        lines: points, in data coordinates, that straight lines join, which no label should cover.
    """
    scale = figure.dpi / 72
    panel = axes.get_window_extent()
    apart = _CLEARANCE * scale
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    taken = [Bbox([point - apart, point + apart]) for point in points]
    # Points of the lines, so close to each other that no label fits between them.
    drawn = [points[0]]
    for line in lines:
        for one, other in pairwise(axes.transData.transform(line) if line else ()):
            drawn += list(np.linspace(one, other, int(hypot(*(other - one)) / apart) + 2))
    for number, (label, point) in enumerate(zip(labels, points, strict=True)):
        note = axes.annotate(
            label.text,
            (label.x, label.y),
            (0, 0),
            textcoords="offset points",
            size=8,
            va="bottom",
            zorder=7,
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4},
        )
        size = Text.get_window_extent(note)  # without the line
        half = np.asarray([size.width, size.height]) / 2
        others = taken[:number] + taken[number + 1 :]
        best, chosen, joined = float("inf"), size, False
        for distance, angle in product(_DISTANCES, _ANGLES):
            middle = point + np.asarray([cos(angle), sin(angle)]) * (half + distance * scale)
            box = Bbox([middle - half, middle + half])
            outside = size.width * size.height - _overlap(box, panel)
            covered = sum(_overlap(box, other) for other in taken) + outside
            way = np.linspace(point, middle, 41)
            crossing = any(other.count_contains(way) for other in others)
            cost = round(_OVER_TEXT * covered + _OVER_LINE * box.count_contains(drawn) + _CROSSING * crossing)
            if cost < best:
                best, chosen = cost, box
                joined = distance > _JOINED
            if cost == 0:
                break
        taken.append(chosen)
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(joined)
        note.set_position(((chosen.x0 - point[0]) / scale, (chosen.y0 - point[1]) / scale))


def _overlap(one: Bbox, other: Bbox) -> float:
    """The area that two boxes share."""
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else float(shared.width * shared.height)
