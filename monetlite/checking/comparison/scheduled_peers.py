"""Contenders that train by a schedule: monetlite, and Checkmate and Gist in its runtime."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from monetlite.checking.comparison.bench import Contender
from monetlite.checking.comparison.peer_runs import TITLES, Peer
from monetlite.core.costs import Profile
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import DEFAULT_IMPLEMENTATIONS, REORDERED_SUMS, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.planning.budgets import solve_budget
from monetlite.planning.layouts import layouts_to_try, solve_layouts
from monetlite.runtime import MONeTWrapper
from monetlite.solving.baselines import restrict_gist


def solve_as(
    peer: Peer,
    profiles: Sequence[Profile],
    budget_bytes: int,
    options: SolvingOptions,
    starts: Iterable[Schedule],
    *,
    compiled: bool = False,
) -> Schedule:
    """The fastest schedule that a method can choose, of profiles of which the first is as plain training runs.

    With `compiled`, profiles with compiled regions are among them, and sums may be in another order.

    Checkmate stores and recomputes, every operator running as it was traced. Gist has compact intermediates that
    lose nothing, and no recomputation.
    """
    plain, exact = profiles[0], replace(options, tolerance=0.0)
    with interrupts_kept():
        if peer is Peer.CHECKMATE:
            return solve_budget(plain, budget_bytes, replace(exact, implementations=DEFAULT_IMPLEMENTATIONS))
        if peer is Peer.GIST:
            schedule = solve_budget(restrict_gist(plain.within(0.0)), budget_bytes, exact)
            graph = plain.graph  # the schedule serves this one, of which less may be chosen there
            return replace(schedule, fingerprint=graph.fingerprint, structure=graph.structure)
        if compiled:
            options = replace(options, tolerance=max(options.tolerance, REORDERED_SUMS))
        else:
            allowed = layouts_to_try(None, options.tolerance)
            profiles = [item for item in profiles if item.graph.layout in allowed]
        return solve_layouts(profiles, budget_bytes, options, starts=starts)


def scheduled(peer: Peer, schedule: Schedule, asked_bytes: int, *, compiled: bool = False) -> Contender:
    """A model that trains by a schedule, for a budget that the schedule's own may be a little below.

    Args:
        peer: whose schedule it is. schedule: its schedule. asked_bytes: the budget.
        compiled: its regions may be compiled, which rounds as Inductor does.
    """
    return Contender(
        peer=peer,
        setting=setting_of(asked_bytes, compiled),
        label=f"{TITLES[peer]}, compiled" if compiled else "",
        prepare=lambda model: MONeTWrapper(model, schedule),
        asked_bytes=asked_bytes,
        limit_bytes=None if schedule.reserved_bytes is None else max(asked_bytes, schedule.reserved_bytes),
    )


def setting_of(asked_bytes: int, compiled: bool) -> str:
    """The setting of such a contender, in words."""
    return f"budget {format_bytes(asked_bytes)}{', compiled' if compiled else ''}"
