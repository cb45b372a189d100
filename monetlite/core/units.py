"""Bytes as people write them, in and out. Everywhere else a size is an integer number of bytes."""

import re
from decimal import Decimal
from typing import Annotated

from msgspec import Meta

from monetlite.core.errors import BudgetError

MAX_INTEGER = 2**62
"""The largest whole number that a file may hold."""
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
"""A whole number of bytes, elements or operators."""
Positive = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Amount = Annotated[float, Meta(ge=0, le=MAX_INTEGER)]
"""A number that is not negative, such as milliseconds."""

_FACTORS = {
    "": 1,
    "b": 1,
    **dict.fromkeys(("k", "kb"), 10**3),
    **dict.fromkeys(("m", "mb"), 10**6),
    **dict.fromkeys(("g", "gb"), 10**9),
    **dict.fromkeys(("t", "tb"), 10**12),
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NUMBER = r"([0-9]+(?:[.,][0-9]+)?|[.,][0-9]+)"
_SIZE = re.compile(_NUMBER + r"\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(_NUMBER + r"\s*%", re.ASCII)
_THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+\s*[a-z%]*", re.IGNORECASE | re.ASCII)
_MIN_WITHOUT_UNIT = 10**6
"""A smaller number without a unit is refused in text: gigabytes were meant, and nothing trains in 6 bytes."""
_MAX_BYTES = 2**60


def parse_budget(budget: str | int | float, plain_peak_bytes: int | None = None) -> int:
    """Return a memory budget in bytes.

    Args:
        budget: `"6GB"` or `"6G"` (10⁹ bytes), `"6GiB"` (2³⁰), `"1.5GB"` or `"1,5GB"`, a plain number of bytes, or
            `"50%"` of the peak of plain training.
        plain_peak_bytes: the peak that a percentage refers to, in bytes.

    Raises:
        BudgetError: not one of those forms, not positive, or larger than any machine.

    >>> parse_budget("6GB"), parse_budget("1.5 GiB"), parse_budget("50%", plain_peak_bytes=1001)
    (6000000000, 1610612736, 500)
    """
    forms = "write 6GB, 6GiB, 6000MB, a number of bytes, or 50% (of plain training's peak)"
    text = str(budget).strip()
    if isinstance(budget, bool):
        raise BudgetError(f"budget {budget!r} is not an amount of memory; {forms}")
    if _THOUSANDS.fullmatch(text):
        raise BudgetError(f"budget {text!r} can be read in two ways; write it without the comma")
    if percent := _PERCENT.fullmatch(text):
        if plain_peak_bytes is None:
            raise BudgetError(f"budget {text!r} needs plain training's peak, which is not known here; give bytes")
        amount = _number(percent) * plain_peak_bytes / 100
    else:
        size = _SIZE.fullmatch(text)
        factor = _FACTORS.get(size[2].lower()) if size else None
        if size is None or factor is None:
            raise BudgetError(f"budget {text!r} is not an amount of memory; {forms}")
        amount = _number(size) * factor
        if isinstance(budget, str) and not size[2] and 1 <= amount < _MIN_WITHOUT_UNIT:
            raise BudgetError(f"budget {text!r} has no unit, so it is bytes; write {text}GB, {text}MB or {text}B")
    if not 1 <= amount <= _MAX_BYTES:
        raise BudgetError(f"budget {text!r} must be at least 1 byte and at most 1 EiB; {forms}")
    return int(amount)


def check_budget(budget: str | int | float) -> None:
    """Raise what `parse_budget` raises, where plain training's peak will be known later."""
    parse_budget(budget, plain_peak_bytes=2**40)


def _number(match: re.Match[str]) -> Decimal:
    return Decimal(match[1].replace(",", "."))


def is_percentage(budget: str | int | float) -> bool:
    """True for a budget that is a part of plain training's peak."""
    return _PERCENT.fullmatch(str(budget).strip()) is not None


def format_bytes(size_bytes: int | float) -> str:
    """Write a size for people, in decimal units as budgets are: `5.93 GB`.

    >>> format_bytes(5_930_000_000), format_bytes(812), format_bytes(-20_500)
    ('5.93 GB', '812 B', '-20.5 kB')
    """
    magnitude = abs(size_bytes)
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        # 999.5 of a unit would be written 1000, or 1e+03: it is 1.00 of the next one.
        if magnitude >= 0.9995 * factor:
            scaled = size_bytes / factor
            return f"{scaled:.3g} {unit}" if magnitude < 999.5 * factor else f"{scaled:.0f} {unit}"
    return f"{size_bytes:.0f} B"


def format_ms(latency_ms: float) -> str:
    """Write a latency for people: `961 ms`, `1140 ms`, `11.4 s`."""
    if abs(latency_ms) >= 10_000:
        return f"{latency_ms / 1000:.1f} s"
    return f"{latency_ms:.3g} ms" if abs(latency_ms) < 999.5 else f"{latency_ms:.0f} ms"
