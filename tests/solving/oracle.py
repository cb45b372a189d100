"""Brute force for tiny graphs: every sequence of operators, judged by rules written out once more.

Nothing here is shared with the package but its data. Sequences are tried depth first; a prefix is given
up when it alone exceeds the budget (what comes later can only lengthen lifetimes) or is no faster than the
best found.
"""

import math
from collections.abc import Sequence

from monetlite.core.costs import Profile
from monetlite.core.graph import Phase


def judge(profile: Profile, steps: Sequence[tuple[int, int]]) -> tuple[float, int] | None:
    """(latency in ms, peak in bytes) of steps in an allowed order; None if something read is not there."""
    graph = profile.graph
    how = [graph.operators[operator].implementations[choice] for operator, choice in steps]
    peak = graph.resident.total
    latency_ms = 0.0
    for value in range(len(graph.values)):
        for at, step in enumerate(how):
            if value in step.overwrites and (graph.values[value].held or _read_after(how, value, at)):
                return None
            if value in step.reads and not any(value in earlier.writes for earlier in how[:at]):
                return None
    for at, (operator, choice) in enumerate(steps):
        again = any(operator == earlier for earlier, _ in steps[:at])
        run_ms, needed = profile.costs[operator][choice].of_run(again)
        latency_ms += run_ms
        needed += graph.resident.total
        for value, described in enumerate(graph.values):
            before = any(value in earlier.writes for earlier in how[:at])
            if described.held:
                live = before
            else:
                live = before and (value in how[at].reads or _read_from(how, value, at))
            new = value in how[at].writes and not live
            needed += described.size_bytes * (live + new - (value in how[at].overwrites))
        peak = max(peak, needed)
    return latency_ms, peak


def _read_from(how: Sequence[object], value: int, at: int) -> bool:
    """Whether the version of `value` that exists before step `at` is read at that step or later."""
    for step in how[at:]:
        if value in step.reads:  # type: ignore[attr-defined]
            return True
        if value in step.writes:  # type: ignore[attr-defined]
            return False
    return False


def _read_after(how: Sequence[object], value: int, at: int) -> bool:
    return _read_from(how, value, at + 1)


def fastest(profile: Profile, budget_bytes: int, most_reruns: int = 3) -> float:
    """The least latency of any legal steps within the budget that run at most `most_reruns` extra steps."""
    operators = profile.graph.operators
    main = [index for index, operator in enumerate(operators) if not operator.optional]
    forward = sum(operators[index].phase is Phase.FORWARD for index in main)
    extra = [index for index, operator in enumerate(operators) if operator.phase is Phase.FORWARD]
    best = math.inf
    # The least that the mandatory operators from each one on take.
    least_ms = [0.0]
    for operator in reversed(main):
        least_ms.insert(0, least_ms[0] + min(cost.of_run(False)[0] for cost in profile.costs[operator]))

    def go(steps: list[tuple[int, int]], done: int, reruns: int, latency_ms: float) -> None:
        nonlocal best
        # Judging takes long: not what is certainly too slow. Sums may be rounded in another way than the judge's.
        if latency_ms + least_ms[done] >= best * (1 + 1e-12):
            return
        if steps:
            judged = judge(profile, steps)
            if judged is None or judged[1] > budget_bytes or judged[0] >= best:
                return
            if done == len(main):
                best = judged[0]
                return
        following = [(main[done], done + 1, reruns)] if done < len(main) else []
        ran = {operator for operator, _ in steps}
        for operator in extra:
            optional = operators[operator].optional
            allowed = (optional or done >= forward) and (operators[operator].rerunnable or operator not in ran)
            if allowed and reruns < most_reruns:
                following.append((operator, done, reruns + 1))
        for operator, then, count in following:
            for choice, cost in enumerate(profile.costs[operator]):
                run_ms, _ = cost.of_run(operator in ran)
                go([*steps, (operator, choice)], then, count, latency_ms + run_ms)

    go([], 0, 0, 0.0)
    return best
