"""Compiled code: the evaluation of choices, the moves of simulated annealing, and its loop.

`generate` walks the agenda and recomputes missing values right where they are read, depth first. `price` goes back
over the steps, derives from the rules of `monetlite.core.steps` when each version of each value dies, and gives
each step the option with the least latency + penalty · overflow. `reserved_bytes` is torch's allocator for a whole
schedule.

All is in one file, since numba's cache does not notice when a compiled function of another file changes.

The *choices* are one flat array of integers with everything that annealing varies, in parts of this order:

| part | length | says |
| --- | --- | --- |
| retain | values | bit 0: the value stays at the end of the forward pass; bit i: after its i-th read since |
| first | operators | the group of an operator's first run |
| again | operators | the group of its re-runs |
| place | operators | the first run of an optional operator: `ON_DEMAND`, `EARLY` or `LATE` |
| eager | operators | a run of a forward operator in the backward part before its output is needed |
| order | operators | the order in which missing inputs are recomputed: `LAST_FIRST` + `PIN_LATE` |
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numba
import numpy
from numpy.typing import NDArray

from monetlite.allocator.allocator import PAGE_BYTES, SMALL, SMALLEST

Integers: TypeAlias = NDArray[numpy.int64]
Floats: TypeAlias = NDArray[numpy.float64]

# Columns of the tables. X and X_END are a slice of `Tables.lists` or, for groups and options, of their rows.
VALUE_BYTES, VALUE_HELD, VALUE_WRITER, VALUE_READERS, VALUE_READERS_END = range(5)
OPERATOR_GROUPS, OPERATOR_GROUPS_END, OPERATOR_RERUNNABLE = range(3)
GROUP_READS, GROUP_READS_END, GROUP_WRITES, GROUP_WRITES_END = range(4)
GROUP_OPTIONS, GROUP_OPTIONS_AGAIN, GROUP_OPTIONS_END = range(4, 7)
OPTION_EXTRA, OPTION_OVERWRITES, OPTION_OVERWRITES_END, OPTION_IMPLEMENTATION = range(4)
AGENDA_OPERATOR, AGENDA_WHEN = range(2)

FORWARD, EARLY, LATE, BACKWARD = range(4)
"""Kinds of entries of the agenda. FORWARD and BACKWARD ones always run. EARLY and LATE ones are of optional
operators, and run if that is the operator's place."""

ON_DEMAND = FORWARD
"""The place of an optional operator that runs when something needs it. EARLY: once its inputs are there. LATE: as
one of them dies in the forward part."""


class Tables(NamedTuple):
    """A problem for compiled code, one row an item; the columns are named above.

    There are few arrays with many columns, since each array that a compiled function is given costs time.
    """

    values: Integers
    """Size in bytes; 1 if held; the operator that writes it, or -1; the forward operators that read it."""
    operators: Integers
    """Slice of its groups; 1 if it can be run again."""
    groups: Integers
    """Values read, ascending; values written; options of a first run, then of later ones, each fastest first."""
    options: Integers
    """Workspace less overwritten bytes; values overwritten; index of the implementation."""
    latency_ms: Floats
    """Latency of each option."""
    lists: Integers
    agenda: Integers
    """Operators in the order of a step that recomputes nothing; optional ones at each place they may run."""
    resident_bytes: int


LAST_BIT = 62
"""Reads of a value beyond this many share a bit."""

PART_FIRST, PART_AGAIN, PART_PLACE, PART_EAGER, PART_ORDER, PARTS = range(6)
"""Parts of the choices with an entry for each operator; they follow the part with an entry for each value."""

AVAILABLE, TOUCHES, PINS, NEEDED, DIED_AT = range(5)
"""Columns of `Scratch.values`. Touches: reads since the end of the forward pass; pins: waiting readers."""

STEP_OPERATOR, STEP_GROUP, STEP_AGAIN, STEP_OPTION = range(4)
"""Columns of `Scratch.steps`."""

