"""Fronts of sums: the best choices where every choice adds bytes and saves time.

Groups are added one after another, and of what they make together the front is kept: more bytes have to save more
time (Nemhauser and Ullmann, Discrete dynamic programming and capital allocation, 1969). Where there are many, the
best of each of some parts of all bytes is kept, so a front may lack points; what it has is exact.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PARTS = 512
"""Parts of all bytes, of each of which the best choice is kept."""


@dataclass(frozen=True)
class Choice:
    """Things to keep, the bytes that they take, and the time that they save."""

    size_bytes: int
    saved_ms: float
    kept: frozenset[int]

    def __add__(self, other: "Choice") -> "Choice":
        return Choice(self.size_bytes + other.size_bytes, self.saved_ms + other.saved_ms, self.kept | other.kept)

    @property
    def rank(self) -> tuple[float, int, list[int]]:
        """Less for what saves more time, or as much with fewer bytes."""
        return -self.saved_ms, self.size_bytes, sorted(self.kept)


def front_of_sums(groups: Iterable[Sequence[Choice]], points: int) -> list[Choice]:
    """The front of choices of at most one option of each group, from nothing kept on.

    Args:
        groups: their options, beside that of keeping nothing. points: the most that are returned.
    """
    listed = [options for options in groups if options]
    total = max(1, sum(max(option.size_bytes for option in options) for options in listed))
    best = {0: Choice(0, 0.0, frozenset())}
    for options in listed:
        for known in list(best.values()):
            for option in options:
                made = known + option
                part = made.size_bytes * PARTS // total
                if part not in best or made.rank < best[part].rank:
                    best[part] = made
    front: list[Choice] = []
    for choice in sorted(best.values(), key=lambda item: (item.size_bytes, -item.saved_ms)):
        if not front or choice.saved_ms > front[-1].saved_ms:
            front.append(choice)
    every = math.ceil(len(front) / points)
    return [choice for at, choice in enumerate(front) if at % every == 0 or at == len(front) - 1]
