"""How the arrays are laid out that Python makes and compiled code (`kernel`) works on.

A *genome* is one flat array of integers with everything the search decides, in parts of this order:

| part | length | says |
| --- | --- | --- |
| retain | values | bit 0: the value stays at the end of the forward pass; bit i: after its i-th read since |
| first | operators | which of its groups an operator's first run reads |
| again | operators | which one its re-runs read |
| place | operators | where an optional operator runs first: `ON_DEMAND`, `EARLY` or `LATE` |
| eager | operators | where a forward operator runs in the backward part before its output is asked for |
| order | operators | how what is missing is recomputed: `LAST_FIRST` + `PIN_LATE` |
"""

from typing import NamedTuple, TypeAlias

import numpy
from numpy.typing import NDArray

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
"""When an entry of the agenda runs: always, in the forward part; there, if the operator is optional and its
place is this; always, in the backward part."""

ON_DEMAND = FORWARD
"""The place of an optional operator that runs where something needs it; else EARLY, once its inputs
are there, or LATE, as one of them dies in the forward part."""


class Tables(NamedTuple):
    """What compiled code reads, one row an item; the columns are named above.

    Few arrays with many columns, since handing an array to a compiled function costs time in every call.
    """

    values: Integers
    """Size in bytes; 1 if held; the operator that writes it, or -1; the forward operators that read it."""
    operators: Integers
    """Its groups; 1 if it can be run again."""
    groups: Integers
    """What it reads, ascending; what it writes; options of a first run, then of others; fastest first."""
    options: Integers
    """Workspace less overwritten bytes; what it overwrites; which implementation of the operator it is."""
    latency_ms: Floats
    """Latency of each option."""
    lists: Integers
    agenda: Integers
    """Operators in the order of a step that recomputes nothing; optional ones wherever they may run."""
    resident_bytes: int


LAST_BIT = 62
"""Reads of a value beyond this many share a bit."""

PART_FIRST, PART_AGAIN, PART_PLACE, PART_EAGER, PART_ORDER, PARTS = range(6)
"""Parts of a genome with an entry for each operator; they follow the part with an entry for each value."""

AVAILABLE, TOUCHES, PINS, NEEDED, DIED_AT = range(5)
"""Columns of `Scratch.values`. Touches: reads since the end of the forward pass; pins: waiting readers."""

STEP_OPERATOR, STEP_GROUP, STEP_AGAIN, STEP_OPTION = range(4)
"""Columns of `Scratch.steps`."""

NEVER, AS_INPUTS_DROP = range(2)
"""Values of the eager part of a genome: not at all; as an input is about to be dropped, if all are there.
Larger ones are entries of the agenda, after which the operator runs."""

LAST_FIRST, PIN_LATE = 1, 2
"""Bits of the order part: inputs are recomputed in descending order; an input may be dropped by what is run
to recompute another one."""

LEAST_LATENCY, LATENCY, OVERFLOW, PEAK, STEPS = range(5)
"""Entries of `Scratch.totals`."""

TEMPERATURE_START, TEMPERATURE_END, PENALTY_START, PENALTY_END, WEIGHT = range(5)
"""Entries of `plan`: temperatures in cost, penalties in cost per byte, the weight in cost per ms."""

BEST_LATENCY, PRESSURE, RECENT_COST = range(3)
"""Entries of `record`: the latency of the best genome that fits; what the penalty is multiplied by while
nothing has come to fit; a moving average of the cost."""

RECENT = 0.1
"""Weight of the latest cost in the moving average, which is taken every `REFRESH` iterations."""

REFRESH = 256
"""Iterations between changes of the temperature and the penalty."""


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


UNDO_LENGTH = 4096
"""Changes that one move makes at most."""

EVERYWHERE = -1
"""A retain mask that never drops the value."""

CHOICE_OPERATOR, CHOICE_PART, CHOICE_GROUPS = range(3)
"""Columns of `Moves.choices`."""


class Moves(NamedTuple):
    """Where a genome may be changed.

    `kin` lists, for each forward operator, the operators that look like it; `anchored` the backward operators
    that can do with its output (and no later one); both as slices, `x_start[i]:x_start[i + 1]`.
    """

    droppable: Integers
    is_droppable: Integers
    choices: Integers
    """Operator, part of the genome and number of groups, wherever there is more than one group."""
    optional: Integers
    eager: Integers
    """Operator, and an entry of the agenda after which it may be worth running in the backward part."""
    several: Integers
    """Operators that read more than one value."""
    forward: Integers
    look: Integers
    """For each operator, a number that operators of the same make share."""
    kin_start: Integers
    kin: Integers
    anchored_start: Integers
    anchored: Integers
