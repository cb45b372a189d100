"""One step that was traced in several layouts: those that are worth pricing, and the fastest schedule of any."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from monetlite.core.announcing import warn
from monetlite.core.costs import Profile
from monetlite.core.errors import InfeasibleBudget, ModelError
from monetlite.core.graph import AS_TRACED, COMPILED_LAYOUTS, LAYOUTS, uncompiled_layout
from monetlite.core.interrupts import end_early, ended_early
from monetlite.core.options import REORDERED_SUMS, SolvingOptions
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import plain_steps
from monetlite.core.units import parse_budget
from monetlite.planning.budgets import solve_budget
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Problem

TRIAL_SHARE = 0.15
"""Share of the time limit for which each layout is tried."""
TRIALS_SHARE = 0.6
"""Share of the time limit for which all are tried, at most."""


def layouts_to_try(layout: str | None, tolerance: float, compile: bool = False) -> list[str]:
    """The layouts that a person's choices leave open, beginning with the model's own, which is always priced.

    Args:
        layout, tolerance: as in `monetlite.optimize`.
        compile: each layout with its regions compiled, too.
    """
    if layout not in (None, AS_TRACED) and tolerance < REORDERED_SUMS:
        raise ModelError(
            f"layout {layout!r} adds in another order than the model as it is, which tolerance "
            f"{tolerance:g} rules out; allow {REORDERED_SUMS:g} or more"
        )
    if layout is None:
        wanted = [AS_TRACED] if tolerance < REORDERED_SUMS else list(LAYOUTS)
    else:
        wanted = [layout]
    compiled = [COMPILED_LAYOUTS[item] for item in wanted] if compile else []
    return list(dict.fromkeys((AS_TRACED, *wanted, *compiled)))


def solve_layouts(
    profiles: Sequence[Profile],
    budget: str | int | float,
    options: SolvingOptions,
    *,
    layout: str | None = None,
    starts: Iterable[Schedule] = (),
    progress: Callable[[Solution], None] | None = None,
) -> Schedule:
    """Solve one step that was traced in several layouts, for the fastest schedule of any.

    Each layout is solved for a short while; the better one then has the rest of the time. Ctrl-C ends it all early.
    The result's bounds are of all layouts.

    Args:
        profiles: of the same model, the first as plain training runs it: budgets in percent and overheads are
            relative to that one.
        budget, progress: as in `solve`.
        options: how each layout is solved; the time limit is of all of them together.
        layout: the only one to solve for, if given.
        starts: schedules to begin from; those for another graph are left aside.
    """
    known = list(starts)
    plain = simulate(profiles[0], plain_steps(profiles[0].graph))
    budget_bytes = parse_budget(budget, plain.peak_bytes)
    # A layout that changes nothing is not among the profiles.
    wanted = [item for item in profiles if layout in (None, uncompiled_layout(item.graph.layout))]
    if not wanted:
        warn(f"layout {layout!r} changes nothing of this model, which is solved as it is")
        wanted = [profiles[0]]
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
    trial_seconds = options.time_limit * min(TRIAL_SHARE, TRIALS_SHARE / len(distinct))
    trials = _tried(distinct, lambda item: run(item, trial_seconds))
    item, best = trials.promising(budget_bytes)
    if best is not None and (trials.ended or best.gap <= options.gap):
        solved = best
    else:
        solved = run(item, options.time_limit - trial_seconds * len(distinct), [best] if best else [])
    return trials.bounded(solved, item, map(options.allowed, distinct))


@dataclass
class _Trials:
    """Short solves of a step in each layout.

    Attributes:
        found: schedules, with the profiles that they are of.
        refused: the refusals of other profiles.
        ended: Ctrl-C ended them.
    """

    found: list[tuple[Schedule, Profile]] = field(default_factory=list)
    refused: list[tuple[InfeasibleBudget, Profile]] = field(default_factory=list)
    ended: bool = False

    def promising(self, budget_bytes: int) -> tuple[Profile, Schedule | None]:
        """The profile to go on with, and its schedule if there is one.

        Raises:
            InfeasibleBudget: nothing fits in any layout, or Ctrl-C came before anything was found.
        """
        if self.found:
            best, item = min(self.found, key=lambda pair: pair[0].latency_ms)
            return item, best
        in_reach = [pair for pair in self.refused if pair[0].proven_bytes <= budget_bytes]
        refusal, item = min(
            in_reach or self.refused, key=lambda pair: pair[0].reached_bytes or pair[0].proven_bytes
        )
        if not in_reach or self.ended:
            raise refusal
        return item, None

    def bounded(self, solved: Schedule, of: Profile, profiles: Iterable[Profile]) -> Schedule:
        """A schedule with bounds of all layouts: none has a faster one, nor a smaller budget.

        Args:
            solved: the last schedule.
            of: its profile.
            profiles: of all layouts, with what the options allow.
        """
        bounds_ms = {item.graph.fingerprint: Problem.of(item).least_latency_ms for item in profiles}
        out_of_reach = [item for error, item in self.refused if error.proven_bytes > error.budget_bytes]
        bounds_ms |= {item.graph.fingerprint: math.inf for item in out_of_reach}
        bounds_ms |= {one.fingerprint: one.lower_bound_ms for one in (*(one for one, _ in self.found), solved)}
        bound_ms = min(bounds_ms.values())
        sizes = [
            (solved.smallest_proven_bytes, solved.smallest_reached_bytes),
            *(
                (one.smallest_proven_bytes, one.smallest_reached_bytes)
                for one, item in self.found
                if item is not of
            ),
            *((error.proven_bytes, error.reached_bytes) for error, item in self.refused if item is not of),
        ]
        return replace(
            solved,
            lower_bound_ms=bound_ms,
            status=solved.status if bound_ms >= solved.lower_bound_ms else Status.FEASIBLE,
            smallest_proven_bytes=min(proven for proven, _ in sizes),
            smallest_reached_bytes=min((reached for _, reached in sizes if reached is not None), default=None),
        )


def _tried(profiles: Iterable[Profile], run: Callable[[Profile], Schedule]) -> _Trials:
    """Solve for each profile by `run`, until Ctrl-C."""
    trials, interrupted = _Trials(), ended_early()
    for item in profiles:
        try:
            trials.found.append((run(item), item))
        except InfeasibleBudget as error:
            trials.refused.append((error, item))
        except KeyboardInterrupt:
            if not trials.found:
                raise
            end_early()
        trials.ended = ended_early() > interrupted
        if trials.ended:
            break
    return trials