NEVER, AS_INPUTS_DROP = range(2)
"""Values of the eager part: not at all; as an input is about to be dropped, if all inputs are there. Larger values
are entries of the agenda, after which the operator runs."""

LAST_FIRST, PIN_LATE = 1, 2
"""Bits of the order part: inputs are recomputed in descending order; an input may be dropped while another one is
recomputed."""

LEAST_LATENCY, LATENCY, OVERFLOW, PEAK, STEPS = range(5)
"""Entries of `Scratch.totals`."""

TEMPERATURE_START, TEMPERATURE_END, PENALTY_START, PENALTY_END = range(4)
"""Entries of `schedule`: temperatures in cost, penalties in cost per byte."""

BEST_LATENCY, PRESSURE, RECENT_COST = range(3)
"""Entries of `record`: the latency of the best choices that fit; a factor on the penalty, which grows while nothing
fits; a moving average of the cost."""

RECENT = 0.1
"""Weight of the latest cost in the moving average, which is taken every `REFRESH` iterations."""

REFRESH = 256
"""Iterations between changes of the temperature and the penalty."""


class Scratch(NamedTuple):
    """Working memory of an evaluation, and its results."""

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
    """Least latency of the steps (ms); latency (ms), overflow and peak (bytes) with the options; steps."""


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


class AnnealingCost(NamedTuple):
    """The cost that a run lowers: weight · latency + penalty · overflow.

    The overflow is of allocated memory: bytes beyond `budget_bytes`, summed over steps. If `reserved`, it is of
    reserved memory: bytes of the allocator's segment beyond `room_bytes`; implementations are chosen for a peak
    of `budget_bytes`, by a penalty of `strict_penalty` ms per byte.
    """

    budget_bytes: int
    weight: float = 1.0
    reserved: bool = False
    room_bytes: int = 0
    strict_penalty: float = 1e9


UNDO_LENGTH = 4096
"""The most changes that one move makes."""

EVERYWHERE = -1
"""A retain mask that never drops the value."""

MOVE_OPERATOR, MOVE_PART, MOVE_GROUPS = range(3)
"""Columns of `Moves.groups`."""


class Moves(NamedTuple):
    """The places where choices may be changed.

    `alike` lists, for each forward operator, the operators that look like it; `anchored` the backward operators
    that read its output and no later one; both as slices, `x_start[i]:x_start[i + 1]`.
    """

    droppable: Integers
    is_droppable: Integers
    groups: Integers
    """Operator, part of the choices and number of groups, wherever there is more than one group."""
    optional: Integers
    eager: Integers
    """Operator, and an entry of the agenda after which a run in the backward part may be worth it."""
    several: Integers
    """Operators that read more than one value."""
    forward: int
    """Number of forward operators, which come first."""
    look: Integers
    """For each operator, a number that alike operators share."""
    alike_start: Integers
    alike: Integers
    anchored_start: Integers
    anchored: Integers


_Function = TypeVar("_Function", bound=Callable[..., Any])

_TRAINING_STEPS = 3
"""The most training steps that `reserved_bytes` looks at; fewer where one finds all that it needs."""
_SMALL, _NOWHERE = -1, -2
"""In place of an address: something small, or of no size, is there; nothing is."""


def _compiled(function: Any, **options: Any) -> Any:
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy", **options)(function)
    except RuntimeError:
        # No folder where numba could keep what it compiles: neither beside this file nor in the home folder.
        return numba.njit(nogil=True, error_model="numpy", **options)(function)


def entry(function: _Function) -> _Function:
    """Compile a function that Python calls."""
    compiled: _Function = _compiled(function)
    return compiled


