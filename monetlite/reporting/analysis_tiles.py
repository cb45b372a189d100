"""Operators that a schedule runs in tiles: the memory that this saves there, and the time it takes."""

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby

from monetlite.core.graph import Implementation, Phase
from monetlite.core.step_analysis import StepAnalysis

_TILES = re.compile(r"tiles_(\d+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class TiledRuns:
    """Alike operators that run in the same number of tiles.

    Attributes:
        family: of the operators; modules: theirs, with the numbers of repeated ones as ranges.
        tiles: number of tiles; backward: they are of the backward part; runs: number of runs.
        whole_bytes: operands, results and workspace of one of them by its default implementation.
        tiled_bytes: the same as it runs.
        extra_ms: time of all runs beyond the default's; negative if they take less.
    """

    family: str
    modules: str
    tiles: int
    backward: bool
    runs: int
    whole_bytes: int
    tiled_bytes: int
    extra_ms: float


def tiled_runs(scheduled: StepAnalysis) -> tuple[TiledRuns, ...]:
    """Operators that run in tiles, the largest saving first."""
    graph, costs = scheduled.graph, scheduled.profile.costs

    def at_a_time(item: Implementation, workspace_bytes: int) -> int:
        values = {*item.reads, *item.writes}
        taken = sum(graph.values[value].size_bytes for value in values)
        return taken + workspace_bytes - sum(graph.values[value].size_bytes for value in item.overwrites)

    groups: defaultdict[tuple[str, str, int, bool], list[tuple[int, int, bool]]] = defaultdict(list)
    for (index, choice), again in zip(scheduled.timeline.steps, scheduled.again, strict=True):
        operator = graph.operators[index]
        if found := _TILES.search(operator.implementations[choice].name):
            form = _NUMBER.sub("*", operator.module)
            key = operator.family, form, int(found.group(1)), operator.phase is Phase.BACKWARD
            groups[key].append((index, choice, again))
    runs = []
    for (family, form, tiles, backward), items in groups.items():
        index, choice, _ = items[0]
        whole, tiled = (
            at_a_time(graph.operators[index].implementations[way], costs[index][way].workspace_bytes)
            for way in (0, choice)
        )
        extra_ms = sum(
            costs[index][choice].of_run(again=again)[0] - costs[index][0].of_run(again=again)[0]
            for index, choice, again in items
        )
        numbers = [_NUMBER.search(graph.operators[index].module) for index, _, _ in items]
        layers = sorted({int(number.group()) for number in numbers if number is not None})
        runs.append(
            TiledRuns(
                family=family.removeprefix("monetlite."),
                modules=form.replace("*", _ranges(layers), 1),
                tiles=tiles,
                backward=backward,
                runs=len(items),
                whole_bytes=whole,
                tiled_bytes=tiled,
                extra_ms=extra_ms,
            )
        )
    return tuple(sorted(runs, key=lambda item: item.tiled_bytes - item.whole_bytes))


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as ranges: `0-2,5`."""
    found = []
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        items = [number for _, number in group]
        found.append(str(items[0]) if len(items) == 1 else f"{items[0]}-{items[-1]}")
    return ",".join(found)
