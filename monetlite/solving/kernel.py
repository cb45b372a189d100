"""Compiled evaluation of one choice of what to keep, what to re-run and which groups to read.

A *genome* is one flat array of integers with everything the search decides, in parts of this order:

| part | length | says |
| --- | --- | --- |
| retain | values | bit 0: the value stays at the end of the forward pass; bit i: it stays after its i-th read since |
| first | operators | which of its groups an operator's first run reads |
| again | operators | which one its re-runs read |
| place | operators | an optional operator runs 0: where it is needed; 1: once its inputs are there; 2: as they die |
| eager | operators | a forward operator also runs, where its output isn't there, 1: in the backward part as an \
input is about to be dropped; i > 1: right after entry i of the agenda |
| order | operators | 1: what is missing is recomputed last input first; 2: inputs may be dropped while it waits; 3: both |

Everything else follows. `generate` walks the agenda and recomputes what is missing right where it is read,
depth first; `price` goes back over the steps, derives from the rules of `monetlite.schedule` when each
version of each value dies, and gives each step the option with the least latency + penalty · overflow.
"""

from typing import NamedTuple

import numba
import numpy

from monetlite.solving.problem import (
    AGENDA_OPERATOR,
    AGENDA_WHEN,
    BACKWARD,
    EARLY,
    GROUP_OPTIONS,
    GROUP_OPTIONS_AGAIN,
    GROUP_READS,
    GROUP_READS_END,
    GROUP_WRITES,
    GROUP_WRITES_END,
    LATE,
    OPERATOR_GROUPS,
    OPERATOR_GROUPS_END,
    OPERATOR_RERUNNABLE,
    OPTION_EXTRA,
    OPTION_OVERWRITES,
    OPTION_OVERWRITES_END,
    VALUE_BYTES,
    VALUE_HELD,
    VALUE_READERS,
    VALUE_READERS_END,
    VALUE_WRITER,
    Floats,
    Integers,
    Tables,
)

LAST_BIT = 62
"""Reads of a value beyond this many share a bit."""

PART_FIRST, PART_AGAIN, PART_PLACE, PART_EAGER, PART_ORDER, PARTS = range(6)
"""Parts of a genome with an entry for each operator; they follow the part with an entry for each value."""

AVAILABLE, TOUCHES, PINS, NEEDED, DIED_AT = range(5)
"""Columns of `Scratch.values`. Touches count reads since the end of the forward pass; pins count waiting readers."""

STEP_OPERATOR, STEP_GROUP, STEP_AGAIN, STEP_OPTION = range(4)
"""Columns of `Scratch.steps`."""

NEVER, AS_INPUTS_DROP = range(2)
"""Values of the eager part of a genome; larger ones are entries of the agenda."""

LEAST_LATENCY, LATENCY, OVERFLOW, PEAK, STEPS = range(5)
"""Entries of `Scratch.totals`."""


entry = numba.njit(cache=True, nogil=True, error_model="numpy")
"""Compiles what Python calls."""

