"""MONeT's problem as a boolean program over a *template* of slots, stated in cvxpy.

A template is a sequence of slots: every main operator once, and between them candidates, operators that may
run there or not. The full template offers every useful candidate in every stage, in graph order, `passes`
times over, so that re-runs in another order, or twice within a stage, can be stated.

| here | is | MONeT (Shah et al., ICLR 2021), Checkmate (Jain et al., MLSys 2020) |
| --- | --- | --- |
| `run[slot, option]` | the slot runs, with that implementation | r^k_i with δ^k_{i,l} (eq. 9); R |
| `keep[value, touch]` | kept from one slot that touches the value to the next | s^k_i (eq. 4, 5); S |
| `total[slot]` | bytes live when the slot begins, as a running sum | m^k, m̂^k (eq. 6, 7); U |
| memory row | `total + outputs + workspace − overwritten ≤ budget`, where the slot runs | eq. 8, 10 |

MONeT has a variable for every (stage, value); here a value has one only between slots that touch it, and the
running sum keeps memory rows sparse. A template can't offer unboundedly many re-runs, so what its dual bound
bounds is the template's schedules and not all of them: it is handed on only where `complete` shows that no
faster schedule lies outside.
"""

import importlib.util
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule, SolverError
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.options import Option, Outline
from monetlite.solving.templates import Slot, full_template

SOLVERS = ("SCIP", "HIGHS", "GUROBI")
_PACKAGES = {"SCIP": "pyscipopt", "HIGHS": "highspy", "GUROBI": "gurobipy"}
_TOLERANCE = 3e-6
"""Solvers accept rows violated by 1e-6; where that exceeds the budget, this much is held back."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What the program found.

    Attributes:
        status: optimal or infeasible *among the template's schedules*, feasible, or timeout.
        steps, latency_ms: the best schedule, checked by `simulate`; None and infinite if there is none.
        lower_bound_ms: a bound on every legal schedule, where the program gives one; else None.
        columns, rows: the size of the program.
    """

    status: Status
    steps: tuple[Step, ...] | None
    latency_ms: float
    lower_bound_ms: float | None
    columns: int
    rows: int


def check_solver(solver: str) -> str:
    """The solver's name as cvxpy knows it.

    Raises:
        SolverError: it is unknown, or not installed.
    """
    name = solver.upper()
    if name not in SOLVERS:
        raise SolverError(f"unknown solver {solver!r}; choose one of {', '.join(SOLVERS)}")
    installed = [other for other in SOLVERS if importlib.util.find_spec(_PACKAGES[other]) is not None]
    if name not in installed:
        choice = f", or choose {' or '.join(installed)}" if installed else ""
        raise SolverError(f"the {name} solver is not installed; pip install {_PACKAGES[name]}{choice}")
    return name


@dataclass
class _Rows:
    """Rows of a sparse system, as coordinates."""

    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    entry: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], right: float) -> None:
        for column, entry in terms:
            self.row.append(len(self.right))
            self.column.append(column)
            self.entry.append(entry)
        self.right.append(right)

    def matrix(self, columns: int) -> sparse.csr_array:
        return sparse.csr_array((self.entry, (self.row, self.column)), shape=(len(self.right), columns))


