"""Deep steps: plans for every kind of stretch, the master program, and the schedule that these make."""

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

from monetlite.core.blocks import Block
from monetlite.core.costs import Profile
from monetlite.core.steps import Step
from monetlite.solving.annealing.search import THREADS
from monetlite.solving.blocks.block_plans import Plan, PlanSearch, Stretch, Stretches
from monetlite.solving.blocks.master_program import MasterProgram, Prices
from monetlite.solving.clock import now

MIN_BLOCKS = 4
"""Fewer blocks than this are one step to the search."""
STAGES = ((1, 0.05), (1, 0.1), (2, 0.15), (4, 0.2))
"""Numbers of blocks in a stretch, and parts of the time left for their plans."""
_ROUNDS = 4
"""Rounds of pricing that the time for it is meant for."""
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

            def improve(kind: Hashable, asked: dict[Hashable, list[Prices]] = asked, share: float = share) -> float:
                """Look for what the middle one of equal stretches asks for: they see nearly the same prices."""
                wanted = sorted(asked[kind], key=attrgetter("kept"))[len(asked[kind]) // 2]
                return self.searches[kind].improve(wanted.reduced_ms, share, over)

            with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
                better_ms = [*pool.map(improve, asked)]
            if max(better_ms) <= 0:
                return

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
