"""One step traced in several layouts of its images, solved for the fastest schedule of any."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError
from monetlite.core.graph import AS_TRACED, CHANNELS_LAST
from monetlite.core.options import SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import parse_budget
from monetlite.planning.budgets import solve_budget

if TYPE_CHECKING:
    from monetlite.solving.incumbent import Solution

REORDERED_SUMS = 1e-5
"""Smallest tolerance that allows sums in another order."""
TRIAL_SHARE = 0.15
"""Share of the time limit for which each layout is tried."""


def layouts_to_try(layout: str | None, tolerance: float) -> list[str]:
    """The layouts that a person's choices leave open, beginning with the model's own, which is always priced.

    Raises:
        ModelError: a layout that orders sums anew, with a tolerance that forbids it.
    """
    if layout == CHANNELS_LAST and tolerance < REORDERED_SUMS:
        raise ModelError(
            f"layout {CHANNELS_LAST!r} adds in another order than the model as it is, which tolerance "
            f"{tolerance:g} rules out; allow {REORDERED_SUMS:g} or more"
        )
    if layout is None:
        return [AS_TRACED] if tolerance < REORDERED_SUMS else [AS_TRACED, CHANNELS_LAST]
    return list(dict.fromkeys((AS_TRACED, layout)))


def solve_layouts(
    profiles: Sequence[Profile],
    budget: str | int | float,
    options: SolvingOptions,
    *,
    layout: str | None = None,
    starts: Iterable[Schedule] = (),
    progress: "Callable[[Solution], None] | None" = None,
) -> Schedule:
    """Solve one step that was traced in several layouts, for the fastest schedule of any.

    Each layout is solved for a short while; the better one then has the rest of the time.

    Args:
        profiles: of the same model, the first as plain training runs it: budgets in percent and overheads are
            relative to that one.
        budget, progress: as in `solve`.
        options: how each layout is solved; the time limit is of all of them together.
        layout: the only one to solve for, if given.
        starts: schedules to begin from; those for another graph are left aside.

    Raises:
        Those of `solve`.
    """
    known = list(starts)
    plain = simulate(profiles[0], plain_steps(profiles[0].graph))
    budget_bytes = parse_budget(budget, plain.peak_bytes)
    wanted = [item for item in profiles if layout in (None, item.graph.layout)]
    distinct = list({item.graph.fingerprint: item for item in reversed(wanted)}.values())[::-1]

    def run(item: Profile, seconds: float, found: Iterable[Schedule] = ()) -> Schedule:
        solved = solve_budget(
            item,
            budget_bytes,
            replace(options, time_limit=seconds),
            starts=[*found, *(start for start in known if start.structure == item.graph.structure)],
            progress=progress,
        )
        return replace(solved, plain_peak_bytes=plain.peak_bytes, plain_latency_ms=plain.latency_ms)

    if len(distinct) == 1:
        return run(distinct[0], options.time_limit)
    trial = options.time_limit * TRIAL_SHARE
    found: list[tuple[Schedule, Profile]] = []
    refused: list[tuple[InfeasibleBudget, Profile]] = []
    for item in distinct:
        try:
            found.append((run(item, trial), item))
        except InfeasibleBudget as error:
            refused.append((error, item))
    remaining = options.time_limit - trial * len(distinct)
    if found:
        best, item = min(found, key=lambda pair: pair[0].latency_ms)
        return run(item, remaining, [best])
    in_reach = [pair for pair in refused if pair[0].proven_bytes <= budget_bytes]
    refusal, item = min(in_reach or refused, key=lambda pair: pair[0].reached_bytes or pair[0].proven_bytes)
    if not in_reach:
        raise refusal
    return run(item, remaining)
