"""Solving: from a profile and a budget to the fastest schedule, with a bound on how much faster any could be.

`solve_profile` is the front door. Read the files in this order:

| file | is |
| --- | --- |
| `incumbent.py` | the best schedule and bound of a solve (`Incumbent`), and its result (`Solution`) |
| `problem.py` | the reduction of a profile that every method works on |
| `solver.py` | the order of methods in a solve, and their shares of the time |
| `baselines.py` | other methods' schedules: starts, and comparisons |
| `exhaustive.py` | up to 40 operators: all schedules, by A* |
| `blocks/block_plans.py` | a stretch of blocks as a step of its own, and its plans |
| `blocks/master_program.py` | a plan for every block within one budget: a boolean program, by HiGHS |
| `blocks/deep_step.py` | plans for all stretches, and the schedules that the master program makes of them |
| `blocks/nested_plans.py` | plans within plans: blocks that run again more than once, by dynamic programming |
| `blocks/layer_plans.py` | a plan for each layer of a deep model, within seconds and without a bound |
| `program.py` | up to 100 operators: the boolean program, by SCIP, HiGHS or Gurobi |
| `smallest.py` | the smallest feasible budget: proven, and reached |
| `sweep.py` | several budgets, each with what the others know |
| `clock.py` | the clock of time limits and deadlines |
| `side_by_side.py` | searches in threads |
| `bounding/highs.py` | HiGHS with a program, for the bounds and the master program |
| `bounding/zero_one.py` | rows of 0-1 programs, and their Lagrangian bound |
| `bounding/peak_bound.py` | values that are live in every schedule: a bound on the peak |
| `bounding/relaxation.py` | the whole problem as a 0-1 relaxation |
| `bounding/latency_bound.py` | its bound, by HiGHS: linear from coarse to fine, then branch and bound |
| `bounding/guide.py` | from a solution of the relaxation to steps where the search may begin |
| `annealing/compiled.py` | the choices that annealing varies, their evaluation, moves, and the loop: by numba |
| `annealing/flat_problem.py` | a problem as arrays, and where moves may change it; schedules as choices, and back |
| `annealing/compiling.py` | numba's cache, filled once on a machine |
| `annealing/runs.py` | the driver: runs of annealing, with one of three costs |
| `annealing/greedy.py` | dropping values until the rest fits: the first answer, before anything is compiled |
| `annealing/search.py` | runs that compete for the fastest schedule |
| `annealing/lowest_peak.py` | runs towards the smallest peak |
| `annealing/arranging.py` | runs towards the fastest schedule whose tensors lie without gaps |
| `reserved_budget.py` | schedules for a budget of reserved memory |
| `sum_fronts.py` | what to keep of a step that `torch.compile` partitions |

Each method has earned its place. Of the 78 schedules in `schedules/`, whose files name the methods that improved
the schedule or its bound, HiGHS (bound) improved 77, the search 76, a start from another budget 62, plans of
blocks 16, greedy choices 7. Ten are proven optimal. The others serve what those large models don't ask for.
Exhaustive search proves every small graph, and its smallest budget to the byte. The program's bound closes gaps
that the relaxation leaves, in 3 of 213 random steps. `lowest_peak` finds schedules where a tenth of the time found
nothing, and says what the smallest budget is. `arrange` finds those of reserved budgets.
"""

from collections.abc import Callable, Iterable

from monetlite.core.costs import Profile
from monetlite.core.options import SolvingOptions
from monetlite.core.steps import Step
from monetlite.solving.incumbent import Solution


def solve_profile(
    profile: Profile,
    budget_bytes: int,
    options: SolvingOptions,
    *,
    starts: Iterable[tuple[Step, ...]] = (),
    progress: Callable[[Solution], None] | None = None,
) -> Solution:
    """Find the fastest schedule within a memory budget, and bound how much faster any could be.

    Args:
        profile: the graph and its costs, already restricted to the implementations that the options allow.
        budget_bytes: no step may need more memory; with `options.reserved`, the allocator may reserve no more.
        options: time limit, seed, solver and `reserved`. When the time is up the best so far is returned; Ctrl-C
            does the same at once, outside of `interrupts_kept`.
        starts: steps to begin from, such as a schedule for another budget; illegal ones are ignored.
        progress: told whenever the incumbent or the bound improves.

    Raises:
        SolverError: the solver is not installed.
        DeviceError: `options.reserved`, and costs that are a CPU's.
    """
    if options.reserved:
        from monetlite.solving.reserved_budget import ReservedSolve

        return ReservedSolve(profile, budget_bytes, options, starts, progress).run()
    from monetlite.solving.solver import solve_peak

    return solve_peak(profile, budget_bytes, options, starts=starts, progress=progress)
