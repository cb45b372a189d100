"""What a schedule reserves with expandable segments and no limit, compiled: as `Allocator` has it, for thousands of
schedules a second.

Without a limit nothing goes back, so what is behind a segment's addresses is all below one end. Then the rules are
few: a request gets the smallest gap between blocks that holds it, at its beginning; where there is none, what is
free at the end, and as many pages more as that takes. Requests of up to 1 MiB have a segment of their own, which is
left out.

All in one file, since numba's cache does not notice when a compiled function of another file changes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy

from monetlite.allocator.allocator import PAGE_BYTES, SMALL, SMALLEST
from monetlite.core.costs import Profile
from monetlite.solving.kernel import entry
from monetlite.solving.layout import Integers

_STEPS = 3
"""Training steps at most: fewer where one finds all that it needs."""
_SMALL = -1
"""In place of an address: something small, or of no size, is there."""
_NOTHING = -2


class Requests(NamedTuple):
    """A graph's implementations, numbered through, and what each asks for.

    `lists[starts[i, 0]:starts[i, 1]]` is what implementation i reads, then up to `starts[i, 2]` what it writes,
    then up to `starts[i, 3]` what it overwrites. `workspaces[i]` is of its operator's first run and of later ones.
    """

    first: Integers
    """For each operator, its first implementation's number."""
    starts: Integers
    lists: Integers
    workspaces: Integers
    sizes: Integers
    held: Integers


def requests_of_graph(profile: Profile) -> Requests:
    """A profile as `reserved_bytes` takes it."""
    graph = profile.graph
    first: list[int] = []
    starts: list[tuple[int, ...]] = []
    workspaces: list[list[int]] = []
    lists: list[int] = []

    def added(values: Iterable[int]) -> int:
        lists.extend(values)
        return len(lists)

    for operator, costs in zip(graph.operators, profile.costs, strict=True):
        first.append(len(starts))
        for item, cost in zip(operator.implementations, costs, strict=True):
            ends = (added(item.reads), added(item.writes), added(item.overwrites))
            starts.append((ends[0] - len(item.reads), *ends))
            workspaces.append([cost.of_run(again=again)[1] for again in (False, True)])
    return Requests(
        first=_integers(first),
        starts=_integers(starts),
        lists=_integers(lists),
        workspaces=_integers(workspaces),
        sizes=_integers([value.size_bytes for value in graph.values]),
        held=_integers([value.held for value in graph.values]),
    )


def _integers(numbers: object) -> Integers:
    return numpy.array(numbers, dtype=numpy.int64)


@entry
def reserved_bytes(requests: Requests, operators: Integers, ways: Integers) -> int:
    """What the segment for requests of more than 1 MiB comes to, in bytes.

    Args:
        requests: of the graph.
        operators, ways: of each step of a legal schedule, the operator and the index of its implementation.
    """
    first, starts, lists, workspaces, sizes, held = requests
    count, values = operators.size, sizes.size
    # What dies at each step: `dying[deaths[at]:deaths[at + 1]]`, found from the last step to the first.
    needed = held.copy()
    most = 0
    for at in range(count):
        number = first[operators[at]] + ways[at]
        most += starts[number, 2] - starts[number, 0]
    dying = numpy.empty(most, dtype=numpy.int64)
    deaths = numpy.zeros(count + 1, dtype=numpy.int64)
    deaths[count] = most
    left = most
    for at in range(count - 1, -1, -1):
        number = first[operators[at]] + ways[at]
        for item in range(starts[number, 1], starts[number, 2]):
            value = lists[item]
            if not needed[value]:
                left -= 1
                dying[left] = value
        for item in range(starts[number, 1], starts[number, 2]):
            if not held[lists[item]]:
                needed[lists[item]] = 0
        for item in range(starts[number, 0], starts[number, 1]):
            value = lists[item]
            if not needed[value]:
                needed[value] = 1
                left -= 1
                dying[left] = value
        deaths[at] = left
    # Blocks in use, by address.
    begins = numpy.empty(values + 1, dtype=numpy.int64)
    ends = numpy.empty(values + 1, dtype=numpy.int64)
    address = numpy.empty(values, dtype=numpy.int64)
    ran = numpy.empty(first.size, dtype=numpy.int64)
    end = 0
    for _ in range(_STEPS):
        before = end
        used = 0
        address[:] = _NOTHING
        ran[:] = 0
        for at in range(count):
            operator = operators[at]
            number = first[operator] + ways[at]
            last = starts[number, 2]
            over = starts[number, 3] - last
            taken = 0
            # Its results one by one, and then its workspace.
            for item in range(starts[number, 1], last + 1):
                value = -1
                if item < last:
                    value = lists[item]
                    size = sizes[value]
                    if address[value] != _NOTHING or not size:
                        continue
                    moved = False
                    for place in range(over):
                        other = lists[last + place]
                        if taken >> place & 1 == 0 and sizes[other] == size and address[other] != _NOTHING:
                            address[value] = address[other]
                            address[other] = _NOTHING
                            taken |= 1 << place
                            moved = True
                            break
                    if moved:
                        continue
                else:
                    size = workspaces[number, ran[operator]]
                    ran[operator] = 1
                    if size <= 0:
                        continue
                size = (size + SMALLEST - 1) // SMALLEST * SMALLEST
                if size <= SMALL:
                    if value >= 0:
                        address[value] = _SMALL
                    continue
                found, smallest, start = used, -1, 0
                for block in range(used):
                    gap = begins[block] - start
                    if gap >= size and (smallest < 0 or gap < smallest):
                        found, smallest = block, gap
                    start = ends[block]
                at_address = start if found == used else (ends[found - 1] if found else 0)
                if found == used and end - start < size:
                    missing = size - (end - start)
                    end += (missing + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
                if value < 0:
                    continue  # and the workspace is free again
                for block in range(used, found, -1):
                    begins[block], ends[block] = begins[block - 1], ends[block - 1]
                begins[found], ends[found] = at_address, at_address + size
                used += 1
                address[value] = at_address
            for item in range(deaths[at], deaths[at + 1]):
                value = dying[item]
                if address[value] >= 0:
                    gone = numpy.searchsorted(begins[:used], address[value])
                    for block in range(gone, used - 1):
                        begins[block], ends[block] = begins[block + 1], ends[block + 1]
                    used -= 1
                address[value] = _NOTHING
        if end == before:
            break
    return end


__all__ = ["Requests", "requests_of_graph", "reserved_bytes"]
