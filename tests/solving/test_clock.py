"""The solver's clock: of the wall, or of this process alone."""

import time

import pytest

from monetlite.solving import clock


def spend(seconds: float) -> None:
    """Compute for so much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_it_is_the_wall_s_unless_told_otherwise():
    began = clock.now()
    time.sleep(0.05)
    assert clock.now() - began >= 0.05
    assert clock.on_the_wall(3.0) == 3.0


def test_own_time_stands_still_while_others_compute(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clock, "_own_since", None)
    clock.count_own_time()
    began = clock.now()
    time.sleep(0.2)
    assert clock.now() - began < 0.1
    spend(0.05)
    assert clock.now() - began >= 0.05
    # It computed for a fifth of the time or so: as much again takes about five times as long.
    assert clock.on_the_wall(1.0) > 1.9
