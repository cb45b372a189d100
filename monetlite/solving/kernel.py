"""Compiled evaluation of one choice of what to keep, what to re-run and which groups to read.

A *genome* is one flat array of integers with everything the search decides, in parts of this order:

| part | length | says |
| --- | --- | --- |
| retain | values | bit 0: the value stays at the end of the forward pass; bit i: it stays after its i-th read since |
| first | operators | which of its groups an operator's first run reads |
| again | operators | which one its re-runs read |
| place | operators | an optional operator runs 0: where it is needed; 1: once its inputs are there; 2: as they die |
| eager | operators | 1: when an input is about to be dropped in the backward part, run first if it can and isn't there |
| reverse | operators | 1: what is missing is recomputed last input first |

Everything else follows. `generate` walks the backward operators and recomputes what is missing right where
it is read, depth first; `price` goes back over the steps, derives from the rules of `monetlite.schedule`
when each version of each value dies, and gives each step the option with the least latency + penalty ·
overflow.
"""

from typing import NamedTuple

import numba
import numpy

from monetlite.solving.problem import Flags, Floats, Integers, Tables

LAST_BIT = 62
"""Reads of a value beyond this many share a bit."""

PARTS = 5
"""Parts of a genome that have an entry for each operator, after the one that has an entry for each value."""


class Scratch(NamedTuple):
    """Working memory of one evaluation; also where its results are left."""

    available: Flags
    touches: Integers
    """Reads of each value since the end of the forward pass."""
    pins: Integers
    """Waiting operators that need the value."""
    needed: Flags
    died_at: Integers
    ran: Flags
    stack_operator: Integers
    stack_group: Integers
    stack_position: Integers
    step_operator: Integers
    step_group: Integers
    step_again: Flags
    step_option: Integers
    numbers: Floats
    """least latency of the steps, latency, overflow in bytes, peak in bytes: written by `generate` and `price`."""


def new_scratch(values: int, operators: int, most_steps: int) -> Scratch:
    """Working memory for schedules of at most `most_steps` steps."""

    def integers(length: int) -> Integers:
        return numpy.zeros(length, dtype=numpy.int64)

    def flags(length: int) -> Flags:
        return numpy.zeros(length, dtype=numpy.bool_)

    return Scratch(
        available=flags(values),
        touches=integers(values),
        pins=integers(values),
        needed=flags(values),
        died_at=integers(values),
        ran=flags(operators),
        stack_operator=integers(operators + 1),
        stack_group=integers(operators + 1),
        stack_position=integers(operators + 1),
        step_operator=integers(most_steps),
        step_group=integers(most_steps),
        step_again=flags(most_steps),
        step_option=integers(most_steps),
        numbers=numpy.zeros(4, dtype=numpy.float64),
    )


@numba.njit(cache=True, nogil=True)
def _group_that_writes(tables: Tables, genome: Integers, operator: int, again: bool, wanted: int) -> int:
    """The group the genome names, or the first one that writes `wanted`; -1 if there is none."""
    values, operators = tables.value_bytes.size, tables.rerunnable.size
    part = values + (operators if again else 0)
    first, end = tables.group_start[operator], tables.group_start[operator + 1]
    if first == end:
        return -1
    group = first + min(genome[part + operator], end - first - 1)
    if wanted < 0:
        return group
    for candidate in range(-1, end - first):
        at = group if candidate < 0 else first + candidate
        for i in range(tables.writes_start[at], tables.writes_start[at + 1]):
            if tables.writes[i] == wanted:
                return at
    return -1


@numba.njit(cache=True, nogil=True)
def _record(tables: Tables, scratch: Scratch, operator: int, group: int, count: int) -> int:
    """Append a step; -1 where there is no room left."""
    if count >= scratch.step_operator.size:
        return -1
    again = scratch.ran[operator]
    scratch.step_operator[count] = operator
    scratch.step_group[count] = group
    scratch.step_again[count] = again
    scratch.ran[operator] = True
    scratch.numbers[0] += tables.option_latency[tables.option_start[2 * group + (1 if again else 0)]]
    return count + 1


