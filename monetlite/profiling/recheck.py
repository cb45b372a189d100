"""Whether costs that were measured earlier still hold: other work on the machine only ever makes them larger.

A call that waits for a thread which another program keeps off its core takes that program's whole time slice: on
two cores 0.06 ms becomes 30. Kept on disk, that would mislead every solve from then on.
"""

from collections.abc import Callable, Mapping

from monetlite.core.costs import Cost

CHECKED = 16
"""How many of the known calls are measured again: the slowest, among which those that had to wait come first."""
SLOW_MS = 1.0
"""A faster call is not worth measuring again: to have waited for another program takes longer."""
DISTURBED = 2 / 3
"""A call is taken to have been disturbed if it now takes less than this part of its time then."""
FEWEST_DISTURBED = 2
"""One alone may be chance."""

_checked: set[str] = set()
"""Calls found to hold in this process."""


def measured_while_disturbed(known: Mapping[str, Cost], latency_ms: Callable[[str], float]) -> bool:
    """Whether known costs are too large, by measuring the slowest of them again, once in a process.

    Args:
        known: costs by call signature.
        latency_ms: measures a call, by its signature.
    """
    slowest = sorted(known, key=lambda signature: known[signature].latency_ms, reverse=True)[:CHECKED]
    disturbed = 0
    for signature in slowest:
        then_ms = known[signature].latency_ms
        if signature in _checked or then_ms < SLOW_MS:
            continue
        if latency_ms(signature) < DISTURBED * then_ms:
            disturbed += 1
            if disturbed == FEWEST_DISTURBED:
                return True
        else:
            _checked.add(signature)
    return False
