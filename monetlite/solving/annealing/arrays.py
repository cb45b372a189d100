"""Layout of the arrays that Python makes and compiled code (`compiled`) works on.

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

TEMPERATURE_START, TEMPERATURE_END, PENALTY_START, PENALTY_END, WEIGHT, STRICT_PENALTY = range(6)
"""Entries of `schedule`: temperatures in cost, penalties in cost per byte, the weight in cost per ms; and the
penalty that implementations are chosen by in runs that price reserved memory, in ms per byte."""

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
    forward: Integers
    look: Integers
    """For each operator, a number that alike operators share."""
    alike_start: Integers
    alike: Integers
    anchored_start: Integers
    anchored: Integers


class Requests(NamedTuple):
    """The memory that each implementation asks for; implementations are numbered over the whole graph.

    `lists[starts[i, 0]:starts[i, 1]]` are the values that implementation i reads, then up to `starts[i, 2]` those
    it writes, then up to `starts[i, 3]` those it overwrites. `workspaces[i]` is of its operator's first run and of
    later ones. All sizes are in bytes.
    """

    first: Integers
    """For each operator, its first implementation's number."""
    starts: Integers
    lists: Integers
    workspaces: Integers
    sizes: Integers
    held: Integers


def _none(*shape: int) -> Integers:
    return numpy.zeros(shape, dtype=numpy.int64)


NO_REQUESTS = Requests(_none(0), _none(0, 4), _none(0), _none(0, 2), _none(0), _none(0))
"""For a cost that has no reserved memory."""
