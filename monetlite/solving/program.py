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
running sum keeps memory rows sparse.

The bound. The solver's dual bound D holds for every legal schedule *of the template*: set `run` as the schedule
runs, and `keep` to 1 exactly where `simulate` has the value live. Then `total` is what `simulate` has live before
the slot, and each row follows from one of its rules: what is read is live; what is live was kept or written; what
is overwritten is dead afterwards; a held value stays; a step that runs fits the budget. A slot that does not run
only says that what is live exceeds the budget by no more than the largest saving of any step (`_slack_bytes`),
which is true before every step. An optional operator that writes a held value distinguishes its first run from
later ones, which find the value there.

A schedule outside the full template has a stage with more than `passes` runs, since `passes` runs fit the template
in any order, one in each pass. Useless runs left out, that costs at least every main operator once and `passes + 1`
of the cheapest runs, B. So min(D, B) bounds every legal schedule (`_outside_ms`), and a schedule that reaches it is
optimal. A dual bound that was found under an incumbent's cutoff says no more than that nothing is faster than the
cutoff. A template with fewer candidates, or a budget lowered for the solver's tolerances, gives no bound at all.
"""

import importlib.util
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from monetlite.core.errors import IllegalSchedule, SolverError, first_line
from monetlite.core.schedule import Status
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.solving.bounding.zero_one import ZeroOneProgram, rounded_down
from monetlite.solving.clock import now, on_the_wall
from monetlite.solving.incumbent import Solution
from monetlite.solving.problem import Option, Problem

_TOLERANCE = 3e-6
"""Solvers accept rows violated by 1e-6; where that exceeds the budget, this much is held back."""


class Slot(NamedTuple):
    """A place for one run of an operator; a `main` one must run."""

    operator: int
    main: bool


def full_template(problem: Problem, passes: int = 1) -> list[Slot]:
    """Every main operator, and before each of them every candidate that could be of use there."""
    slots: list[Slot] = []
    operators = problem.graph.operators
    for at, main in enumerate(problem.main):
        useful = problem.useful_before(at)
        candidates = [
            operator
            for operator in problem.extra
            if any(not useful.isdisjoint(option.writes) for option in problem.options[operator])
            and (operators[operator].optional or at >= problem.forward_main)
        ]
        for _ in range(passes):
            slots.extend(Slot(operator, main=False) for operator in candidates)
        slots.append(Slot(main, main=True))
    return slots


def check_solver(solver: str) -> None:
    """Refuse a solver that is not installed.

    Raises:
        SolverError: says what to do.
    """
    if solver == "GUROBI" and importlib.util.find_spec("gurobipy") is None:
        raise SolverError("the GUROBI solver is not installed; pip install gurobipy, or choose SCIP or HIGHS")


class _TemplateProgram:
    """The columns and rows for a template."""

    def __init__(self, problem: Problem, budget_bytes: int, slots: list[Slot]) -> None:
        self.problem = problem
        self.slots = slots
        self.rows = ZeroOneProgram()
        self.boolean: list[int] = []
        self.upper: list[float] = []
        self.scale = 1.0 / max(1, *problem.size_bytes, 1)
        self.room = float(budget_bytes - problem.resident_bytes)
        self.keep: dict[int, int] = {}  # the column of each value's present keep; absent: not in memory
        # runs[slot]: its choices, each with its column and whether it is the operator's first run.
        self.runs: list[list[tuple[Option, int, bool]]] = []
        self.firsts: dict[int, list[int]] = {}
        self._build()

    def _column(self, cost_ms: float = 0.0, *, boolean: bool = True, upper: float = 1.0) -> int:
        column = self.rows.column(cost_ms)
        if boolean:
            self.boolean.append(column)
        self.upper.append(upper)
        return column

    def _build(self) -> None:
        last_touch = self._last_touches()
        everything = (sum(self.problem.size_bytes) + 1) * self.scale
        slack = self._slack_bytes() * self.scale
        total = self._column(boolean=False, upper=0.0)
        for at, slot in enumerate(self.slots):
            choices = self._choices(slot)
            self.runs.append(choices)
            columns = [(column, 1.0) for _, column, _ in choices]
            self.rows.row(columns, 1.0, equal=slot.main)
            memory = [(total, 1.0)]
            for option, column, first in choices:
                own = self._own_bytes(option, first) * self.scale
                memory.append((column, own if slot.main else own + slack))
            self.rows.row(memory, self.room * self.scale + (0.0 if slot.main else slack))
            change = self._touch(at, choices, last_touch)
            following = self._column(boolean=False, upper=everything)
            self.rows.row([(following, 1.0), (total, -1.0), *change], 0.0, equal=True)
            total = following

    def _last_touches(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for at, slot in enumerate(self.slots):
            for option in self.problem.options[slot.operator]:
                for value in option.reads:
                    last[value] = at
        return last

    def _own_bytes(self, option: Option, first: bool) -> int:
        """Memory of a step beyond what is live before it, at the least.

        A held value may be there already, since an earlier run.
        """
        extra_bytes = option.first_extra_bytes if first else option.again_extra_bytes
        return extra_bytes + sum(
            self.problem.size_bytes[value] for value in option.writes if first or not self.problem.held[value]
        )

    def _slack_bytes(self) -> int:
        """The largest saving of a step: before it, live values may exceed the budget by so much."""
        least = 0
        for slot in self.slots:
            for option in self.problem.options[slot.operator]:
                least = min(least, self._own_bytes(option, True), self._own_bytes(option, False))
        return -least

    def _choices(self, slot: Slot) -> list[tuple[Option, int, bool]]:
        problem, operator = self.problem, slot.operator
        options = problem.options[operator]
        if slot.main:
            return [(option, self._column(option.first_ms), True) for option in options]
        if operator in problem.position:
            return [(option, self._column(option.again_ms), False) for option in options]
        # An optional operator: its first run may cost something else than the others, and comes before them.
        differs = not problem.graph.operators[operator].rerunnable or any(
            option.rerun_differs or any(problem.held[value] for value in option.writes) for option in options
        )
        first = [(option, self._column(option.first_ms), True) for option in options]
        if not differs:
            return first
        earlier = list(self.firsts.get(operator, []))
        again: list[tuple[Option, int, bool]] = []
        if earlier and problem.graph.operators[operator].rerunnable:
            again = [(option, self._column(option.again_ms), False) for option in options]
            self.rows.row([(c, 1.0) for _, c, _ in again] + [(c, -1.0) for c in earlier], 0.0)
        if earlier:
            self.rows.row([(c, 1.0) for c in earlier] + [(c, 1.0) for _, c, _ in first], 1.0)
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
            weight = self.problem.size_bytes[value] * self.scale
            if reading:
                self.rows.row(reading + had, 0.0)
            if before is not None:
                change.append((before, weight))
                del self.keep[value]
            held = self.problem.held[value]
            if held or last_touch.get(value, -1) > at:
                after = self._column()
                self.keep[value] = after
                change.append((after, -weight))
                self.rows.row([(after, 1.0), *had, *writing], 0.0)
                if taking:
                    self.rows.row([(after, 1.0), *taking], 1.0)
                if held:
                    for column, _ in had:
                        self.rows.row([(column, 1.0), (after, -1.0)], 0.0)
                    if writing:
                        self.rows.row([*((column, 1.0) for column, _ in writing), (after, -1.0)], 0.0)
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
    problem: Problem,
    budget_bytes: int,
    *,
    seconds: float,
    passes: int = 1,
    cutoff_ms: float = math.inf,
    solver: str = "SCIP",
) -> Solution:
    """Solve the program with the full template.

    Args:
        problem: the graph and its costs, reduced.
        budget_bytes: no step may need more.
        seconds: the solver's time limit.
        passes: number of times that each stage offers its candidates.
        cutoff_ms: only schedules at least as fast are of interest.
        solver: SCIP, HIGHS or GUROBI, as cvxpy knows them.

    Returns:
        The best schedule of the template, checked by `simulate`, and a bound on every legal schedule. The status is
        about the template: optimal or infeasible among its schedules at least as fast as the cutoff.

    Raises:
        SolverError: the solver is not installed, or failed.
    """
    check_solver(solver)
    if not problem.runnable:
        return Solution(status=Status.INFEASIBLE, lower_bound_ms=math.inf)
    deadline = now() + seconds
    slots = full_template(problem, passes)
    room = max(0, budget_bytes - problem.resident_bytes)
    bound_ms = 0.0
    status = Status.TIMEOUT
    for margin in (0.0, _TOLERANCE):
        program = _TemplateProgram(problem, budget_bytes - math.ceil(margin * room), slots)
        status, values, dual_ms = solve_rows(
            program.rows, program.boolean, program.upper, solver, deadline, cutoff_ms=cutoff_ms
        )
        if margin == 0:
            inside_ms = rounded_down(min(dual_ms, cutoff_ms), program.rows.unit_ms(cutoff_ms))
            bound_ms = min(inside_ms, _outside_ms(problem, passes))
        if values is None:
            break
        steps = program.steps(values)
        try:
            timeline = simulate(problem.profile, steps, budget_bytes)
        except IllegalSchedule:
            status = Status.TIMEOUT
            continue
        return Solution(
            status=Status.FEASIBLE if margin > 0 else status,
            steps=steps,
            latency_ms=timeline.latency_ms,
            peak_bytes=timeline.peak_bytes,
            lower_bound_ms=min(bound_ms, timeline.latency_ms),
        )
    return Solution(status=status, lower_bound_ms=bound_ms)


def _outside_ms(problem: Problem, passes: int) -> float:
    """The least latency of a schedule with more runs in a stage than the full template holds in any order."""
    least_ms = min((problem.least_ms(operator) for operator in problem.extra), default=math.inf)
    return problem.least_latency_ms + (passes + 1) * least_ms


def solve_rows(
    rows: ZeroOneProgram,
    boolean: list[int],
    upper: list[float],
    solver: str,
    deadline: float,
    *,
    cutoff_ms: float = math.inf,
) -> tuple[Status, npt.NDArray[np.float64] | None, float]:
    """State rows in cvxpy and solve them: the status, the columns and the dual bound in ms, less the constant.

    Args:
        rows: the program. boolean: its columns that are 0 or 1; the others are continuous. upper: of every column.
        solver: as cvxpy knows it. deadline: of `clock.now`. cutoff_ms: the most that is of interest.
    """
    import cvxpy

    unit_ms, useful = rows.unit_ms(cutoff_ms), rows.useful(cutoff_ms)
    cost = np.where(useful, rows.cost_ms, 0.0) / unit_ms
    x = cvxpy.Variable(cost.size, boolean=(np.array(boolean),))
    matrix, limit, equal = rows.matrix(), np.array(rows.limit), np.array(rows.equal)
    constraints = [
        matrix[~equal] @ x <= limit[~equal],
        matrix[equal] @ x == limit[equal],
        x >= 0,
        x <= np.where(useful, upper, 0.0),
    ]
    if math.isfinite(cutoff_ms):
        constraints.append(cost @ x <= cutoff_ms / unit_ms * (1 + 1e-7))
    stated = cvxpy.Problem(cvxpy.Minimize(cost @ x), constraints)
    began = now()
    data, chain, inverse = stated.get_problem_data(solver)
    # Handing the data on to the solver takes longer than compiling it; the limit does not count it.
    seconds = on_the_wall(max(0.1, deadline - now() - 2 * (now() - began)))
    limits: dict[str, dict[str, Any]] = {
        "SCIP": {"scip_params": {"limits/time": seconds, "limits/gap": 0.0}},
        "HIGHS": {"time_limit": seconds, "mip_rel_gap": 0.0, "threads": 1},
        "GUROBI": {"TimeLimit": seconds, "MIPGap": 0.0},
    }
    try:
        # The solver's own result has the dual bound, also where there is no solution.
        raw = chain.solve_via_data(stated, data, False, False, limits[solver])
    except cvxpy.error.SolverError as error:
        raise SolverError(f"{solver} failed: {first_line(error)}") from error
    if solver == "SCIP" and raw["model"].getStatus() == "userinterrupt":
        raise KeyboardInterrupt  # Python was not told
    bound_ms = unit_ms * _dual_bound(solver, raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "may be inaccurate": the status says so, and simulate checks
            stated.unpack_results(raw, chain, inverse)
    except cvxpy.error.SolverError:
        # What cvxpy raises when the time is up before anything is found.
        return Status.TIMEOUT, None, bound_ms
    if stated.status in (cvxpy.INFEASIBLE, cvxpy.INFEASIBLE_INACCURATE):
        return Status.INFEASIBLE, None, math.inf
    if x.value is None:
        return Status.TIMEOUT, None, bound_ms
    status = Status.OPTIMAL if stated.status == cvxpy.OPTIMAL else Status.FEASIBLE
    return status, np.asarray(x.value, dtype=np.float64), bound_ms


def _dual_bound(solver: str, raw: Any) -> float:
    """The dual bound that a solver reports for its minimisation, in the units of its objective."""
    if solver == "SCIP":
        return float(raw["model"].getDualbound())
    if solver == "HIGHS":
        return float(raw["info"].mip_dual_bound)
    return float(raw["model"].ObjBound)
