"""Deep steps: plans for every kind of stretch, the master program, and the schedule that these make."""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import attrgetter

from monetlite.core.blocks import Block, find_blocks
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step
from monetlite.solving.blocks.block_plans import Plan, PlanSearch, Stretch, Stretches
from monetlite.solving.blocks.master_program import MasterProgram, Prices
from monetlite.solving.clock import now
from monetlite.solving.side_by_side import CORES, THREADS, side_by_side

_LOG = logging.getLogger(__name__)

MIN_BLOCKS = 4
"""Fewer blocks than this are one step to the search."""
STAGES = ((1, 0.05), (1, 0.1), (2, 0.15), (4, 0.2))
"""Numbers of blocks in a stretch, and parts of the time left for their plans."""
_MASTERS = 4
"""Master programs for one budget, each for less memory, until their schedule fits."""
_ROUNDS = 4
"""Rounds of pricing that the time for it is meant for."""
_LOWERING = 0.2
"""Part of the time for plans that is for those of a lower peak."""
POINTS = 12
"""Limits on what a stretch keeps, for each of which a plan is looked for."""


def in_blocks(profile: Profile, seed: int) -> "DeepStep | None":
    """A step in its blocks; None if it has too few."""
    blocks = find_blocks(profile.graph)
    return DeepStep(profile, blocks, seed) if len(blocks) >= MIN_BLOCKS else None


class DeepStep:
    """A step in blocks, with the plans that are known of its stretches.

    Args:
        profile, blocks: of the step. seed: of the search.
        timeline_of: simulates steps, to which it may add.
    """

    def __init__(
        self,
        profile: Profile,
        blocks: Sequence[Block],
        seed: int,
        timeline_of: Callable[[tuple[Step, ...]], Timeline] | None = None,
    ) -> None:
        self.profile = profile
        self.timeline_of = timeline_of or partial(simulate, profile)
        self.blocks = blocks
        self.stretches: dict[tuple[int, int], Stretch] = {}
        self.searches: dict[Hashable, PlanSearch] = {}
        self.seed = seed
        self.cut = Stretches(profile, blocks)
        held = [block.held_bytes for block in blocks]
        self.later_bytes = [sum(held[at + 1 :]) for at in range(len(blocks))]

    def sweep(self, length: int, seconds: float, finished: Callable[[], bool]) -> None:
        """Look for plans of all stretches of so many blocks, once for each kind, on as many cores as there are.

        Args:
            length: blocks in a stretch. seconds: about how long that may take. finished: asked often.
        """
        kinds: dict[Hashable, Stretch] = {}
        for start in range(len(self.blocks) - length + 1):
            place = start, start + length
            if place not in self.stretches:
                self.stretches[place] = self.cut.stretch(*place)
            kinds.setdefault(self.stretches[place].kind, self.stretches[place])
        share = seconds * min(CORES, len(kinds)) / max(1, len(kinds))

        def search(stretch: Stretch, ended: Callable[[], bool]) -> PlanSearch:
            found = self.searches.get(stretch.kind) or PlanSearch(stretch, self.seed)
            found.sweep(POINTS, (1 - _LOWERING) * share, ended)
            found.lower(_LOWERING * share, ended)
            return found

        self.searches |= zip(kinds, side_by_side(kinds.values(), search, finished), strict=True)

    def plans(self) -> dict[tuple[int, int], list[Plan]]:
        return {
            place: self.searches[stretch.kind].plans
            for place, stretch in self.stretches.items()
            if stretch.kind in self.searches
        }

    def program(self, budget_bytes: int) -> MasterProgram:
        return MasterProgram(self.plans(), self.later_bytes, budget_bytes - self.profile.graph.resident.total)

    def price(self, budget_bytes: int, seconds: float, finished: Callable[[], bool]) -> None:
        """Add plans that the master program's multipliers ask for, until none gets better or the time is up."""
        end = now() + seconds

        def over() -> bool:
            return finished() or now() >= end

        while not over():
            prices = self.program(budget_bytes).prices()
            if prices is None:
                return
            asked: dict[Hashable, list[Prices]] = {}
            for place, seen in prices.items():
                asked.setdefault(self.stretches[place].kind, []).append(seen)
            share = THREADS * seconds / (_ROUNDS * len(asked))

            def improve(
                of: tuple[Hashable, list[Prices]], ended: Callable[[], bool], share: float = share
            ) -> float:
                """Look for what the middle one of equal stretches asks for: they see nearly the same prices."""
                kind, those = of
                wanted = sorted(those, key=attrgetter("kept"))[len(those) // 2]
                return self.searches[kind].improve(wanted.reduced_ms, share, ended)

            if max(side_by_side(asked.items(), improve, over)) <= 0:
                return

    def within(
        self, budget_bytes: int, seconds: float, gap: float, finished: Callable[[], bool] = lambda: False
    ) -> Timeline | None:
        """The fastest schedule that the plans make within a budget; None if they make none.

        Args:
            budget_bytes: no step may need more. seconds, gap: of each master program. finished: asked between them.
        """
        asked_bytes = budget_bytes
        for _ in range(_MASTERS):
            chosen = self.program(asked_bytes).solve(now() + seconds, gap)
            if chosen is None or finished():
                return None
            try:
                timeline = self.timeline_of(self.steps(chosen))
            except IllegalSchedule as error:
                _LOG.warning("plans of blocks don't fit together: %s", error)
                return None
            # Gradients that pass several blocks are in no row.
            excess_bytes = timeline.peak_bytes - budget_bytes
            if excess_bytes <= 0:
                return timeline
            asked_bytes -= excess_bytes
        return None

    def steps(self, chosen: Sequence[tuple[tuple[int, int], Plan]]) -> tuple[Step, ...]:
        """The steps of the whole schedule."""
        forward: list[Step] = []
        backward: list[Step] = []
        for place, plan in chosen:
            forward += self.stretches[place].whole(plan.forward)
            backward[:0] = self.stretches[place].whole(plan.backward)
        return (*forward, *backward)