@numba.njit(cache=True, nogil=True)
def _run_eager(tables: Tables, genome: Integers, scratch: Scratch, value: int, count: int) -> int:
    """Run the eager readers of a value that is about to be dropped, where all they read is there."""
    values, operators = tables.value_bytes.size, tables.rerunnable.size
    for i in range(tables.reader_start[value], tables.reader_start[value + 1]):
        operator = tables.readers[i]
        if genome[values + 3 * operators + operator] == 0:
            continue
        again = scratch.ran[operator]
        if again and not tables.rerunnable[operator]:
            continue
        group = _group_that_writes(tables, genome, operator, again, -1)
        if group < 0:
            continue
        possible = True
        for j in range(tables.reads_start[group], tables.reads_start[group + 1]):
            possible = possible and scratch.available[tables.reads[j]]
        useful = False
        for j in range(tables.writes_start[group], tables.writes_start[group + 1]):
            useful = useful or not scratch.available[tables.writes[j]]
        if possible and useful:
            count = _record(tables, scratch, operator, group, count)
            if count < 0:
                return -1
            for j in range(tables.writes_start[group], tables.writes_start[group + 1]):
                scratch.available[tables.writes[j]] = True
    return count


@numba.njit(cache=True, nogil=True)
def _push(tables: Tables, scratch: Scratch, depth: int, operator: int, group: int) -> None:
    scratch.stack_operator[depth] = operator
    scratch.stack_group[depth] = group
    scratch.stack_position[depth] = 0
    for i in range(tables.reads_start[group], tables.reads_start[group + 1]):
        scratch.pins[tables.reads[i]] += 1


@numba.njit(cache=True, nogil=True)
def _run(tables: Tables, genome: Integers, scratch: Scratch, operator: int, backward: bool, count: int) -> int:
    """Run an operator after recomputing what it needs; the number of steps so far, or -1 if that is impossible."""
    values, operators = tables.value_bytes.size, tables.rerunnable.size
    group = _group_that_writes(tables, genome, operator, scratch.ran[operator], -1)
    if group < 0:
        return -1
    _push(tables, scratch, 0, operator, group)
    depth = 1
    while depth > 0:
        operator = scratch.stack_operator[depth - 1]
        group = scratch.stack_group[depth - 1]
        first = tables.reads_start[group]
        reads = tables.reads_start[group + 1] - first
        backwards = genome[values + 4 * operators + operator] != 0
        missing = -1
        position = scratch.stack_position[depth - 1]
        while position < reads:
            value = tables.reads[first + (reads - 1 - position if backwards else position)]
            if not scratch.available[value]:
                missing = value
                break
            position += 1
        scratch.stack_position[depth - 1] = position
        if missing >= 0:
            writer = tables.value_writer[missing]
            if writer < 0 or (scratch.ran[writer] and not tables.rerunnable[writer]) or depth > operators:
                return -1
            child = _group_that_writes(tables, genome, writer, scratch.ran[writer], missing)
            if child < 0:
                return -1
            _push(tables, scratch, depth, writer, child)
            depth += 1
            continue
        depth -= 1
        count = _record(tables, scratch, operator, group, count)
        if count < 0:
            return -1
        for i in range(tables.writes_start[group], tables.writes_start[group + 1]):
            value = tables.writes[i]
            if not backward or scratch.pins[value] > 0:
                scratch.available[value] = True
            else:
                bit = min(scratch.touches[value], LAST_BIT)
                scratch.available[value] = (genome[value] >> bit) & 1 != 0
        for i in range(first, first + reads):
            value = tables.reads[i]
            scratch.pins[value] -= 1
            if backward:
                scratch.touches[value] += 1
                bit = min(scratch.touches[value], LAST_BIT)
                if scratch.pins[value] == 0 and (genome[value] >> bit) & 1 == 0:
                    count = _run_eager(tables, genome, scratch, value, count)
                    if count < 0:
                        return -1
                    scratch.available[value] = False
    return count


@numba.njit(cache=True, nogil=True)
def _run_optional(
    tables: Tables, genome: Integers, scratch: Scratch, start: Integers, row: Integers, at: int, place: int, count: int
) -> int:
    """Run the optional operators whose place in the forward pass is here."""
    values, operators = tables.value_bytes.size, tables.rerunnable.size
    for i in range(start[at], start[at + 1]):
        operator = row[i]
        if genome[values + 2 * operators + operator] == place and not scratch.ran[operator]:
            count = _run(tables, genome, scratch, operator, False, count)
            if count < 0:
                return -1
    return count


