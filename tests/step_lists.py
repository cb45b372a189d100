"""Schedules for tests, made without a solver: store everything, recompute everything, recompute at random.

The step lists are built forwards from what is in memory, with none of the package's own lifetime analysis.
"""

import random
from collections.abc import Callable, Iterable

from torch import nn

import monetlite
from monetlite.core.choices import Choices
from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import OperatorGraph, Phase
from monetlite.core.schedule import Schedule, Status
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step
from monetlite.tracing import Inputs


def free_profile(graph: OperatorGraph) -> Profile:
    """A profile in which every operator takes a millisecond and no workspace."""
    cost = Cost(latency_ms=1.0, workspace_bytes=0)
    return Profile(
        graph=graph,
        device="cpu",
        kind=ProfileKind.ESTIMATED,
        costs=tuple(tuple(cost for _ in operator.implementations) for operator in graph.operators),
    )


def live_before(graph: OperatorGraph, timeline: Timeline) -> list[set[int]]:
    """The values in memory before each step of a timeline."""
    live: set[int] = set()
    before = []
    for (index, choice), frees in zip(timeline.steps, timeline.frees, strict=True):
        before.append(live)
        live = live.union(graph.operators[index].implementations[choice].writes) - frees
    return before


def recompute(
    graph: OperatorGraph, drop: Callable[[int], bool], choose: Callable[[int], int] = lambda _: 0
) -> tuple[Step, ...]:
    """Run the forward pass, and before each backward operator whatever it needs that is not in memory.

    `drop(value)` is asked, after each backward operator and after the forward pass, whether a value that can
    be computed again is dropped; `choose(operator)` which implementation a run uses.
    """
    steps: list[Step] = []
    live: set[int] = set()

    def run(index: int) -> None:
        choice = choose(index)
        implementation = graph.operators[index].implementations[choice]
        for value in implementation.reads:
            if value not in live:
                run(graph.writer[value])
        steps.append((index, choice))
        live.update(implementation.writes)

    def forget() -> None:
        for value in sorted(live):
            writer = graph.operators[graph.writer[value]]
            if not graph.values[value].held and writer.phase is Phase.FORWARD and writer.rerunnable and drop(value):
                live.discard(value)

    started = False
    for index, operator in enumerate(graph.operators):
        if operator.optional:
            continue
        if operator.phase is Phase.BACKWARD:
            if not started:
                forget()
            started = True
        run(index)
        if started:
            forget()
    return tuple(steps)


def recompute_everything(graph: OperatorGraph) -> tuple[Step, ...]:
    """Nothing that can be computed again survives from one backward operator to the next."""
    return recompute(graph, lambda _: True)


def recompute_at_random(graph: OperatorGraph, rng: random.Random, share: float = 0.5) -> tuple[Step, ...]:
    """A random share of what can be computed again is dropped at each opportunity."""
    return recompute(graph, lambda _: rng.random() < share)


def recompute_with_any_reads(graph: OperatorGraph, rng: random.Random, share: float) -> tuple[Step, ...]:
    """`recompute_at_random`, where operators also read at random what their implementations offer to read."""

    def choose(index: int) -> int:
        items = graph.operators[index].implementations
        others = [at for at, item in enumerate(items) if not item.overwrites and item.writes == items[0].writes]
        return rng.choice([0, *others])

    return recompute(graph, lambda _: rng.random() < share, choose)


def drop_once(graph: OperatorGraph, chosen: Iterable[int] | None = None) -> tuple[Step, ...]:
    """Drop values after the forward pass (all, or those chosen), compute each again when it is needed."""
    wanted = set(range(len(graph.values))) if chosen is None else set(chosen)

    def drop(value: int) -> bool:
        if value in wanted:
            wanted.discard(value)
            return True
        return False

    return recompute(graph, drop)


def with_random_implementations(
    graph: OperatorGraph, steps: tuple[Step, ...], rng: random.Random
) -> tuple[Step, ...]:
    """Choose implementations at random, and take back what is not legal together with the rest."""
    chosen = [(index, rng.randrange(len(graph.operators[index].implementations))) for index, _ in steps]
    while broken := [at for at in _illegal(graph, chosen) if chosen[at] != steps[at]]:
        for at in broken:
            chosen[at] = steps[at]
    return tuple(chosen)


def _illegal(graph: OperatorGraph, steps: list[Step]) -> list[int]:
    """Positions of steps that read what isn't in memory, or leave out or overwrite what is read later."""
    next_read: dict[int, int] = {}
    broken: list[int] = []
    for at in range(len(steps) - 1, -1, -1):
        item = graph.operators[steps[at][0]].implementations[steps[at][1]]
        for value in item.writes:
            next_read.pop(value, None)
        if any(value in next_read or graph.values[value].held for value in item.overwrites):
            broken.append(at)
        for value in item.reads:
            next_read[value] = at
    lives_until = {}
    last: dict[int, int] = {}
    for at in range(len(steps) - 1, -1, -1):
        item = graph.operators[steps[at][0]].implementations[steps[at][1]]
        for value in item.writes:
            lives_until[at, value] = last.pop(value, at)
        for value in item.reads:
            last.setdefault(value, at)
    version: dict[int, int] = {}
    maker: dict[int, int] = {}
    for at, (index, choice) in enumerate(steps):
        item = graph.operators[index].implementations[choice]
        for value in item.reads:
            if value not in version or lives_until[version[value], value] < at:
                broken += [at, maker[value]] if value in maker else [at]
        version.update(dict.fromkeys(item.writes, at))
        maker.update(dict.fromkeys(graph.operators[index].writes, at))
    return broken


def schedule_of(profile: Profile, steps: Iterable[Step], budget_bytes: int | None = None) -> Schedule:
    """A schedule file's worth of facts about steps, as a solver would promise them."""
    graph, steps = profile.graph, tuple(steps)
    timeline = simulate(profile, steps)
    return Schedule(
        name=graph.name,
        fingerprint=graph.fingerprint,
        structure=graph.structure,
        operators=len(graph.traced),
        inputs=graph.inputs,
        choices=Choices.of_steps(graph, steps),
        budget_bytes=timeline.peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=timeline.peak_bytes,
        latency_ms=timeline.latency_ms,
        lower_bound_ms=0.0,
        status=Status.FEASIBLE,
        plain_peak_bytes=timeline.peak_bytes,
        plain_latency_ms=timeline.latency_ms,
        device=profile.device,
        kind=str(profile.kind),
        solver="test",
        seconds=0.0,
        layout=graph.layout,
        outputs=graph.outputs,
        autocast=graph.autocast,
        tolerance=max((graph.operators[index].implementations[at].tolerance for index, at in steps), default=0.0),
    )


def schedule_for(model: nn.Module, inputs: Inputs) -> Schedule:
    """A schedule that computes everything again."""
    graph = monetlite.trace(model, inputs)
    return schedule_of(free_profile(graph), recompute_everything(graph))
