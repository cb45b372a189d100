"""Other programs on the cores that operators are measured on.

Threads of one operator wait for each other. Where another program holds one of their cores, all of them wait until
the system gives it back: an operator of a fraction of a millisecond takes several. So one matrix product on all
threads, which takes longer than on a single one, tells of a busy machine.
"""

import statistics
import time

import torch

from monetlite.core.announcing import warn

BUSY = 3.0
"""Time on all threads over that on one, from which on the machine is said to be busy."""
_SIZE, _RUNS = 256, 15


def slowdown() -> float:
    """The time of a matrix product on all of torch's threads over that on one, as a ratio of medians."""
    threads = torch.get_num_threads()
    if threads == 1:
        return 1.0
    factor = torch.ones(_SIZE, _SIZE)

    def median_seconds() -> float:
        times: list[float] = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            factor @ factor  # timed for itself
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    with torch.no_grad():
        on_all = median_seconds()
        torch.set_num_threads(1)
        try:
            return on_all / median_seconds()
        finally:
            torch.set_num_threads(threads)


def warn_if_busy() -> bool:
    """Warn if other programs hold the cores; True if they do."""
    times = slowdown()
    if times > BUSY:
        warn(  # without the figure: Python shows the same text once
            f"other programs hold the cores of this machine: a matrix product on {torch.get_num_threads()} threads "
            f"takes more than {BUSY:.0f} times as long as on one. Costs of operators that are measured now are too "
            "high, and plans made by them are not the best; measure again when nothing else runs"
        )
    return times > BUSY
