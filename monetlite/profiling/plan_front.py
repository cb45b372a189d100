"""Those of cuDNN's execution plans that are worth choosing, by what they cost."""

from collections.abc import Sequence

from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import Implementation
from monetlite.operators.cudnn import is_plan


def on_front(profile: Profile) -> Profile:
    """The same profile with only those of cuDNN's plans that are worth choosing.

    A plan is worth choosing if nothing costs at most as much in both latency and workspace, among the operator's
    other plans and what can always take a plan's place: implementations that read no more, are as exact, overwrite
    nothing and have no guard.
    """
    kept: set[tuple[tuple[int, ...], str]] = set()
    for operator, costs in zip(profile.graph.operators, profile.costs, strict=True):
        plan = next((item for item in operator.implementations if is_plan(item.name)), None)
        if plan is not None:
            rivals = [
                (item, cost)
                for item, cost in zip(operator.implementations, costs, strict=True)
                if is_plan(item.name) or _replaces(item, plan)
            ]
            front = pareto([cost for _, cost in rivals])
            kept |= {(rivals[at][0].writes, rivals[at][0].name) for at in front}
    return profile.restricted(lambda item: not is_plan(item.name) or (item.writes, item.name) in kept)


def _replaces(item: Implementation, plan: Implementation) -> bool:
    no_more = set(item.reads) <= set(plan.reads) and item.tolerance <= plan.tolerance
    return no_more and not item.overwrites and item.guard is None


def pareto(costs: Sequence[Cost]) -> list[int]:
    """Positions of the costs that no other one is at or below in both latency and workspace.

    Of equal costs, the first is taken.
    """
    order = sorted(range(len(costs)), key=lambda at: (costs[at].latency_ms, costs[at].workspace_bytes))
    front: list[int] = []
    for at in order:
        if not front or costs[at].workspace_bytes < costs[front[-1]].workspace_bytes:
            front.append(at)
    return sorted(front)