@numba.njit(cache=True, nogil=True)
def generate(tables: Tables, genome: Integers, scratch: Scratch) -> int:
    """Write the steps of a genome, without options, to `scratch`; their number, or -1 if it leads nowhere.

    `numbers[0]` becomes the latency that the steps take at least.
    """
    scratch.available[:] = False
    scratch.ran[:] = False
    scratch.touches[:] = 0
    scratch.pins[:] = 0
    scratch.numbers[0] = 0.0
    count = 0
    for at in range(tables.forward.size):
        count = _run(tables, genome, scratch, tables.forward[at], False, count)
        if count >= 0:
            count = _run_optional(tables, genome, scratch, tables.early_start, tables.early, at, 1, count)
        if count >= 0:
            count = _run_optional(tables, genome, scratch, tables.late_start, tables.late, at, 2, count)
        if count < 0:
            return -1
    for value in range(tables.value_bytes.size):
        if genome[value] & 1 == 0:
            scratch.available[value] = False
    for at in range(tables.backward.size):
        count = _run(tables, genome, scratch, tables.backward[at], True, count)
        if count < 0:
            return -1
    return count


@numba.njit(cache=True, nogil=True)
def price(
    tables: Tables, scratch: Scratch, count: int, budget_bytes: int, weight: float, penalty: float, bound: float
) -> float:
    """weight · latency + penalty · overflow of the first `count` steps in `scratch`, each with its best option.

    The overflow is what steps need beyond `budget_bytes`, summed over steps. As soon as the cost is certain
    to exceed `bound`, infinity is returned; so it is where a step has no legal option. `numbers[1:]` become
    latency, overflow and peak, and `step_option` is written.
    """
    scratch.needed[:] = tables.value_held
    scratch.died_at[:] = -1
    after_bytes = tables.resident_bytes
    for value in range(tables.value_bytes.size):
        if tables.value_held[value] and scratch.available[value]:
            after_bytes += tables.value_bytes[value]
    cost = weight * scratch.numbers[0]
    latency_ms = 0.0
    overflow_bytes = 0
    peak_bytes = tables.resident_bytes
    for back in range(count):
        step = count - 1 - back
        group = scratch.step_group[step]
        again = scratch.step_again[step]
        dying_bytes = 0
        written_bytes = 0
        for i in range(tables.writes_start[group], tables.writes_start[group + 1]):
            value = tables.writes[i]
            if tables.value_held[value]:
                if not again:
                    written_bytes += tables.value_bytes[value]
            elif scratch.needed[value]:
                scratch.needed[value] = False
                written_bytes += tables.value_bytes[value]
            else:
                dying_bytes += tables.value_bytes[value]
        read_bytes = 0
        for i in range(tables.reads_start[group], tables.reads_start[group + 1]):
            value = tables.reads[i]
            if not scratch.needed[value]:
                scratch.needed[value] = True
                scratch.died_at[value] = step
                read_bytes += tables.value_bytes[value]
        base_bytes = after_bytes + dying_bytes + read_bytes
        after_bytes += read_bytes - written_bytes
        best = numpy.inf
        best_bytes = 0
        chosen = -1
        first = tables.option_start[2 * group + (1 if again else 0)]
        for option in range(first, tables.option_start[2 * group + (1 if again else 0) + 1]):
            legal = True
            for i in range(tables.overwrites_start[option], tables.overwrites_start[option + 1]):
                legal = legal and scratch.died_at[tables.overwrites[i]] == step
            if not legal:
                continue
            here_bytes = base_bytes + tables.option_extra[option]
            over_bytes = max(0, here_bytes - budget_bytes)
            price_here = weight * tables.option_latency[option] + penalty * over_bytes
            if price_here < best:
                best = price_here
                best_bytes = here_bytes
                chosen = option
            if over_bytes == 0:
                break
        if chosen < 0:
            return numpy.inf
        scratch.step_option[step] = chosen
        cost += best - weight * tables.option_latency[first]
        if cost > bound:
            return numpy.inf
        latency_ms += tables.option_latency[chosen]
        overflow_bytes += max(0, best_bytes - budget_bytes)
        peak_bytes = max(peak_bytes, best_bytes)
    scratch.numbers[1] = latency_ms
    scratch.numbers[2] = overflow_bytes
    scratch.numbers[3] = peak_bytes
    return cost


@numba.njit(cache=True, nogil=True)
def evaluate(
    tables: Tables,
    genome: Integers,
    scratch: Scratch,
    budget_bytes: int,
    weight: float,
    penalty: float,
    bound: float,
) -> float:
    """`generate`, then `price`; infinity where the genome leads nowhere."""
    count = generate(tables, genome, scratch)
    if count < 0 or weight * scratch.numbers[0] > bound:
        return numpy.inf
    return price(tables, scratch, count, budget_bytes, weight, penalty, bound)