def inner(function: _Function) -> _Function:
    """Compile a function that only compiled code calls; its wrappers would take as long to compile as itself."""
    compiled: _Function = _compiled(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return compiled


@inner
def _reads(tables: Tables, group: int) -> Integers:
    """The values that a group reads; a slice takes too long where schedules are evaluated."""
    return tables.lists[tables.groups[group, GROUP_READS] : tables.groups[group, GROUP_READS_END]]


@inner
def _writes(tables: Tables, group: int) -> Integers:
    return tables.lists[tables.groups[group, GROUP_WRITES] : tables.groups[group, GROUP_WRITES_END]]


@inner
def _run_eagerly(tables: Tables, choices: Integers, scratch: Scratch, operator: int, count: int) -> int:
    """Run an operator if all it reads is there and something it writes is not; the number of steps then."""
    again = scratch.ran[operator]
    if again != 0 and tables.operators[operator, OPERATOR_RERUNNABLE] == 0:
        return count
    part = tables.values.shape[0] + (PART_AGAIN if again != 0 else PART_FIRST) * tables.operators.shape[0]
    group = tables.operators[operator, OPERATOR_GROUPS] + choices[part + operator]
    if group >= tables.operators[operator, OPERATOR_GROUPS_END] or count >= scratch.steps.shape[0]:
        return count
    for value in _reads(tables, group):
        if scratch.values[value, AVAILABLE] == 0:
            return count
    useful = False
    for value in _writes(tables, group):
        useful = useful or scratch.values[value, AVAILABLE] == 0
    if not useful:
        return count
    for value in _writes(tables, group):
        scratch.values[value, AVAILABLE] = 1
    scratch.steps[count, STEP_OPERATOR] = operator
    scratch.steps[count, STEP_GROUP] = group
    scratch.steps[count, STEP_AGAIN] = again
    scratch.ran[operator] = 1
    scratch.totals[LEAST_LATENCY] += tables.latency_ms[tables.groups[group, GROUP_OPTIONS + again]]
    return count + 1


@inner
def generate(tables: Tables, choices: Integers, scratch: Scratch) -> int:
    """Write the steps of choices, without options, to `scratch`; their number, or -1 if they lead nowhere.

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
            if when in (EARLY, LATE) and (choices[place + entering] != when or ran[entering] != 0):
                continue
            if when == BACKWARD:
                if not backward:
                    backward = True
                    for value in range(values):
                        if choices[value] & 1 == 0:
                            state[value, AVAILABLE] = 0
                    scratch.eager_first[:] = -1
                    for operator in range(operators):
                        after = choices[eager + operator]
                        if after > AS_INPUTS_DROP:
                            scratch.eager_next[operator] = scratch.eager_first[after]
                            scratch.eager_first[after] = operator
                waiting = scratch.eager_first[at - 1]
        wanted = -1
        depth = 0
        while True:
            if entering >= 0:
                # Push an operator: with the group the choices name, or one that writes what is wanted.
                again = ran[entering]
                first_group = tables.operators[entering, OPERATOR_GROUPS]
                last_group = tables.operators[entering, OPERATOR_GROUPS_END] - 1
                if last_group < first_group or depth > operators:
                    return -1
                if again != 0 and tables.operators[entering, OPERATOR_RERUNNABLE] == 0:
                    return -1
                named = choices[values + (PART_AGAIN if again != 0 else PART_FIRST) * operators + entering]
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
                if choices[order + entering] & PIN_LATE == 0:
                    for i in range(groups[group, GROUP_READS], groups[group, GROUP_READS_END]):
                        state[lists[i], PINS] += 1
                entering = -1
            operator = stack[depth - 1, 0]
            group = stack[depth - 1, 1]
            reads, reads_end = groups[group, GROUP_READS], groups[group, GROUP_READS_END]
            backwards = choices[order + operator] & LAST_FIRST != 0
            pin_late = choices[order + operator] & PIN_LATE != 0
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
                    if state[value, PINS] == 0 and (choices[value] >> min(touches, LAST_BIT)) & 1 == 0:
                        for j in range(
                            tables.values[value, VALUE_READERS], tables.values[value, VALUE_READERS_END]
                        ):
                            if choices[eager + lists[j]] == AS_INPUTS_DROP:
                                count = _run_eagerly(tables, choices, scratch, lists[j], count)
                        state[value, AVAILABLE] = 0
            if depth == 0:
                break
    scratch.totals[LEAST_LATENCY] += least_ms
    scratch.totals[STEPS] = count
    return count


@inner
def price(
    tables: Tables,
    scratch: Scratch,
    count: int,
    budget_bytes: int,
    weight: float,
    penalty: float,
    bound: float,
) -> float:
    """weight · latency + penalty · overflow of the first `count` steps in `scratch`, with the best options.

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
    cost: float = weight * scratch.totals[LEAST_LATENCY]
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
    choices: Integers,
    scratch: Scratch,
    budget_bytes: int,
    weight: float,
    penalty: float,
    bound: float,
) -> float:
    """Cost of choices: `generate`, then `price`; infinity where they lead nowhere."""
    count = generate(tables, choices, scratch)
    if count < 0 or weight * scratch.totals[LEAST_LATENCY] > bound:
        return numpy.inf
    cost: float = price(tables, scratch, count, budget_bytes, weight, penalty, bound)
    return cost


