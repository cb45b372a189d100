"""Colours and patterns of the purposes of memory: the same in pictures and on pages."""

from typing import NamedTuple

from monetlite.core.step_analysis import Holding


class Fill(NamedTuple):
    """Colour and pattern of an area; neighbours differ in lightness, so that they do in print too."""

    colour: str
    hatch: str | None = None


FILLS = {
    Holding.WEIGHTS: Fill("#394152"),
    Holding.INPUTS: Fill("#efeeea"),
    Holding.OPTIMIZER: Fill("#858b9b", "..."),
    Holding.WEIGHT_GRADIENTS: Fill("#e0b7e0", "\\\\\\\\"),
    Holding.STORED: Fill("#1465b0"),
    Holding.RECOMPUTED: Fill("#f1a40a", "////"),
    Holding.GRADIENTS: Fill("#249c7a"),
    Holding.WORKSPACE: Fill("#e8dd73", "xxxx"),
}
"""After the palette by Okabe and Ito; those that often touch are 14 or more apart in lightness (CIE L*)."""


def page_colours() -> str:
    """The same colours as CSS classes, such as `held-stored`."""
    return "".join(
        f".held-{holding.replace(' ', '-')} {{ --colour: {fill.colour}; }}\n" for holding, fill in FILLS.items()
    )
