"""Schedules of a model of many layers within seconds: one plan for each layer, and no bound.

A solve of the whole step goes on from blocks to everything else, and proves how good that is. Here the blocks are
the layers of the model, so that a plan keeps what checkpointing a layer keeps, or more. Plans are looked for once;
then any budget is a small boolean program.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter

from monetlite.core.blocks import Block, find_blocks
from monetlite.core.costs import Profile
from monetlite.core.graph import DELIVERY, Implementation, OperatorGraph, Phase
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step
from monetlite.solving.baselines import layer_numbers
from monetlite.solving.blocks.deep_step import MIN_BLOCKS, DeepStep
from monetlite.solving.blocks.nested_plans import nested_plans
from monetlite.solving.clock import now

_MASTER_SECONDS, _MASTER_GAP = 1.0, 1e-3
"""The most time for each program of a budget, and its gap."""
_SWEEPS = ((1, 0.3), (2, 0.2), (4, 0.2))
"""Layers in a row for which plans are looked for, and parts of the time for that."""
_LIGHTER_SHARE = 0.3
"""Part of the time for lighter ways to run the plans."""
_PRICING_SHARE = 0.3
"""Part of the time for plans that the first budget asks for."""


class LayerPlans:
    """Plans for the layers of a step.

    Args:
        profile: the step and its costs. path: of the list of layers among the model's modules.
        seconds: about how long to look for plans. seed: of the search.
    """

    def __init__(self, profile: Profile, path: str, *, seconds: float, seed: int) -> None:
        self.profile = profile
        self.own = [at for at, item in enumerate(profile.graph.operators) if item.family != DELIVERY]
        """Operators that are planned. Deliveries take no time, and would make equal layers differ."""
        bare = _only(profile, self.own)
        self.blocks = layer_blocks(bare.graph, path)
        self.deep = None
        if len(self.blocks) >= MIN_BLOCKS:
            self.deep = DeepStep(bare, self.blocks, seed, self._timeline)
            for length, share in _SWEEPS:
                self.deep.sweep(length, share * seconds, _over(share * seconds))
            over = _over(_LIGHTER_SHARE * seconds)
            # A head and its loss need most, whatever is kept.
            searches = self.deep.searches.values()
            for search in sorted(searches, key=lambda of: -max(plan.forward_bytes for plan in of.plans)):
                search.lighten(over)
        self._pricing_seconds = _PRICING_SHARE * seconds

    def within(self, budget_bytes: int) -> tuple[Step, ...] | None:
        """The fastest schedule that the plans make within a budget; None if they make none."""
        if self.deep is None:
            return None
        if self._pricing_seconds > 0:
            self.deep.price(budget_bytes, self._pricing_seconds, _over(self._pricing_seconds))
            self._pricing_seconds = 0.0
        found = self.deep.within(budget_bytes, _MASTER_SECONDS, _MASTER_GAP)
        nested = nested_plans(self.deep)
        timeline = None if nested is None else nested.within(budget_bytes)
        if timeline is not None and timeline.peak_bytes <= budget_bytes:
            found = min(found or timeline, timeline, key=attrgetter("latency_ms"))
        return None if found is None else found.steps

    def _timeline(self, steps: Iterable[Step]) -> Timeline:
        return simulate(self.profile, self._with_deliveries(steps))

    def _with_deliveries(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Steps of the whole graph, with deliveries where they stand in the order of backward operators."""
        operators = self.profile.graph.operators
        waiting = [at for at, item in enumerate(operators) if item.family == DELIVERY][::-1]
        for at, choice in steps:
            index = self.own[at]
            while waiting and operators[index].phase is Phase.BACKWARD and waiting[-1] < index:
                yield waiting.pop(), 0
            yield index, choice
        yield from ((at, 0) for at in reversed(waiting))

    def leanest(self, most_bytes: int) -> tuple[Step, ...] | None:
        """The schedule of the smallest peak that the plans make; None if it isn't below `most_bytes`."""
        nested = None if self.deep is None else nested_plans(self.deep)
        timeline = None if nested is None else nested.leanest(most_bytes)
        return None if timeline is None else timeline.steps


def _over(seconds: float) -> Callable[[], bool]:
    """True once so many seconds have passed."""
    end = now() + seconds
    return lambda: now() >= end


def _only(profile: Profile, operators: list[int]) -> Profile:
    """A profile of some of the operators. They read nothing of the others."""
    own = [profile.graph.operators[at] for at in operators]
    written = {value for operator in own for value in operator.writes}

    def bare(way: Implementation) -> Implementation:
        return replace(way, reads=tuple(value for value in way.reads if value in written))

    left = tuple(replace(item, implementations=tuple(map(bare, item.implementations))) for item in own)
    graph = replace(profile.graph, operators=left)
    return replace(profile, graph=graph, costs=tuple(profile.costs[at] for at in operators))


def layer_blocks(graph: OperatorGraph, path: str) -> tuple[Block, ...]:
    """The blocks of a step, each of a layer; what comes before the first and after the last is with those."""
    first: dict[int, int] = {}
    for index, layer in layer_numbers(graph, path).items():
        operator = graph.operators[index]
        if operator.phase is Phase.FORWARD and not operator.optional:
            first.setdefault(layer, index)
    return find_blocks(graph, sorted(first.values())[1:])