def evaluate_interpreted(
    tables: Tables,
    choices: Integers,
    scratch: Scratch,
    budget_bytes: int,
    weight: float,
    penalty: float,
    bound: float,
) -> float:
    """`evaluate` by the interpreter: for a few evaluations before anything is compiled."""
    count = _interpreted(generate)(tables, choices, scratch)
    if count < 0 or weight * scratch.totals[LEAST_LATENCY] > bound:
        return math.inf
    return float(_interpreted(price)(tables, scratch, count, budget_bytes, weight, penalty, bound))


def _interpreted(function: Any) -> Callable[..., Any]:
    """The Python function that was compiled; with NUMBA_DISABLE_JIT it is that already."""
    plain: Callable[..., Any] = getattr(function, "py_func", function)
    return plain


@inner
def draw(random: NDArray[numpy.uint64]) -> float:
    """The next number in [0, 1) of an xorshift64* generator (Vigna, 2016)."""
    x = random[0]
    x ^= x >> numpy.uint64(12)
    x ^= x << numpy.uint64(25)
    x ^= x >> numpy.uint64(27)
    random[0] = x
    return float((x * numpy.uint64(2685821657736338717)) >> numpy.uint64(11)) / 9007199254740992.0


@inner
def _below(random: NDArray[numpy.uint64], end: int) -> int:
    return int(draw(random) * end)


@inner
def _set(choices: Integers, undo: Integers, index: int, chosen: int) -> None:
    """Change a choice, and note its value before; undo[0, 0] counts the notes."""
    count = undo[0, 0]
    if choices[index] != chosen and count + 1 < undo.shape[0]:
        undo[count + 1, 0] = index
        undo[count + 1, 1] = choices[index]
        undo[0, 0] = count + 1
        choices[index] = chosen


@inner
def take_back(choices: Integers, undo: Integers) -> None:
    """Undo a move."""
    for back in range(undo[0, 0]):
        note = undo[0, 0] - back
        choices[undo[note, 0]] = undo[note, 1]
    undo[0, 0] = 0


