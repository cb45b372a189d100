"""Searches side by side, on as many cores as a solve takes."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

THREADS = 2
"""More threads than this find little more in a minute, and training machines have other work."""
CORES = min(THREADS, os.cpu_count() or 1)


def side_by_side(
    items: Iterable[_T], search: Callable[[_T, Callable[[], bool]], _R], finished: Callable[[], bool]
) -> list[_R]:
    """Search for each of some items. An error of one search ends all of them, and so does Ctrl-C.

    Args:
        items: in the order of the results.
        search: of an item; given what tells whether to end.
        finished: asked by each search.
    """
    failed = threading.Event()

    def ended() -> bool:
        return failed.is_set() or finished()

    with ThreadPoolExecutor(CORES) as pool:
        try:
            searches = [pool.submit(search, item, ended) for item in items]
            for done in wait(searches, return_when=FIRST_EXCEPTION).done:
                done.result()
        except BaseException:
            failed.set()
            raise
    return [done.result() for done in searches]
