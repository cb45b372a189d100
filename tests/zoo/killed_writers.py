"""Writers that go back and forth between two schedules in one file, each killed at a random moment.

A process of its own with one thread: a fork of a process with several may wait for ever for a lock of theirs.
"""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from files.schedule_files import full_schedule  # noqa: E402

from monetlite.core.schedule import read_schedule  # noqa: E402


def killed(file, kills):
    """The names of the schedules that were found in the file, one after each kill."""
    rng = random.Random(0)
    versions = (full_schedule(), full_schedule(name="another", budget_bytes=7 * 10**9))
    versions[0].save(file)
    for number in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            for turn in itertools.count(number):
                versions[turn % 2].save(file)
                os.write(writing, b".")
        os.read(reading, 1)  # the first write is done, so that kills fall into any part of the next ones
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)
        found = read_schedule(file)
        assert found in versions, number
        yield found.name


if __name__ == "__main__":
    for name in killed(Path(sys.argv[1]), int(sys.argv[2])):
        print(name)  # noqa: T201