@inner
def propose(
    tables: Tables,
    moves: Moves,
    choices: Integers,
    scratch: Scratch,
    undo: Integers,
    random: NDArray[numpy.uint64],
    others: Integers,
) -> None:
    """Make one random move; `take_back` reverts it. `scratch` is of the last evaluation."""
    undo[0, 0] = 0
    values, operators = tables.values.shape[0], tables.operators.shape[0]
    place = values + PART_PLACE * operators
    if others.shape[0] > 0 and draw(random) < 0.04:
        # Copy a run of operators from other choices.
        length = 1 + _below(random, 2 ** (1 + _below(random, 8)))
        first = _below(random, moves.forward + length - 1) - length + 1
        origin = others[_below(random, others.shape[0])]
        for operator in range(max(0, first), min(first + length, moves.forward)):
            _copy_operator(tables, moves, choices, undo, origin, operator, operator, False)
        return
    kind = draw(random)
    if kind < 0.29 and moves.droppable.size > 0:
        # Flip one bit of when a value is kept, among those that decide something.
        value = moves.droppable[_below(random, moves.droppable.size)]
        for _ in range(3):
            if scratch.values[value, TOUCHES] == 0:
                value = moves.droppable[_below(random, moves.droppable.size)]
        bit = _below(random, max(1, min(scratch.values[value, TOUCHES], LAST_BIT)))
        _set(choices, undo, value, choices[value] ^ (1 << bit))
    elif kind < 0.48 and moves.droppable.size > 1:
        # Exchange a value that is kept for one that is not, more often a close one.
        at = _below(random, moves.droppable.size)
        reach = 12 if draw(random) < 0.6 else moves.droppable.size
        value = moves.droppable[at]
        for _ in range(12):
            other_at = at - reach + _below(random, 2 * reach + 1)
            if 0 <= other_at < moves.droppable.size:
                other = moves.droppable[other_at]
                if (choices[other] ^ choices[value]) & 1 != 0:
                    _set(choices, undo, other, choices[other] ^ 1)
                    break
        _set(choices, undo, value, choices[value] ^ 1)
    elif kind < 0.71 and moves.groups.shape[0] > 0:
        # Choose another group, and mostly keep what it reads in place of what the old one did.
        choice = _below(random, moves.groups.shape[0])
        operator, groups = moves.groups[choice, MOVE_OPERATOR], moves.groups[choice, MOVE_GROUPS]
        index = values + moves.groups[choice, MOVE_PART] * operators + operator
        old_group = tables.operators[operator, OPERATOR_GROUPS] + choices[index]
        named = (choices[index] + 1 + _below(random, groups - 1)) % groups
        _set(choices, undo, index, named)
        group = tables.operators[operator, OPERATOR_GROUPS] + named
        if draw(random) < 0.6:
            for value in _reads(tables, old_group):
                if moves.is_droppable[value] != 0 and draw(random) < 0.7:
                    _set(choices, undo, value, choices[value] & ~1)
        if draw(random) < 0.7:
            for value in _reads(tables, group):
                if moves.is_droppable[value] != 0:
                    _set(choices, undo, value, choices[value] | 1)
                    writer = tables.values[value, VALUE_WRITER]
                    if choices[place + writer] == 0:
                        _set(choices, undo, place + writer, 1 + _below(random, 2))
    elif kind < 0.77 and moves.optional.size > 0:
        operator = moves.optional[_below(random, moves.optional.size)]
        where = (choices[place + operator] + 1 + _below(random, 2)) % 3
        _set(choices, undo, place + operator, where)
        group = tables.operators[operator, OPERATOR_GROUPS]
        for value in _writes(tables, group):
            if moves.is_droppable[value] != 0 and draw(random) < 0.5:
                _set(choices, undo, value, choices[value] | 1 if where != 0 else choices[value] & ~1)
    elif kind < 0.85 and moves.alike.size > 0:
        _copy_block(tables, moves, choices, undo, random)
    elif kind < 0.92 and moves.forward > 0:
        _redo_block(tables, moves, choices, undo, random, kind < 0.885)
    elif kind < 0.94 and moves.several.size > 0:
        operator = moves.several[_below(random, moves.several.size)]
        index = values + PART_ORDER * operators + operator
        _set(choices, undo, index, (choices[index] + 1 + _below(random, 3)) % 4)
    elif kind < 0.97 and moves.forward > 0:
        operator = _below(random, moves.forward)
        index = values + PART_EAGER * operators + operator
        _set(choices, undo, index, AS_INPUTS_DROP if choices[index] == NEVER else NEVER)
    elif moves.eager.shape[0] > 0:
        # Run an operator early in the backward part, while what it reads is there; or no longer do so.
        chosen = _below(random, moves.eager.shape[0])
        operator = moves.eager[chosen, 0]
        index = values + PART_EAGER * operators + operator
        _set(choices, undo, index, moves.eager[chosen, 1] if choices[index] <= AS_INPUTS_DROP else NEVER)
        group = tables.operators[operator, OPERATOR_GROUPS]
        if draw(random) < 0.5:
            for value in _reads(tables, group):
                if moves.is_droppable[value] != 0:
                    bit = _below(random, max(1, min(scratch.values[value, TOUCHES], LAST_BIT)))
                    _set(choices, undo, value, choices[value] | (1 << bit))
            for value in _writes(tables, group):
                if moves.is_droppable[value] != 0:
                    _set(choices, undo, value, choices[value] & ~1)


