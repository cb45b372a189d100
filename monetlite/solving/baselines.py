"""Other methods' schedules, for comparison and as starting points.

Settings of checkpointing know no budget: `simulate` says what they need. The greedy baseline is
`annealing.greedy`.
"""

import bisect
import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import OperatorGraph, Phase, ValueKind
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import Step, plain_steps, reruns

_MAX_DEPTH = 5
"""Levels of modules at which settings of checkpointing are tried."""


def sqrt_checkpointing(profile: Profile) -> tuple[Step, ...]:
    """√n segments of the n forward operators (Chen et al., 2016, section 3)."""
    count = len(profile.graph.mandatory_forward)
    pieces = max(1, math.isqrt(count))
    return segment_checkpointing(profile, [count * piece // pieces for piece in range(1, pieces)])


def segment_checkpointing(profile: Profile, segments: Sequence[int] | None = None) -> tuple[Step, ...]:
    """Keep the values that cross from one segment of the forward pass to another; re-run each before its backward.

    This is `torch.utils.checkpoint` around each segment: the first time the backward pass reads something a
    segment dropped, what is missing of that segment and still read is run again, all at once.

    Args:
        profile: the graph and its costs.
        segments: positions among the mandatory forward operators where a new segment begins, ascending. If not
            given, `module_boundaries`, or where the graph has no module paths `articulation_boundaries`.
    """
    graph = profile.graph
    if segments is None:
        segments = module_boundaries(graph) or articulation_boundaries(graph)
    segment_of = {
        index: bisect.bisect_right(segments, position) for position, index in enumerate(graph.mandatory_forward)
    }
    crossing = {
        value
        for index, segment in segment_of.items()
        for value in graph.operators[index].implementations[0].reads
        if segment_of.get(graph.writer[value], segment) != segment
    }
    return tuple(_replayed(graph, segment_of, crossing))


def keep_only(profile: Profile, kept: Iterable[int]) -> tuple[Step, ...]:
    """Keep only these values for the backward part; re-run all that is missing at once, when it is first read."""
    return tuple(_replayed(profile.graph, dict.fromkeys(profile.graph.mandatory_forward, 0), set(kept)))


def layer_checkpointing(profile: Profile, path: str, every: int = 1) -> tuple[Step, ...]:
    """Every layer of a list, or every second, third, ..., under `torch.utils.checkpoint`; the rest runs plainly.

    This is transformers' `activation_checkpointing_enable(every_n_layers=...)`.

    Args:
        profile: the graph and its costs.
        path: of the list of layers among the model's modules.
        every: the first layer of so many is checkpointed.
    """
    graph, forward = profile.graph, profile.graph.mandatory_forward
    layers = layer_numbers(graph, path)
    checkpointed = {index: layers[index] for index in forward if index in layers and layers[index] % every == 0}
    entering = {
        value
        for index in forward
        for value in graph.operators[index].implementations[0].reads
        if checkpointed.get(graph.writer[value], checkpointed.get(index)) != checkpointed.get(index)
    }
    outside = {value for index in forward if index not in checkpointed for value in graph.operators[index].writes}
    return tuple(_replayed(graph, checkpointed, entering | outside))


def layer_numbers(graph: OperatorGraph, path: str) -> dict[int, int]:
    """For each operator of a layer, the layer's number in a list of that path among the model's modules."""
    of_layer = re.compile(rf"{re.escape(path)}\.(\d+)(\.|$)")
    found = ((index, of_layer.match(operator.module)) for index, operator in enumerate(graph.operators))
    return {index: int(match[1]) for index, match in found if match}


def module_boundaries(graph: OperatorGraph, depth: int = 2) -> list[int]:
    """Positions at which the module path of the mandatory forward operators changes, at its first `depth`
    levels."""
    paths = [graph.operators[index].module.split(".")[:depth] for index in graph.mandatory_forward]
    if not any(any(path) for path in paths):
        return []
    return [at for at in range(1, len(paths)) if paths[at] != paths[at - 1]]


def articulation_boundaries(graph: OperatorGraph) -> list[int]:
    """Positions at which at most one value passes from the mandatory forward operators before to those after."""
    forward = graph.mandatory_forward
    position_of = {index: position for position, index in enumerate(forward)}
    crossing = [0] * (len(forward) + 1)
    last_read: dict[int, int] = {}
    for position, index in enumerate(forward):
        last_read.update(dict.fromkeys(graph.operators[index].implementations[0].reads, position))
    for value, last in last_read.items():
        written = position_of.get(graph.writer[value])
        if written is not None:
            crossing[written + 1] += 1
            crossing[last + 1] -= 1
    passing = enumerate(itertools.accumulate(crossing[:-1]))
    return [position for position, values in passing if position > 0 and values <= 1]


def _replayed(graph: OperatorGraph, segment_of: dict[int, int], kept: set[int]) -> Iterator[Step]:
    """The steps of segment checkpointing, where some values are kept."""
    live: set[int] = set()
    ran: set[int] = set()
    backward = [index for index, op in enumerate(graph.operators) if op.phase is Phase.BACKWARD]
    # Values that backward operators read, or that re-running those takes.
    wanted: set[int] = set()
    waiting = [value for index in backward for value in graph.operators[index].implementations[0].reads]
    while waiting:
        value = waiting.pop()
        if value not in wanted:
            wanted.add(value)
            waiting.extend(graph.operators[graph.writer[value]].implementations[0].reads)

    of_segment: dict[int, list[int]] = {}
    for index, segment in segment_of.items():
        of_segment.setdefault(segment, []).append(index)
    missed = set(wanted)  # of those, what is not there

    def to_rerun(value: int) -> list[int]:
        """The operators to run again when a value is missing: all of its segment that is still needed."""
        writer = graph.writer[value]
        segment = of_segment[segment_of[writer]] if writer in segment_of else ()
        return [index for index in segment if not missed.isdisjoint(graph.operators[index].writes)] or [writer]

    def run(index: int) -> Iterator[Step]:
        """Run an operator, and before it everything that makes its missing inputs."""
        pending = [index]
        while pending:
            operator = graph.operators[pending[-1]]
            missing = [value for value in operator.implementations[0].reads if value not in live]
            if missing:
                pending.extend(reversed(to_rerun(missing[0])))
                continue
            current = pending.pop()
            if current in ran and operator.writes and live.issuperset(operator.writes):
                continue
            yield current, 0
            ran.add(current)
            live.update(operator.writes)
            missed.difference_update(operator.writes)

    for index in graph.mandatory_forward:
        yield from run(index)
    for value in live - kept:
        if graph.operators[graph.writer[value]].rerunnable and not graph.values[value].held:
            live.discard(value)
    missed = wanted - live
    for index in backward:
        yield from run(index)


def with_fewer_reruns(
    profile: Profile,
    steps: tuple[Step, ...],
    budget_bytes: int,
    *,
    parts: int = 8,
    finished: Callable[[], bool] = lambda: False,
) -> tuple[Step, ...]:
    """Steps without the re-runs that a budget has memory to leave out: all, or halves of them, quarters, and so on.

    In each part are re-runs that follow each other. Those that the backward part comes to first are tried first:
    what they make waits the shortest time. (Delta debugging, Zeller and Hildebrandt, 2002.)

    Args:
        profile, steps: legal steps, and their costs.
        budget_bytes: no step may need more without them.
        parts: the most parts that re-runs are divided into.
        finished: asked often.
    """
    count = 1
    while count <= parts and not finished():
        again = [at for at, rerun in enumerate(reruns(steps)) if rerun]
        size = -(-len(again) // count)
        left_out: set[int] = set()
        for part in (again[at : at + size] for at in range(0, len(again), size or 1)):
            if finished():
                break
            without = left_out.union(part)
            fewer = tuple(step for at, step in enumerate(steps) if at not in without)
            with contextlib.suppress(IllegalSchedule):
                if simulate(profile, fewer).peak_bytes <= budget_bytes:
                    left_out = without
        steps = tuple(step for at, step in enumerate(steps) if at not in left_out)
        count = 2 * count if size > 1 else parts + 1
    return steps


def lighter_steps(profile: Profile, steps: tuple[Step, ...], wanted_bytes: float = math.inf) -> Iterator[Timeline]:
    """The same steps with another implementation where they need most, again and again while that lowers the peak.

    Of an operator's implementations that lower the peak, the fastest within `wanted_bytes` is taken, or the one
    that needs least. What is outside of checkpointed layers, as a model's head and loss, may need more than those.
    """
    timeline = simulate(profile, steps)
    while True:
        at = timeline.peak_step
        index, present = timeline.steps[at]
        lower: list[tuple[float, Timeline]] = []
        for choice, cost in enumerate(profile.costs[index]):
            changed = (*timeline.steps[:at], (index, choice), *timeline.steps[at + 1 :])
            with contextlib.suppress(IllegalSchedule):
                if choice != present and (found := simulate(profile, changed)).peak_bytes < timeline.peak_bytes:
                    lower.append((cost.latency_ms, found))
        if not lower:
            return
        fitting = [item for item in lower if item[1].memory_bytes[at] <= wanted_bytes]
        least = min(lower, key=lambda item: item[1].memory_bytes[at])
        _, timeline = min(fitting, key=lambda item: item[0], default=least)
        yield timeline


def with_lighter_implementations(profile: Profile, steps: tuple[Step, ...], budget_bytes: int) -> tuple[Step, ...]:
    """Steps, or `lighter_steps` of them, that keep to a budget; the lightest ones if none do."""
    timeline, lighter = simulate(profile, steps), lighter_steps(profile, steps, budget_bytes)
    while timeline.peak_bytes > budget_bytes and (found := next(lighter, None)) is not None:
        timeline = found
    return timeline.steps


def known_schedules(profile: Profile) -> Iterator[tuple[Step, ...]]:
    """Schedules that need no search, for searches to begin from."""
    yield plain_steps(profile.graph)
    yield segment_checkpointing(profile)
    yield sqrt_checkpointing(profile)


def checkpointing_settings(profile: Profile) -> Iterator[tuple[Step, ...]]:
    """Schedules of one-line settings: every module of a depth checkpointed, every second, every fourth, ...; √n."""
    yield sqrt_checkpointing(profile)
    tried: set[int] = set()
    for depth in range(1, _MAX_DEPTH + 1):
        boundaries = module_boundaries(profile.graph, depth)
        every = 1
        while len(boundaries) // every > 1 and len(boundaries) not in tried:
            yield segment_checkpointing(profile, boundaries[::every])
            every *= 2
        tried.add(len(boundaries))
    if tried == {0}:
        yield segment_checkpointing(profile)


def restrict_checkmate(profile: Profile) -> Profile:
    """Storage and recomputation only, with default implementations (Checkmate, Jain et al., MLSys 2020)."""
    return profile.restricted(lambda item: False)


def restrict_gist(profile: Profile) -> Profile:
    """Masks and other compact intermediates, but no recomputation (Gist, Jain et al., ISCA 2018).

    Operators that are not optional can't be run again; of the implementations only those are left that are
    the default or read an intermediate.
    """
    kinds = [value.kind for value in profile.graph.values]
    restricted = profile.restricted(
        lambda item: any(kinds[value] is ValueKind.INTERMEDIATE for value in item.reads)
    )
    operators = tuple(replace(op, rerunnable=False) for op in restricted.graph.operators)
    return replace(restricted, graph=replace(restricted.graph, operators=operators))