class _Program:
    """The columns and rows for a template."""

    def __init__(self, outline: Outline, budget_bytes: int, slots: list[Slot]) -> None:
        self.outline = outline
        self.slots = slots
        self.cost_ms: list[float] = []
        self.boolean: list[int] = []
        self.upper: list[float] = []
        self.equal = _Rows()
        self.less = _Rows()
        self.scale = 1.0 / max(1, *outline.size_bytes, 1)
        self.room = float(budget_bytes - outline.resident_bytes)
        self.keep: dict[int, int] = {}  # the column of each value's present keep; absent: not in memory
        # runs[slot]: its choices, each with its column and whether it is the operator's first run.
        self.runs: list[list[tuple[Option, int, bool]]] = []
        self.firsts: dict[int, list[int]] = {}
        self._build()

    def _column(self, cost_ms: float = 0.0, *, boolean: bool = True, upper: float = 1.0) -> int:
        if boolean:
            self.boolean.append(len(self.cost_ms))
        self.cost_ms.append(cost_ms)
        self.upper.append(upper)
        return len(self.cost_ms) - 1

    def _build(self) -> None:
        last_touch = self._last_touches()
        everything = (sum(self.outline.size_bytes) + 1) * self.scale
        slack = self._slack_bytes() * self.scale
        total = self._column(boolean=False, upper=0.0)
        for at, slot in enumerate(self.slots):
            choices = self._choices(slot)
            self.runs.append(choices)
            columns = [(column, 1.0) for _, column, _ in choices]
            if slot.main:
                self.equal.add(columns, 1.0)
            else:
                self.less.add(columns, 1.0)
            memory = [(total, 1.0)]
            for option, column, first in choices:
                own = sum(self._new_bytes(value, slot) for value in option.writes)
                own += option.first_extra_bytes if first else option.again_extra_bytes
                optional_slack = 0.0 if slot.main else slack
                memory.append((column, own * self.scale + optional_slack))
            self.less.add(memory, self.room * self.scale + (0.0 if slot.main else slack))
            change = self._touch(at, choices, last_touch)
            following = self._column(boolean=False, upper=everything)
            self.equal.add([(following, 1.0), (total, -1.0), *change], 0.0)
            total = following

    def _last_touches(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for at, slot in enumerate(self.slots):
            for option in self.outline.options[slot.operator]:
                for value in option.reads:
                    last[value] = at
        return last

    def _slack_bytes(self) -> int:
        """By how much what is live may exceed the budget before a step that needs less than nothing more."""
        least = 0
        for slot in self.slots:
            for option in self.outline.options[slot.operator]:
                new = sum(self.outline.size_bytes[v] for v in option.writes if slot.main)
                least = min(least, new + option.first_extra_bytes, new + option.again_extra_bytes)
        return -least

    def _new_bytes(self, value: int, slot: Slot) -> int:
        """A held value stays through re-runs of the main operator that wrote it."""
        again = not slot.main and slot.operator in self.outline.position
        return 0 if self.outline.held[value] and again else self.outline.size_bytes[value]

    def _choices(self, slot: Slot) -> list[tuple[Option, int, bool]]:
        outline, operator = self.outline, slot.operator
        options = outline.options[operator]
        if slot.main:
            return [(option, self._column(option.first_ms), True) for option in options]
        if operator in outline.position:
            return [(option, self._column(option.again_ms), False) for option in options]
        # An optional operator: its first run may cost something else than the others, and comes before them.
        differs = not outline.profile.graph.operators[operator].rerunnable or any(
            option.rerun_differs for option in options
        )
        first = [(option, self._column(option.first_ms), True) for option in options]
        if not differs:
            return first
        earlier = list(self.firsts.get(operator, []))
        again: list[tuple[Option, int, bool]] = []
        if earlier and outline.profile.graph.operators[operator].rerunnable:
            again = [(option, self._column(option.again_ms), False) for option in options]
            self.less.add([(c, 1.0) for _, c, _ in again] + [(c, -1.0) for c in earlier], 0.0)
        if earlier:
            self.less.add([(c, 1.0) for c in earlier] + [(c, 1.0) for _, c, _ in first], 1.0)
        self.firsts.setdefault(operator, []).extend(column for _, column, _ in first)
        return first + again

    def _touch(
        self, at: int, choices: list[tuple[Option, int, bool]], last_touch: dict[int, int]
    ) -> list[tuple[int, float]]:
        """Rows of the values that a slot touches; returns minus the change of live bytes, scaled."""
        change: list[tuple[int, float]] = []
        touched = {value for option, _, _ in choices for value in option.reads | option.writes}
        for value in sorted(touched):
            reading = [(column, 1.0) for option, column, _ in choices if value in option.reads]
            writing = [(column, -1.0) for option, column, _ in choices if value in option.writes]
            taking = [(column, 1.0) for option, column, _ in choices if value in option.overwrites]
            before = self.keep.get(value)
            had = [] if before is None else [(before, -1.0)]
            weight = self.outline.size_bytes[value] * self.scale
            if reading:
                self.less.add(reading + had, 0.0)
            if before is not None:
                change.append((before, weight))
                del self.keep[value]
            held = self.outline.held[value]
            if held or last_touch.get(value, -1) > at:
                after = self._column()
                self.keep[value] = after
                change.append((after, -weight))
                self.less.add([(after, 1.0), *had, *writing], 0.0)
                if taking:
                    self.less.add([(after, 1.0), *taking], 1.0)
                if held:
                    for column, _ in had:
                        self.less.add([(column, 1.0), (after, -1.0)], 0.0)
                    if writing:
                        self.less.add([*((column, 1.0) for column, _ in writing), (after, -1.0)], 0.0)
        return change

    def steps(self, values: npt.NDArray[np.float64]) -> tuple[Step, ...]:
        """The runs that a solution chose, in order."""
        found: list[Step] = []
        for slot, choices in zip(self.slots, self.runs, strict=True):
            chosen = max(choices, key=lambda choice: float(values[choice[1]]), default=None)
            if chosen is not None and values[chosen[1]] > 0.5:
                found.append((slot.operator, chosen[0].choice))
        return tuple(found)


def solve_program(
    profile: Profile,
    budget_bytes: int,
    *,
    seconds: float,
    passes: int = 1,
    cutoff_ms: float = math.inf,
    solver: str = "SCIP",
) -> ProgramResult:
    """Solve the program with the full template.

    Args:
        profile: the graph and its costs.
        budget_bytes: no step may need more.
        seconds: the solver's time limit.
        passes: how often each stage offers its candidates.
        cutoff_ms: only schedules at least as fast are of interest.
        solver: SCIP, HIGHS or GUROBI.

    Raises:
        SolverError: the solver is unknown, not installed, or failed.
    """
    outline = Outline.of(profile)
    if not outline.runnable:
        return ProgramResult(
            status=Status.INFEASIBLE, steps=None, latency_ms=math.inf, lower_bound_ms=None, columns=0, rows=0
        )
    slots = full_template(outline, passes)
    result = _solve(outline, budget_bytes, slots, seconds=seconds, cutoff_ms=cutoff_ms, solver=solver)
    if result.status is Status.OPTIMAL and _complete(outline, passes, result.latency_ms):
        return ProgramResult(
            status=result.status,
            steps=result.steps,
            latency_ms=result.latency_ms,
            lower_bound_ms=result.latency_ms * (1 - 2e-6),
            columns=result.columns,
            rows=result.rows,
        )
    return result


def _complete(outline: Outline, passes: int, latency_ms: float) -> bool:
    """Whether no faster schedule can have more re-runs in a stage than the passes can hold, in any order."""
    spare_ms = latency_ms - math.fsum(outline.main_least_ms)
    least_ms = min((outline.least_ms(operator) for operator in outline.extra), default=math.inf)
    return least_ms > 0 and spare_ms / least_ms < passes + 1


def _solve(
    outline: Outline, budget_bytes: int, slots: list[Slot], *, seconds: float, cutoff_ms: float, solver: str
) -> ProgramResult:
    deadline = time.monotonic() + seconds
    name = check_solver(solver)
    for margin in (0.0, _TOLERANCE):
        room = budget_bytes - outline.resident_bytes
        program = _Program(outline, budget_bytes - math.ceil(margin * max(room, 0)), slots)
        status, values = _call(program, name, deadline, cutoff_ms)
        columns, rows = len(program.cost_ms), len(program.less.right) + len(program.equal.right)
        if values is None:
            break
        steps = program.steps(values)
        try:
            latency_ms = simulate(outline.profile, steps, budget_bytes).latency_ms
        except IllegalSchedule:
            status = Status.TIMEOUT
            continue
        if margin > 0 and status is Status.OPTIMAL:
            status = Status.FEASIBLE
        return ProgramResult(
            status=status, steps=steps, latency_ms=latency_ms, lower_bound_ms=None, columns=columns, rows=rows
        )
    return ProgramResult(
        status=status, steps=None, latency_ms=math.inf, lower_bound_ms=None, columns=columns, rows=rows
    )


def _call(
    program: _Program, solver: str, deadline: float, cutoff_ms: float
) -> tuple[Status, npt.NDArray[np.float64] | None]:
    """State the program in cvxpy and solve it; the status is about the program."""
    import cvxpy

    columns = len(program.cost_ms)
    cost_ms = np.array(program.cost_ms)
    x = cvxpy.Variable(columns, boolean=(np.array(program.boolean),))
    constraints = [
        program.less.matrix(columns) @ x <= np.array(program.less.right),
        program.equal.matrix(columns) @ x == np.array(program.equal.right),
        x >= 0,
        x <= np.array(program.upper),
    ]
    if math.isfinite(cutoff_ms):
        constraints.append(cost_ms @ x <= cutoff_ms * (1 + 1e-7))
    problem = cvxpy.Problem(cvxpy.Minimize(cost_ms @ x), constraints)
    began = time.monotonic()
    problem.get_problem_data(solver)  # remembered by cvxpy: what follows compiles nothing anew
    # Handing the data on to the solver takes longer than compiling it; the limit does not count it.
    seconds = max(0.1, deadline - time.monotonic() - 2 * (time.monotonic() - began))
    limits: dict[str, dict[str, Any]] = {
        "SCIP": {"scip_params": {"limits/time": seconds}},
        "HIGHS": {"time_limit": seconds, "mip_rel_gap": 0.0},
        "GUROBI": {"TimeLimit": seconds, "MIPGap": 0.0},
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "may be inaccurate": the status says so, and simulate checks
            problem.solve(solver=solver, **limits[solver])  # type: ignore[no-untyped-call]  # cvxpy has no types for it
    except cvxpy.error.SolverError:
        # What cvxpy raises when the time is up before anything is found.
        return Status.TIMEOUT, None
    if problem.status == cvxpy.OPTIMAL:
        return Status.OPTIMAL, np.asarray(x.value, dtype=np.float64)
    if problem.status in (cvxpy.INFEASIBLE, cvxpy.INFEASIBLE_INACCURATE):
        return Status.INFEASIBLE, None
    if problem.status in (cvxpy.OPTIMAL_INACCURATE, cvxpy.USER_LIMIT) and x.value is not None:
        return Status.FEASIBLE, np.asarray(x.value, dtype=np.float64)
    return Status.TIMEOUT, None