@inner
def _copy_block(
    tables: Tables, moves: Moves, choices: Integers, undo: Integers, random: NDArray[numpy.uint64]
) -> None:
    """Copy the choices of a run of operators to another run that looks the same, or exchange the two's.

    Half of the time as many operators as there are from the first one to the next that looks like it: where a
    model repeats a block, all of it. An exchange leaves the memory about as it was.
    """
    target = _below(random, moves.forward)
    first = moves.alike_start[target]
    alike = moves.alike_start[target + 1] - first
    if alike == 0:
        return
    source = moves.alike[first + _below(random, alike)]
    length = 1 + _below(random, 2 ** (2 + _below(random, 5)))
    if draw(random) < 0.5:
        length = moves.forward
        for i in range(first, first + alike):
            length = min(length, abs(moves.alike[i] - target))
    exchange = draw(random) < 0.5
    for _ in range(min(length, abs(source - target))):
        if max(source, target) >= moves.forward or moves.look[source] != moves.look[target]:
            return
        _copy_operator(tables, moves, choices, undo, choices, source, target, exchange)
        source += 1
        target += 1


@inner
def _copy_operator(
    tables: Tables,
    moves: Moves,
    choices: Integers,
    undo: Integers,
    origin: Integers,
    source: int,
    target: int,
    exchange: bool,
) -> None:
    """Copy the choices in `origin` about one operator, and about the backward operators that go with it."""
    values, operators = tables.values.shape[0], tables.operators.shape[0]
    for part in range(PART_FIRST, PART_ORDER + 1):
        index = values + part * operators
        eager = max(origin[index + source], choices[index + target]) > AS_INPUTS_DROP
        if source == target or part != PART_EAGER or not eager:
            _copy_choice(choices, undo, origin, index + source, index + target, exchange)
    group = tables.operators[target, OPERATOR_GROUPS]
    shift = (
        tables.groups[tables.operators[source, OPERATOR_GROUPS], GROUP_WRITES] - tables.groups[group, GROUP_WRITES]
    )
    for i in range(tables.groups[group, GROUP_WRITES], tables.groups[group, GROUP_WRITES_END]):
        if moves.is_droppable[tables.lists[i]] != 0 and moves.is_droppable[tables.lists[i + shift]] != 0:
            _copy_choice(choices, undo, origin, tables.lists[i + shift], tables.lists[i], exchange)
    first, end = moves.anchored_start[target], moves.anchored_start[target + 1]
    offset = moves.anchored_start[source] - first
    if moves.anchored_start[source + 1] - offset == end:
        for i in range(first, end):
            to, of = moves.anchored[i], moves.anchored[i + offset]
            if moves.look[to] == moves.look[of]:
                _copy_choice(choices, undo, origin, values + of, values + to, exchange)


@inner
def _copy_choice(
    choices: Integers, undo: Integers, origin: Integers, source: int, target: int, exchange: bool
) -> None:
    before = choices[target]
    _set(choices, undo, target, origin[source])
    if exchange:
        _set(choices, undo, source, before)


