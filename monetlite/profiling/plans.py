"""Which of cuDNN's plans stay in a profile: those that beat all others in latency or in workspace."""

from collections.abc import Sequence

from monetlite.core.costs import Cost, Profile
from monetlite.core.graph import Implementation, Operator
from monetlite.operators.cudnn import PREFIX


def is_plan(item: Implementation) -> bool:
    """Whether an implementation runs a plan of cuDNN's."""
    return item.name.startswith(PREFIX)


def pareto(costs: Sequence[Cost]) -> list[int]:
    """Positions of the costs that no other one is at or below in both latency and workspace.

    Of equal costs, the first is taken.
    """
    order = sorted(range(len(costs)), key=lambda at: (costs[at].latency_ms, costs[at].workspace_bytes, at))
    front: list[int] = []
    for at in order:
        if not front or costs[at].workspace_bytes < costs[front[-1]].workspace_bytes:
            front.append(at)
    return sorted(front)


def on_front(profile: Profile) -> Profile:
    """The same profile with only those plans that are worth choosing; everything else stays.

    A plan is worth choosing if nothing costs at most as much in both latency and workspace, among the operator's
    other plans and what can always take a plan's place: implementations that read no more, are as exact, overwrite
    nothing and have no guard.
    """
    kept = {
        (item.writes, item.name)
        for operator, costs in zip(profile.graph.operators, profile.costs, strict=True)
        for item in _on_front(operator, costs)
    }
    return profile.restricted(lambda item: not is_plan(item) or (item.writes, item.name) in kept)


def _on_front(operator: Operator, costs: Sequence[Cost]) -> list[Implementation]:
    plans = [item for item in operator.implementations if is_plan(item)]
    if not plans:
        return []
    rivals = [
        at for at, item in enumerate(operator.implementations) if is_plan(item) or _can_replace(item, plans[0])
    ]
    return [operator.implementations[rivals[at]] for at in pareto([costs[at] for at in rivals])]


def _can_replace(item: Implementation, plan: Implementation) -> bool:
    return (
        set(item.reads) <= set(plan.reads)
        and item.tolerance <= plan.tolerance
        and not item.overwrites
        and item.guard is None
    )
