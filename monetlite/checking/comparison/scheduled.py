"""Contenders that run by a schedule: monetlite's own, and what Checkmate and Gist may do, by the same runtime."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from monetlite.checking.comparison.bench import Contender, Unsupported
from monetlite.checking.comparison.peer_runs import TITLES, Peer
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import DEFAULT_IMPLEMENTATIONS, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.planning.budgets import as_schedule, solve_budget
from monetlite.planning.layouts import solve_layouts
from monetlite.runtime import MONeTWrapper
from monetlite.solving.baselines import restrict_gist


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Solves for schedules of one step.

    Attributes:
        profiles: of the step in every layout that may be chosen, the first as plain training runs it.
        options: how monetlite's own are solved; the others have its time limit and seed.
    """

    profiles: Sequence[Profile]
    options: SolvingOptions

    def monetlite(self, budget_bytes: int, starts: Iterable[Schedule] = ()) -> Schedule:
        """Whatever is fastest.

        Raises:
            Unsupported: nothing fits.
        """
        return self._solve(lambda: solve_layouts(self.profiles, budget_bytes, self.options, starts=starts))

    def checkmate(self, budget_bytes: int) -> Schedule:
        """Storing and recomputing, every operator running as it was traced.

        Raises:
            Unsupported: nothing fits.
        """
        options = replace(self.options, implementations=DEFAULT_IMPLEMENTATIONS, tolerance=0.0)
        return self._solve(lambda: solve_budget(self.profiles[0], budget_bytes, options))

    def gist(self, budget_bytes: int) -> Schedule:
        """Compact intermediates that lose nothing, and no recomputation.

        Raises:
            Unsupported: nothing fits.
        """
        from monetlite.solving import solve_profile

        profile = self.profiles[0].within(0.0)
        restriction = restrict_gist(profile)
        with interrupts_kept():
            solution = solve_profile(restriction.profile, budget_bytes, self.options)
        if solution.steps is None:
            raise _nothing_fits(solution.smallest_reached_bytes)
        found = replace(solution, steps=restriction.steps(solution.steps))
        return as_schedule(profile, budget_bytes, found, tolerance=0.0)

    def _solve(self, solve: Callable[[], Schedule]) -> Schedule:
        try:
            with interrupts_kept():
                return solve()
        except InfeasibleBudget as error:
            raise _nothing_fits(error.reached_bytes) from error


def scheduled(
    peer: Peer, schedule: Schedule, asked_bytes: int, *, compiled: bool = False, with_defaults: bool = False
) -> Contender:
    """A model that trains by a schedule, for a budget that the schedule's own may be a little below.

    `compiled`: by Inductor, which rounds as Inductor does; `with_defaults`: the schedule has only default
    implementations, which is said in the setting.
    """

    def prepare(model: nn.Module) -> nn.Module:
        return MONeTWrapper(model, schedule, compile=compiled)

    setting = budget_setting(asked_bytes, compiled=compiled, with_defaults=with_defaults)
    label = f"{TITLES[peer]}, compiled" if compiled else ""
    return Contender(
        peer=peer,
        setting=setting,
        label=label,
        prepare=prepare,
        asked_bytes=asked_bytes,
        limit_bytes=None if schedule.reserved_bytes is None else max(asked_bytes, schedule.reserved_bytes),
    )


def budget_setting(budget_bytes: int, *, compiled: bool = False, with_defaults: bool = False) -> str:
    """What a table calls a schedule for a budget."""
    words = [f"budget {format_bytes(budget_bytes)}"]
    return ", ".join([*words, *["default implementations"] * with_defaults, *["compiled"] * compiled])


def _nothing_fits(reached_bytes: int | None) -> Unsupported:
    reached = f"; the smallest peak reached is {format_bytes(reached_bytes)}" if reached_bytes else ""
    return Unsupported(f"no schedule within it{reached}")
