"""The clock of time limits and deadlines in solving."""

import time

_own_since: tuple[float, float] | None = None


def now() -> float:
    """Seconds, of which only differences mean anything."""
    return time.monotonic() if _own_since is None else time.process_time()


def count_own_time() -> None:
    """Count the processor time of this process from here on, for solving beside work that comes first.

    By the wall clock, a process that gives way would reach its time limit with little done.
    """
    global _own_since
    _own_since = time.monotonic(), time.process_time()


def on_the_wall(seconds: float) -> float:
    """Seconds of the wall clock for so many of this one, at the rate so far; for solvers that count those."""
    if _own_since is None:
        return seconds
    wall_seconds, own_seconds = time.monotonic() - _own_since[0], time.process_time() - _own_since[1]
    return seconds * wall_seconds / own_seconds if own_seconds > 0 else seconds
