"""What tests of pictures share: the areas that are drawn, the words, and whether they can be read."""

import itertools
from xml.etree import ElementTree

import numpy as np
from commands import run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def plot(solved, *arguments):
    path, spec = solved
    return run("show", path, "--model", spec, *arguments)


def words_of_svg(path):
    """The text that a reader of the file can find."""
    texts = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return " ".join("".join(item.itertext()) for item in texts)


def stacks(axes):
    """The areas of a panel, from the bottom up: (what it is, upper edge, lower edge, where columns end)."""
    areas = [item for item in axes.patches if isinstance(item, StepPatch) and item.get_fill()]
    return [(item.get_label(), *map(np.asarray, item.get_data()[::2]), item.get_data().edges) for item in areas]


def assert_readable(figure):
    """No text covers another, and none leaves the picture."""
    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    boxes = []
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            unseen |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    for item in figure.findobj(Text):
        if item.get_visible() and item.get_text().strip() and item not in unseen:
            box = Text.get_window_extent(item, renderer)
            if box.width > 0:
                boxes.append((item.get_text(), box))
    assert len(boxes) > 15
    for text, box in boxes:
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.width + 1, text
        assert box.y1 <= figure.bbox.height + 1, text
    for (text, box), (other, beside) in itertools.combinations(boxes, 2):
        common = Bbox.intersection(box, beside)
        assert common is None or common.width <= 1 or common.height <= 1, (text, other)
