"""Schedules whose tensors come to lie without gaps, so that nothing has to go back to the GPU.

Which gaps are left between blocks depends on the order of every request, and changes with any of them: two
schedules that are equally fast, and need as much memory, may reserve 1.3 times their peak and 1.01 times. So a
schedule is changed at random, a little at a time, by simulated annealing: what it costs is its step time, and what
the allocator on paper reserves beyond the limit.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from monetlite.allocator.allocator import PAGE_BYTES
from monetlite.allocator.reserved import reserve
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.interrupts import ends_everything
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.annealing import Workspace
from monetlite.solving.compiling import ensure_compiled
from monetlite.solving.genomes import encode, keep_everything
from monetlite.solving.layout import LATENCY, PART_FIRST, Integers
from monetlite.solving.moves import build_moves
from monetlite.solving.problem import build_problem
from monetlite.solving.reserved.gaps import requests_of_graph, reserved_bytes

_RUNS = (
    (0.0008, 0.5, 4.0),
    (0.0003, 0.5, 6.0),
    (0.0003, 1.0, 20.0),
    (0.0008, 0.5, 6.0),
    (0.0003, 1.0, 20.0),
    (0.0001, 2.0, 40.0),
)
"""Of annealing, each from where the last one was best: the temperature that it begins with, in shares of the step
time, and the price of a share of the limit too much, likewise, at the beginning and in the end."""
_COLDEST = 0.00001
"""The temperature in the end."""
_TIGHTER = (1.0, 1.0, 0.98, 0.95, 0.9)
"""Peaks that implementations are chosen for, as shares of the limit."""
_TOUCHES = 4
"""How many of the reads of a value, from the first, are told apart where it is dropped."""


class _State(NamedTuple):
    genome: Integers
    share: float
    """Of the limit: the peak that implementations are chosen for."""
    latency_ms: float
    reserved_bytes: int
    """For requests of more than 1 MiB."""


class _Arrangement:
    """A step's schedules as they are changed, and what each reserves."""

    def __init__(self, profile: Profile, limit_bytes: int, seed: int) -> None:
        self.limit_bytes = limit_bytes
        self.random = random.Random(seed)
        self.problem = build_problem(profile)
        self.workspace = Workspace(self.problem, build_moves(self.problem), seed)
        self.droppable: list[int] = self.problem.droppable.tolist()
        self.everything = keep_everything(self.problem)
        self.requests = requests_of_graph(profile)
        self.room_bytes = limit_bytes - PAGE_BYTES - profile.graph.resident.total

    def evaluate(self, genome: Integers, share: float) -> _State | None:
        """A genome's schedule; None where it leads to none."""
        arrays = self.workspace.arrays(genome, int(self.limit_bytes * share))
        if arrays is None:
            return None
        latency_ms = float(self.workspace.scratch.totals[LATENCY])
        return _State(genome, share, latency_ms, reserved_bytes(self.requests, *arrays))

    def steps(self, state: _State) -> tuple[Step, ...] | None:
        return self.workspace.steps(state.genome, int(self.limit_bytes * state.share))

    def changed(self, state: _State) -> _State | None:
        """A neighbour of a schedule."""
        genome, share = state.genome.copy(), state.share
        for _ in range(self.random.choice((1, 1, 2, 3))):
            at = self.random.random()
            if at < 0.1:
                share = self.random.choice(_TIGHTER)
            elif at < 0.3:
                # Which group of implementations an operator runs by, in one of its two parts.
                operator = self.random.randrange(self.problem.operator_count)
                part = PART_FIRST + self.random.randrange(2)
                genome[self.problem.value_count + part * self.problem.operator_count + operator] = (
                    self.random.randrange(3)
                )
            else:
                value = self.random.choice(self.droppable)
                kept = self.random.randrange(2**_TOUCHES)
                genome[value] = self.everything[value] if kept == 2**_TOUCHES - 1 else kept
        return self.evaluate(genome, share)


def arrange(
    profile: Profile,
    starts: Sequence[tuple[Step, ...]],
    limit_bytes: int,
    *,
    seconds: float,
    seed: int = 0,
) -> tuple[Step, ...] | None:
    """Look for a fast schedule that runs within a limit on reserved memory and gives nothing back.

    Args:
        profile: the graph and its costs, on a GPU.
        starts: legal schedules to begin from, whatever they reserve.
        limit_bytes: the most that the allocator may reserve with expandable segments, what is always in memory
            included.
        seconds: how long to look.
        seed: of the changes.

    Ctrl-C ends it early, outside of `interrupts_kept`.

    Returns:
        The steps of the fastest that was found, or None.
    """
    began = time.monotonic()
    if not ensure_compiled(began + seconds):
        return None
    arrangement = _Arrangement(profile, limit_bytes, seed)
    states = [
        arrangement.evaluate(encode(arrangement.problem, steps), share)
        for steps in starts
        for share in {*_TIGHTER, simulate(profile, steps).peak_bytes / limit_bytes}
    ]
    known = [state for state in states if state is not None]
    if not known or not arrangement.droppable:
        return None
    best: tuple[Step, ...] | None = None
    scheduled_ms = math.inf
    try:
        for state in _annealed(arrangement, known, began, seconds):
            fits = state.reserved_bytes <= arrangement.room_bytes
            if not fits or state.latency_ms >= scheduled_ms:
                continue
            steps = arrangement.steps(state)
            if steps is not None and _keeps(profile, steps, limit_bytes):
                best, scheduled_ms = steps, state.latency_ms
    except KeyboardInterrupt:
        if ends_everything():
            raise
    return best


def _annealed(arrangement: _Arrangement, known: Sequence[_State], began: float, seconds: float) -> Iterator[_State]:
    """Every schedule that simulated annealing comes by."""
    rng = arrangement.random
    scale_ms = min(state.latency_ms for state in known)

    def cost(state: _State, price: float) -> float:
        excess = max(0, state.reserved_bytes - arrangement.room_bytes) / arrangement.limit_bytes
        return state.latency_ms / scale_ms + price * excess

    yield from known
    best = min(known, key=lambda state: cost(state, 1.0))
    for run, (hottest, cheapest, dearest) in enumerate(_RUNS):
        present = best
        while (done := (time.monotonic() - began) / seconds * len(_RUNS) - run) < 1:
            done = max(0.0, done)
            temperature = hottest * (_COLDEST / hottest) ** done
            price = cheapest * (dearest / cheapest) ** done
            other = arrangement.changed(present)
            if other is None:
                continue
            worse = cost(other, price) - cost(present, price)
            if worse <= 0 or rng.random() < math.exp(-worse / temperature):
                present = other
            if cost(other, dearest) < cost(best, dearest):
                best = other
            yield other


def _keeps(profile: Profile, steps: tuple[Step, ...], limit_bytes: int) -> bool:
    """Whether a schedule is legal and runs within the limit, with all of its requests and for some more steps."""
    try:
        found = reserve(profile, steps, expandable=True, limit_bytes=limit_bytes)
        return found.fits and not found.releases and simulate(profile, steps).peak_bytes <= limit_bytes
    except IllegalSchedule:
        return False


__all__ = ["arrange"]
