"""Deep steps: plans for every kind of stretch, the master program, and the schedule that these make."""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

from monetlite.core.blocks import Block
from monetlite.core.costs import Profile
from monetlite.core.steps import Step
from monetlite.solving.annealing.search import THREADS
from monetlite.solving.blocks.block_plans import Plan, PlanSearch, Stretch, Stretches
from monetlite.solving.blocks.master_program import Master

MIN_BLOCKS = 4
"""Fewer blocks than this are one step to the search."""
STAGES = ((1, 0.05), (1, 0.1), (2, 0.15), (4, 0.2))
"""Numbers of blocks in a stretch, and parts of the time left for their plans."""
POINTS = 12
"""Limits on what a stretch keeps, for each of which a plan is looked for."""


class DeepStep:
    """A step in blocks, with the plans that are known of its stretches."""

    def __init__(self, profile: Profile, blocks: Sequence[Block], seed: int) -> None:
        self.profile = profile
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
        threads = min(THREADS, os.cpu_count() or 1)
        share = seconds * min(threads, len(kinds)) / max(1, len(kinds))

        def search(stretch: Stretch) -> PlanSearch:
            found = self.searches.get(stretch.kind) or PlanSearch(stretch, self.seed)
            found.sweep(POINTS, share, finished)
            return found

        with ThreadPoolExecutor(threads) as pool:
            self.searches |= zip(kinds, pool.map(search, kinds.values()), strict=True)

    def plans(self) -> dict[tuple[int, int], list[Plan]]:
        return {
            place: self.searches[stretch.kind].plans
            for place, stretch in self.stretches.items()
            if stretch.kind in self.searches
        }

    def solve(self, budget_bytes: int, solver: str, deadline: float, gap: float) -> tuple[Step, ...] | None:
        room_bytes = budget_bytes - self.profile.graph.resident.total
        chosen = Master(plans=self.plans(), later_bytes=self.later_bytes, room_bytes=room_bytes).solve(
            solver, deadline, gap
        )
        return None if chosen is None else self.steps(chosen)

    def steps(self, chosen: Sequence[tuple[tuple[int, int], Plan]]) -> tuple[Step, ...]:
        """The steps of the whole schedule."""
        forward: list[Step] = []
        backward: list[Step] = []
        for place, plan in chosen:
            stretch = self.stretches[place]

            def whole(step: Step, stretch: Stretch = stretch) -> Step:
                return stretch.operators[step[0]], stretch.original[step[0]][step[1]]

            forward += map(whole, plan.forward)
            backward[:0] = map(whole, plan.backward)
        return (*forward, *backward)