@inner
def _redo_block(
    tables: Tables,
    moves: Moves,
    choices: Integers,
    undo: Integers,
    random: NDArray[numpy.uint64],
    segment: bool,
) -> None:
    """Give the values of a run of forward operators random masks, or those of a checkpointed segment."""
    first = _below(random, moves.forward)
    length = 2 + _below(random, 2 ** (2 + _below(random, 4)))
    whole = EVERYWHERE & ~1 if draw(random) < 0.8 else EVERYWHERE
    share = draw(random)
    for at in range(first, min(first + length, moves.forward)):
        group = tables.operators[at, OPERATOR_GROUPS]
        for value in _writes(tables, group):
            if moves.is_droppable[value] != 0:
                if segment:
                    _set(choices, undo, value, whole)
                else:
                    _set(choices, undo, value, _below(random, 16) << 1 | (1 if draw(random) < share else 0))


@entry
def reserved_bytes(tables: Tables, scratch: Scratch) -> int:
    """Bytes of the expandable segment for requests of more than 1 MiB, after some training steps, without a limit.

    The steps are those in `scratch`. The rules are `allocator.Allocator`'s. Without a limit nothing
    goes back, so all memory is below one end, and the rules are few: a request gets the smallest gap between blocks
    that holds it, at its beginning; where there is none, the free room at the end, and as many pages more as that
    takes. Requests of up to 1 MiB have a segment of their own, which is left out.
    """
    groups, options, lists, steps = tables.groups, tables.options, tables.lists, scratch.steps
    count, values = int(scratch.totals[STEPS]), tables.values.shape[0]
    # Values that die at each step: `dying[deaths[at]:deaths[at + 1]]`, found from the last step to the first.
    needed = tables.values[:, VALUE_HELD].copy()
    most = 0
    for at in range(count):
        most += _reads(tables, steps[at, STEP_GROUP]).size + _writes(tables, steps[at, STEP_GROUP]).size
    dying = numpy.empty(most, dtype=numpy.int64)
    deaths = numpy.zeros(count + 1, dtype=numpy.int64)
    deaths[count] = most
    left = most
    for at in range(count - 1, -1, -1):
        group = steps[at, STEP_GROUP]
        writes = _writes(tables, group)
        for value in writes:
            if not needed[value]:
                left -= 1
                dying[left] = value
        for value in writes:
            if tables.values[value, VALUE_HELD] == 0:
                needed[value] = 0
        for value in _reads(tables, group):
            if not needed[value]:
                needed[value] = 1
                left -= 1
                dying[left] = value
        deaths[at] = left
    # Blocks in use, by address.
    begins = numpy.empty(values + 1, dtype=numpy.int64)
    ends = numpy.empty(values + 1, dtype=numpy.int64)
    address = numpy.empty(values, dtype=numpy.int64)
    end = 0
    for _ in range(_TRAINING_STEPS):
        before = end
        used = 0
        address[:] = _NOWHERE
        for at in range(count):
            group, option = steps[at, STEP_GROUP], steps[at, STEP_OPTION]
            overwrites = lists[options[option, OPTION_OVERWRITES] : options[option, OPTION_OVERWRITES_END]]
            workspace_bytes = options[option, OPTION_EXTRA]
            for value in overwrites:
                workspace_bytes += tables.values[value, VALUE_BYTES]
            taken = 0
            # Its results one by one, and then its workspace.
            last = groups[group, GROUP_WRITES_END]
            for item in range(groups[group, GROUP_WRITES], last + 1):
                value = -1
                size = workspace_bytes
                if item < last:
                    value = lists[item]
                    size = tables.values[value, VALUE_BYTES]
                    if address[value] != _NOWHERE or not size:
                        continue
                    moved = False
                    for place, other in enumerate(overwrites):
                        same_size = tables.values[other, VALUE_BYTES] == size
                        if taken >> place & 1 == 0 and same_size and address[other] != _NOWHERE:
                            address[value] = address[other]
                            address[other] = _NOWHERE
                            taken |= 1 << place
                            moved = True
                            break
                    if moved:
                        continue
                elif size <= 0:
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
                    used -= 1
                    gone = used
                    while begins[gone] != address[value]:
                        gone -= 1
                    for block in range(gone, used):
                        begins[block], ends[block] = begins[block + 1], ends[block + 1]
                address[value] = _NOWHERE
        if end == before:
            break
    return end


