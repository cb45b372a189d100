"""The one entry to solving: the fastest schedule within a budget of the peak, or of reserved memory."""

from collections.abc import Callable, Iterable

from monetlite.core.costs import Profile
from monetlite.core.options import SolvingOptions
from monetlite.core.steps import Step
from monetlite.solving.race import Progress, Solution
from monetlite.solving.reserved.solving import solve_reserved
from monetlite.solving.solve import solve_peak


def solve_profile(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the fastest schedule within a memory budget, and bound how much faster any could be.

    Args:
        profile: the graph and its costs, with only the implementations to choose from (`options.allowed`).
        budget_bytes: no step may need more memory; of reserved memory where the options say so.
        options: time limit, seed, solver, and which memory the budget is of. After the time limit the best so far
            is returned; Ctrl-C does the same at once, outside of `interrupts_kept`.
        starts: steps to begin from, such as a schedule for another budget; illegal ones are ignored.
        progress: called whenever the incumbent or the bound improves.

    Raises:
        DeviceError: a budget of reserved memory, and costs that are a CPU's.
        SolverError: the solver is unknown or not installed.
    """
    solve = solve_reserved if options.reserved else solve_peak
    return solve(profile, budget_bytes, options, starts=starts, progress=progress)


__all__ = ["solve_profile"]
