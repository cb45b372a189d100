"""Labels beside points, clear of each other and of the lines."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from numpy.typing import NDArray

from monetlite.reporting.plots.drawing import renderer_of

Boxes = NDArray[np.float64]
"""Rows of left, bottom, right and top, in pixels."""

_DIRECTIONS = 24
_DISTANCES = (5, 10, 16, 24, 34, 46, 60, 80, 105)
"""From a point to its label, in points (1/72 inch)."""
_JOINED = 12.0
"""A label further away than this is joined to its point by a line."""
_CLEARANCE = 3.0
_CROSSING = 1e6
"""Cost of a joining line that runs over another point or label: more than covering any text."""
_OVER_TEXT = 20.0
"""Cost of covering a square pixel of a label or of a point, over that of a line's."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """A text, and its point in data coordinates."""

    text: str
    x: float
    y: float


def place_labels(
    figure: Figure, axes: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]]
) -> list[Annotation]:
    """Put each label as near to its point as there is room; where there is none, where it covers least.

    Args:
        figure: that holds the axes.
        axes: with their final limits.
        labels: in the order in which they choose.
        lines: points, in data coordinates, that straight lines join, which no label should cover.
    """
    renderer = renderer_of(figure)
    scale = figure.dpi / 72
    inside = np.asarray([axes.get_window_extent(renderer).extents])
    points: NDArray[np.float64] = axes.transData.transform([(label.x, label.y) for label in labels])
    apart = _CLEARANCE * scale
    taken = _around(points, apart)
    drawn = np.concatenate(
        [_around(_along(axes.transData.transform(line), apart), scale) for line in lines if line]
    )
    placed = []
    for number, label in enumerate(labels):
        note = axes.text(label.x, label.y, label.text, size=8)
        size = note.get_window_extent(renderer)
        note.remove()
        boxes, distances = _candidates(points[number], size.width, size.height, scale)
        outside = size.width * size.height - _shared(boxes, inside)
        others = np.delete(taken, number, axis=0)
        crossing = np.asarray([_passes(points[number], box, others) for box in boxes])
        cost = _OVER_TEXT * (_shared(boxes, taken) + outside) + _shared(boxes, drawn) + _CROSSING * crossing
        chosen = int(np.argmin(np.round(cost)))
        taken = np.concatenate([taken, boxes[chosen : chosen + 1]])
        offset = (boxes[chosen, :2] - points[number]) / scale
        line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4}
        placed.append(
            axes.annotate(
                label.text,
                (label.x, label.y),
                xytext=(float(offset[0]), float(offset[1])),
                textcoords="offset points",
                size=8,
                va="bottom",
                zorder=7,
                arrowprops=line if distances[chosen] > _JOINED else None,
            )
        )
    return placed


def _candidates(
    point: NDArray[np.float64], width: float, height: float, scale: float
) -> tuple[Boxes, NDArray[np.float64]]:
    """Places for a label all around a point, the nearest first, and how far away they are."""
    angles = 2 * np.pi * (np.arange(_DIRECTIONS) + 0.5) / _DIRECTIONS
    distances = np.repeat(np.asarray(_DISTANCES, dtype=np.float64), _DIRECTIONS)
    angles = np.tile(angles, len(_DISTANCES))
    x = point[0] + np.cos(angles) * (width / 2 + distances * scale)
    y = point[1] + np.sin(angles) * (height / 2 + distances * scale)
    return np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1), distances


def _shared(boxes: Boxes, others: Boxes) -> NDArray[np.float64]:
    """The area of each box that others cover."""
    right_top = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    left_bottom = np.maximum(boxes[:, None, :2], others[None, :, :2])
    sides = np.clip(right_top - left_bottom, 0, None)
    covered: NDArray[np.float64] = sides.prod(axis=2).sum(axis=1)
    return covered


def _passes(point: NDArray[np.float64], box: NDArray[np.float64], others: Boxes) -> bool:
    """True if a line from a point to the middle of its label passes another point or label."""
    middle = (box[:2] + box[2:]) / 2
    on_the_way = (point + np.linspace(0, 1, 41)[:, None] * (middle - point))[:, None]
    inside = (on_the_way > others[None, :, :2]) & (on_the_way < others[None, :, 2:])
    return bool(inside.all(axis=2).any())


def _around(points: NDArray[np.float64], distance: float) -> Boxes:
    return np.concatenate([points - distance, points + distance], axis=1)


def _along(corners: NDArray[np.float64], apart: float) -> NDArray[np.float64]:
    """Points of a line so close to each other that no label fits between them."""
    pieces = [corners[:1]]
    for one, other in pairwise(corners):
        count = max(1, int(np.hypot(*(other - one)) / apart))
        pieces.append(one + np.linspace(0, 1, count + 1)[1:, None] * (other - one))
    return np.concatenate(pieces)
