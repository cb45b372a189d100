"""Annealing for the smallest peak, whatever the latency: runs towards ever smaller budgets."""

from collections.abc import Callable

from monetlite.core.steps import Step
from monetlite.solving import baselines
from monetlite.solving.annealing.compiled import EVERYWHERE, AnnealingCost, Integers
from monetlite.solving.annealing.compiling import ensure_compiled
from monetlite.solving.annealing.flat_problem import encode, flatten, keep_everything, read_least
from monetlite.solving.annealing.greedy import RERUN_EVERY_TIME
from monetlite.solving.annealing.runs import AnnealingRun, Workspace
from monetlite.solving.clock import now
from monetlite.solving.incumbent import Incumbent

METHOD = "smallest"
HOT_SHARE = 0.3
"""Start temperature over the mean size of the values that may be dropped."""
COOLING = 1000.0
"""Start temperature over end temperature."""
STEP_WEIGHT = 10.0
"""Weight of a step's least latency, over the start temperature: long schedules take longer to evaluate."""
LONGEST_RUN = 1 / 16
"""The most of the time left that a run takes."""
RUN_LENGTH = 64
"""The most iterations of a run, over operators: several short runs reach lower peaks than one long run."""
STARTS = 2
"""Runs begin from the best and from so many of the first choices: plain training, and those that store nothing."""
MAX_FAILURES = 12
"""Runs in a row that may fail to lower the peak by the smallest amount that is tried."""


def lower_peak(
    incumbent: Incumbent,
    *,
    seconds: float,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    enough_bytes: int = 0,
) -> Integers | None:
    """Look for the schedule with the smallest peak, whatever its latency; proves nothing.

    Args:
        incumbent: what is found is offered to it, and its steps of the smallest peak are improved on.
        seconds, seed, should_stop: as for `search`.
        enough_bytes: a peak that need not be lowered further.

    Returns:
        The choices of the smallest peak; None if compiled code was not ready in time.
    """
    problem = incumbent.problem
    deadline = now() + seconds

    def finished() -> bool:
        return now() >= deadline or should_stop()

    known: list[tuple[Step, ...]] = []
    for steps in baselines.known_schedules(problem.profile):
        known.append(steps)
        incumbent.offer(steps, METHOD)
        if finished():
            break
    if not ensure_compiled(deadline, should_stop):
        return None
    flat = flatten(problem)
    workspace = Workspace(flat, seed)
    assert incumbent.smallest_steps is not None
    assert incumbent.smallest_bytes is not None
    best, best_bytes = encode(flat, incumbent.smallest_steps), incumbent.smallest_bytes

    def consider(choices: Integers) -> bool:
        """Take choices if they have a smaller peak."""
        nonlocal best, best_bytes
        steps = workspace.smallest_peak(choices)
        if steps is not None:
            incumbent.offer(steps, METHOD)
        if incumbent.smallest_bytes is None or incumbent.smallest_bytes >= best_bytes:
            return False
        best, best_bytes = choices, incumbent.smallest_bytes
        return True

    for steps in (incumbent.smallest_steps, *known):
        if not finished():
            consider(encode(flat, steps))
    bases: list[Integers] = []
    for base in (keep_everything(flat), read_least(flat)):
        for retain in (EVERYWHERE, RERUN_EVERY_TIME):
            choices = base.copy()
            choices[flat.droppable] = retain
            bases.append(choices)
            if not finished():
                consider(choices)

    floor_bytes = max(problem.resident_bytes, enough_bytes)
    sizes = [problem.size_bytes[value] for value in flat.droppable]
    hot = max(1.0, HOT_SHARE * sum(sizes) / max(1, len(sizes)))
    weight = STEP_WEIGHT * hot / (problem.least_latency_ms or 1.0)
    step_bytes = first_step_bytes = max(1, (best_bytes - floor_bytes) // 8)
    turn = failures = 0
    while not finished() and failures < MAX_FAILURES and best_bytes > floor_bytes:
        cost = AnnealingCost(budget_bytes=max(floor_bytes, best_bytes - step_bytes), weight=weight)
        iterations = workspace.iterations(RUN_LENGTH * flat.operator_count, (deadline - now()) * LONGEST_RUN)
        # From the best, and from elsewhere in turn: each place has peaks that small changes don't lower.
        start = best if turn % 2 == 0 else bases[turn // 2 % STARTS]
        turn += 1
        run = AnnealingRun(start, cost, (hot, hot / COOLING), (1.0, 1.0), iterations)
        if workspace.advance(run, 1.0, finished, stop_when_fits=True) and consider(run.best):
            failures = 0
            continue
        if step_bytes <= max(1, best_bytes // 10_000):
            failures += 1
            if failures == MAX_FAILURES and enough_bytes:
                step_bytes, failures = 2 * first_step_bytes, 0
        step_bytes = max(1, step_bytes // 2)
    return best
