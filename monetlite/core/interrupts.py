"""Ctrl-C: a solve that is interrupted returns its best so far; a command of several solves ends."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

BOUND_THREAD = "monetlite-bound"
"""Name of the thread in which a solver computes bounds: Ctrl-C does not stop it at once."""

SECONDS_UNTIL_PRESSED_AGAIN = 0.05
"""Pause after a callback of Python's own, such as a weak reference's, has lost Ctrl-C."""

_ending = 0
"""Number of open contexts in which Ctrl-C ends everything."""
_ended_early = 0
"""Number of solves that Ctrl-C has ended, and that returned their best so far."""


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Let Ctrl-C end everything at once. Outside, an interrupted solve returns its best so far."""
    global _ending
    before = signal.getsignal(signal.SIGINT)
    own = before is not signal.default_int_handler and _ending == 0  # a person's, which stays
    if threading.current_thread() is not threading.main_thread() or own:
        yield
        return
    pressed = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    hook = sys.unraisablehook
    again: threading.Timer | None = None

    def lost(unraisable: "sys.UnraisableHookArgs") -> None:
        nonlocal again
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            if again is not None:
                again.cancel()
            again = threading.Timer(SECONDS_UNTIL_PRESSED_AGAIN, _thread.interrupt_main)
            again.start()
        else:
            hook(unraisable)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = lost
    _ending += 1
    try:
        yield
    finally:
        if again is not None:
            again.cancel()
        _ending -= 1
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)
        if pressed:  # a solver's callback may have lost the exception
            raise KeyboardInterrupt


def end_early() -> None:
    """End a solve with its best so far, in the handler of its KeyboardInterrupt, unless that ends everything."""
    global _ended_early
    if _ending > 0:
        raise  # the exception that is being handled
    _ended_early += 1


def ended_early() -> int:
    """The number of solves that Ctrl-C has ended so far. Where one of several was, no other should begin."""
    return _ended_early