inner = numba.njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Compiles what only compiled code calls; the wrappers that are left out take as long as the function."""


class Scratch(NamedTuple):
    """Working memory of an evaluation; also where its results are left."""

    values: Integers
    ran: Integers
    eager_next: Integers
    """For each operator, the next one that runs eagerly after the same entry of the agenda, or -1."""
    eager_first: Integers
    """For each entry of the agenda, the first operator that runs eagerly after it, or -1."""
    stack: Integers
    """Operators that wait for their inputs: operator, group, position among its reads."""
    steps: Integers
    totals: Floats
    """Least latency of the steps in ms; latency in ms, overflow and peak in bytes with the chosen options; steps."""


def new_scratch(values: int, operators: int, most_steps: int) -> Scratch:
    """Working memory for schedules of at most `most_steps` steps."""
    return Scratch(
        values=numpy.zeros((values, 5), dtype=numpy.int64),
        ran=numpy.zeros(operators, dtype=numpy.int64),
        eager_next=numpy.zeros(operators, dtype=numpy.int64),
        eager_first=numpy.zeros(3 * operators + 1, dtype=numpy.int64),
        stack=numpy.zeros((operators + 1, 3), dtype=numpy.int64),
        steps=numpy.zeros((most_steps, 4), dtype=numpy.int64),
        totals=numpy.zeros(5, dtype=numpy.float64),
    )


@inner
def _run_eagerly(tables: Tables, genome: Integers, scratch: Scratch, operator: int, count: int) -> int:
    """Run an operator if all it reads is there and something it writes is not; the number of steps after it."""
    again = scratch.ran[operator]
    if again != 0 and tables.operators[operator, OPERATOR_RERUNNABLE] == 0:
        return count
    part = tables.values.shape[0] + (PART_AGAIN if again != 0 else PART_FIRST) * tables.operators.shape[0]
    group = tables.operators[operator, OPERATOR_GROUPS] + genome[part + operator]
    if group >= tables.operators[operator, OPERATOR_GROUPS_END] or count >= scratch.steps.shape[0]:
        return count
    for i in range(tables.groups[group, GROUP_READS], tables.groups[group, GROUP_READS_END]):
        if scratch.values[tables.lists[i], AVAILABLE] == 0:
            return count
    useful = False
    for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
        useful = useful or scratch.values[tables.lists[i], AVAILABLE] == 0
    if not useful:
        return count
    for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
        scratch.values[tables.lists[i], AVAILABLE] = 1
    scratch.steps[count, STEP_OPERATOR] = operator
    scratch.steps[count, STEP_GROUP] = group
    scratch.steps[count, STEP_AGAIN] = again
    scratch.ran[operator] = 1
    scratch.totals[LEAST_LATENCY] += tables.latency_ms[tables.groups[group, GROUP_OPTIONS + again]]
    return count + 1


@inner
def generate(tables: Tables, genome: Integers, scratch: Scratch) -> int:
    """Write the steps of a genome, without options, to `scratch`; their number, or -1 if it leads nowhere.

    One long function on purpose: a call that hands all the arrays on costs more than what it would do.
    """
    values, operators = tables.values.shape[0], tables.operators.shape[0]
    state, stack, steps, ran = scratch.values, scratch.stack, scratch.steps, scratch.ran
    groups, lists = tables.groups, tables.lists
    place, eager = values + PART_PLACE * operators, values + PART_EAGER * operators
    order = values + PART_ORDER * operators
    for value in range(values):
        state[value, AVAILABLE] = 0
        state[value, TOUCHES] = 0
        state[value, PINS] = 0
    ran[:] = 0
    scratch.totals[LEAST_LATENCY] = 0.0
    least_ms = 0.0
    count = 0
    backward = False
    at = 0
    waiting = -1
    while waiting >= 0 or at < tables.agenda.shape[0]:
        if waiting >= 0:
            entering = waiting
            waiting = scratch.eager_next[entering]
            group = tables.operators[entering, OPERATOR_GROUPS]
            useful = ran[entering] == 0 or tables.operators[entering, OPERATOR_RERUNNABLE] != 0
            there = True
            for i in range(groups[group, GROUP_WRITES], groups[group, GROUP_WRITES_END]):
                there = there and state[lists[i], AVAILABLE] != 0
            if there or not useful:
                continue
        else:
            entering = tables.agenda[at, AGENDA_OPERATOR]
            when = tables.agenda[at, AGENDA_WHEN]
            at += 1
            if (when == EARLY or when == LATE) and (genome[place + entering] != when or ran[entering] != 0):
                continue
            if when == BACKWARD:
                if not backward:
                    backward = True
                    for value in range(values):
                        if genome[value] & 1 == 0:
                            state[value, AVAILABLE] = 0
                    scratch.eager_first[:] = -1
                    for operator in range(operators):
                        after = genome[eager + operator]
                        if after > AS_INPUTS_DROP:
                            scratch.eager_next[operator] = scratch.eager_first[after]
                            scratch.eager_first[after] = operator
                waiting = scratch.eager_first[at - 1]
        wanted = -1
        depth = 0
        while True:
            if entering >= 0:
                # Put an operator on the stack: with the group the genome names, or one that writes what is wanted.
                again = ran[entering]
                first_group = tables.operators[entering, OPERATOR_GROUPS]
                last_group = tables.operators[entering, OPERATOR_GROUPS_END] - 1
                if last_group < first_group or depth > operators:
                    return -1
                if again != 0 and tables.operators[entering, OPERATOR_RERUNNABLE] == 0:
                    return -1
                named = genome[values + (PART_AGAIN if again != 0 else PART_FIRST) * operators + entering]
                group = min(first_group + named, last_group)
                if wanted >= 0:
                    candidate = first_group
                    found = False
                    while not found:
                        for i in range(groups[group, GROUP_WRITES], groups[group, GROUP_WRITES_END]):
                            found = found or lists[i] == wanted
                        if not found:
                            if candidate > last_group:
                                return -1
                            group = candidate
                            candidate += 1
                stack[depth, 0] = entering
                stack[depth, 1] = group
                stack[depth, 2] = 0
                depth += 1
                if genome[order + entering] & 2 == 0:
                    for i in range(groups[group, GROUP_READS], groups[group, GROUP_READS_END]):
                        state[lists[i], PINS] += 1
                entering = -1
            operator = stack[depth - 1, 0]
            group = stack[depth - 1, 1]
            reads, reads_end = groups[group, GROUP_READS], groups[group, GROUP_READS_END]
            backwards = genome[order + operator] & 1 != 0
            pin_late = genome[order + operator] & 2 != 0
            missing = -1
            position = stack[depth - 1, 2]
            while position < reads_end - reads:
                value = lists[reads_end - 1 - position if backwards else reads + position]
                if state[value, AVAILABLE] == 0:
                    missing = value
                    break
                if pin_late:
                    state[value, PINS] += 1
                position += 1
            stack[depth - 1, 2] = position
            if missing >= 0:
                entering = tables.values[missing, VALUE_WRITER]
                wanted = missing
                if entering < 0:
                    return -1
                continue
            depth -= 1
            if count >= steps.shape[0]:
                return -1
            again = ran[operator]
            steps[count, STEP_OPERATOR] = operator
            steps[count, STEP_GROUP] = group
            steps[count, STEP_AGAIN] = again
            ran[operator] = 1
            least_ms += tables.latency_ms[groups[group, GROUP_OPTIONS + again]]
            count += 1
            for i in range(groups[group, GROUP_WRITES], groups[group, GROUP_WRITES_END]):
                state[lists[i], AVAILABLE] = 1
            for i in range(reads, reads_end):
                value = lists[i]
                state[value, PINS] -= 1
                if backward:
                    touches = state[value, TOUCHES] + 1
                    state[value, TOUCHES] = touches
                    if state[value, PINS] == 0 and (genome[value] >> min(touches, LAST_BIT)) & 1 == 0:
                        for j in range(tables.values[value, VALUE_READERS], tables.values[value, VALUE_READERS_END]):
                            if genome[eager + lists[j]] == AS_INPUTS_DROP:
                                count = _run_eagerly(tables, genome, scratch, lists[j], count)
                        state[value, AVAILABLE] = 0
            if depth == 0:
                break
    scratch.totals[LEAST_LATENCY] += least_ms
    scratch.totals[STEPS] = count
    return count


@inner
def price(
    tables: Tables, scratch: Scratch, count: int, budget_bytes: int, weight: float, penalty: float, bound: float
) -> float:
    """weight · latency + penalty · overflow of the first `count` steps in `scratch`, each with its best option.

    The overflow is what steps need beyond `budget_bytes`, summed over steps. As soon as the cost is certain
    to exceed `bound`, infinity is returned; so it is where a step has no legal option. Latency, overflow and
    peak are left in `scratch.totals`, the options in `scratch.steps`.
    """
    state, steps = scratch.values, scratch.steps
    groups, lists, options, latency_ms = tables.groups, tables.lists, tables.options, tables.latency_ms
    after_bytes = tables.resident_bytes
    for value in range(tables.values.shape[0]):
        held = tables.values[value, VALUE_HELD]
        state[value, NEEDED] = held
        state[value, DIED_AT] = -1
        if held != 0 and state[value, AVAILABLE] != 0:
            after_bytes += tables.values[value, VALUE_BYTES]
    cost = weight * scratch.totals[LEAST_LATENCY]
    total_ms = 0.0
    overflow_bytes = 0
    peak_bytes = tables.resident_bytes
    for back in range(count):
        step = count - 1 - back
        group = steps[step, STEP_GROUP]
        again = steps[step, STEP_AGAIN]
        dying_bytes = 0
        written_bytes = 0
        for i in range(groups[group, GROUP_WRITES], groups[group, GROUP_WRITES_END]):
            value = lists[i]
            size_bytes = tables.values[value, VALUE_BYTES]
            if tables.values[value, VALUE_HELD] != 0:
                if again == 0:
                    written_bytes += size_bytes
            elif state[value, NEEDED] != 0:
                state[value, NEEDED] = 0
                written_bytes += size_bytes
            else:
                dying_bytes += size_bytes
        read_bytes = 0
        for i in range(groups[group, GROUP_READS], groups[group, GROUP_READS_END]):
            value = lists[i]
            if state[value, NEEDED] == 0:
                state[value, NEEDED] = 1
                state[value, DIED_AT] = step
                read_bytes += tables.values[value, VALUE_BYTES]
        base_bytes = after_bytes + dying_bytes + read_bytes
        after_bytes += read_bytes - written_bytes
        best = numpy.inf
        best_bytes = 0
        chosen = -1
        first = groups[group, GROUP_OPTIONS + again]
        for option in range(first, groups[group, GROUP_OPTIONS_AGAIN + again]):
            legal = True
            for i in range(options[option, OPTION_OVERWRITES], options[option, OPTION_OVERWRITES_END]):
                legal = legal and state[lists[i], DIED_AT] == step
            if legal:
                here_bytes = base_bytes + options[option, OPTION_EXTRA]
                over_bytes = max(0, here_bytes - budget_bytes)
                price_here = weight * latency_ms[option] + penalty * over_bytes
                if price_here < best:
                    best = price_here
                    best_bytes = here_bytes
                    chosen = option
                if over_bytes == 0:
                    break
        if chosen < 0:
            return numpy.inf
        steps[step, STEP_OPTION] = chosen
        cost += best - weight * latency_ms[first]
        if cost > bound:
            return numpy.inf
        total_ms += latency_ms[chosen]
        overflow_bytes += max(0, best_bytes - budget_bytes)
        peak_bytes = max(peak_bytes, best_bytes)
    scratch.totals[LATENCY] = total_ms
    scratch.totals[OVERFLOW] = overflow_bytes
    scratch.totals[PEAK] = peak_bytes
    return cost


@entry
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
    if count < 0 or weight * scratch.totals[LEAST_LATENCY] > bound:
        return numpy.inf
    return price(tables, scratch, count, budget_bytes, weight, penalty, bound)