@inner
def _cost(
    tables: Tables,
    choices: Integers,
    scratch: Scratch,
    aim: AnnealingCost,
    penalty: float,
    bound: float,
) -> float:
    """Weight · latency + penalty · overflow, of reserved memory where that is priced."""
    if not aim.reserved:
        allocated: float = evaluate(tables, choices, scratch, aim.budget_bytes, aim.weight, penalty, bound)
        return allocated
    # Implementations are chosen for the peak alone.
    if evaluate(tables, choices, scratch, aim.budget_bytes, 1.0, aim.strict_penalty, numpy.inf) == numpy.inf:
        return numpy.inf
    cost: float = aim.weight * scratch.totals[LATENCY]
    if cost > bound:
        return numpy.inf
    scratch.totals[OVERFLOW] = max(0, reserved_bytes(tables, scratch) - aim.room_bytes)
    return cost + penalty * float(scratch.totals[OVERFLOW])


@entry
def anneal(
    tables: Tables,
    moves: Moves,
    choices: Integers,
    best: Integers,
    scratch: Scratch,
    undo: Integers,
    random: NDArray[numpy.uint64],
    others: Integers,
    record: Floats,
    schedule: Floats,
    aim: AnnealingCost,
    begin: int,
    end: int,
    total: int,
    stop_when_fits: bool,
) -> bool:
    """Do iterations `begin` to `end` of a run of `total`; True if it stopped since something fits.

    Args:
        tables, moves: of the problem.
        choices: of the run, changed in place. best: the fastest that fit, replaced where a faster one is found.
        scratch, undo, random: working memory, and the state of the random numbers.
        others: choices that moves may copy from, one a row.
        record, schedule: their entries are named above.
        aim: the cost to lower.
        stop_when_fits: stop at the first choices without overflow.
    """
    temperature = schedule[TEMPERATURE_START]
    penalty = schedule[PENALTY_START]
    cost = numpy.inf
    for iteration in range(begin, end):
        if (iteration - begin) % REFRESH == 0:
            share = iteration / total
            temperature = (
                schedule[TEMPERATURE_START] * (schedule[TEMPERATURE_END] / schedule[TEMPERATURE_START]) ** share
            )
            penalty = schedule[PENALTY_START] * (schedule[PENALTY_END] / schedule[PENALTY_START]) ** min(
                1.0, share / 0.85
            )
            penalty *= record[PRESSURE]
            cost = _cost(tables, choices, scratch, aim, penalty, numpy.inf)
            if cost < numpy.inf:
                if scratch.totals[OVERFLOW] > 0 and share > 0.6:
                    record[PRESSURE] *= 1.05
                elif scratch.totals[OVERFLOW] == 0:
                    record[PRESSURE] = max(1.0, record[PRESSURE] / 1.05)
                recent = record[RECENT_COST]
                record[RECENT_COST] = cost if recent == numpy.inf else recent + RECENT * (cost - recent)
        propose(tables, moves, choices, scratch, undo, random, others)
        if undo[0, 0] == 0:
            continue
        bound = cost - temperature * math.log(1.0 - draw(random))
        after = _cost(tables, choices, scratch, aim, penalty, bound)
        if after > bound or after == numpy.inf:
            take_back(choices, undo)
            continue
        cost = after
        if scratch.totals[OVERFLOW] == 0 and scratch.totals[LATENCY] < record[BEST_LATENCY]:
            record[BEST_LATENCY] = scratch.totals[LATENCY]
            # A loop: numba takes three seconds to compile the error for arrays of other lengths.
            for index in range(choices.size):
                best[index] = choices[index]
            if stop_when_fits:
                return True
    return False


def cache_folder() -> Path | None:
    """The folder of numba's cache; None if it keeps nothing."""
    statistics = getattr(anneal, "stats", None)
    return None if statistics is None or statistics.cache_path is None else Path(statistics.cache_path)
