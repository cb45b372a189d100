"""Nested checkpointing: a few of a step's blocks are checkpoints, and what lies between two of them has its own.

Each level needs one more run of its blocks, and memory for few of them. (Griewank, 1992, "Achieving logarithmic
growth of temporal and spatial complexity in reverse automatic differentiation"; Chen et al., 2016, section 4.)
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from monetlite.core.blocks import Block, find_blocks
from monetlite.core.costs import Profile
from monetlite.core.graph import OperatorGraph
from monetlite.core.steps import Step, reruns

MIN_NESTED = 4
"""The fewest blocks for which it is tried."""


def nested_settings(profile: Profile) -> Iterator[tuple[Step, ...]]:
    """Schedules of one to four levels over a step's blocks; none of a step with few."""
    blocks = find_blocks(profile.graph)
    count = len(blocks)
    if count < MIN_NESTED:
        return
    root, third = math.isqrt(count), max(2, round(count ** (1 / 3)))
    settings = [
        (count,),
        (root, 2),
        (third, third, 2),
        ((count + 1) // 2,),
        (count // 2, 2),
        (root,),
        (root, max(2, root // 2)),
        (third, 2, 2),
        (2, third, 2),
        (2, 2, 2, 2),
    ]
    for parts in dict.fromkeys(settings):
        yield nested_checkpointing(profile.graph, blocks, parts)


def nested_checkpointing(graph: OperatorGraph, blocks: Sequence[Block], parts: Sequence[int]) -> tuple[Step, ...]:
    """Run every default implementation, and again each block that no checkpoint of the last level keeps.

    Args:
        graph: of the step.
        blocks: of it, in order.
        parts: into how many parts each level cuts those of the level above.
    """
    steps: list[Step] = [(index, 0) for index in graph.mandatory_forward]
    again = [[(index, 0) for index in block.forward if _runs_again(graph, index)] for block in blocks]
    made: set[int] = set()

    def make_optional(index: int) -> None:
        """Run the optional operators that another one reads from."""
        for value in graph.operators[index].implementations[0].reads:
            writer = graph.writer[value]
            if graph.operators[writer].optional and writer not in made:
                made.add(writer)
                make_optional(writer)
                steps.append((writer, 0))

    def run_again(first: int, end: int) -> None:
        steps.extend(itertools.chain.from_iterable(again[first:end]))

    def go_back(first: int, end: int, level: int) -> None:
        """Run the backward part of blocks, whose inputs are there."""
        if level == len(parts) or end - first == 1:
            if level > 0:
                run_again(first, end)
            for block in reversed(blocks[first:end]):
                for index in block.backward:
                    make_optional(index)
                    steps.append((index, 0))
            return
        count = min(parts[level], end - first)
        cuts = [first + (end - first) * at // count for at in range(count + 1)]
        if level > 0:
            run_again(first, cuts[-2])
        for start, stop in reversed(list(itertools.pairwise(cuts))):
            go_back(start, stop, level + 1)

    go_back(0, len(blocks), 0)
    return _without_idle_reruns(graph, steps)


def _runs_again(graph: OperatorGraph, index: int) -> bool:
    return graph.operators[index].rerunnable and not graph.operators[index].optional


def _without_idle_reruns(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Steps without re-runs whose results nothing reads before they are written again."""
    needed = [value.held for value in graph.values]
    kept: list[Step] = []
    for step, again in reversed(list(zip(steps, reruns(steps), strict=True))):
        operator = graph.operators[step[0]]
        implementation = operator.implementations[step[1]]
        useful = any(needed[value] and not graph.values[value].held for value in implementation.writes)
        if (again or operator.optional) and not useful:
            continue
        kept.append(step)
        for value in implementation.writes:
            needed[value] = graph.values[value].held
        for value in implementation.reads:
            needed[value] = True
    return tuple(reversed(kept))
