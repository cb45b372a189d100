"""Ctrl-C: one solve that is interrupted returns its best so far; what is more than one solve ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

BOUND_THREAD = "monetlite-bound"
"""Name of the thread in which a solver computes bounds: Ctrl-C does not stop it at once."""


_ending = 0
"""How many contexts are open in which Ctrl-C ends everything."""


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Let Ctrl-C end everything at once, solves included, which otherwise return their best so far."""
    global _ending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    _ending += 1
    try:
        yield
    finally:
        _ending -= 1
        signal.signal(signal.SIGINT, before)
        if pressed:  # also where the exception was lost on its way, in a callback of a solver's
            raise KeyboardInterrupt


def ends_everything() -> bool:
    """Whether Ctrl-C is to end more than the solve that it interrupts."""
    return _ending > 0


__all__ = ["BOUND_THREAD", "ends_everything", "interrupts_kept"]
