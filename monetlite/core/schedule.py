"""A schedule of a training step, and `simulate`: the one definition of its memory, latency and legality.

The rules (those of the solver instances that MONeT's authors' measurements were converted to):

1. every forward operator that is not optional runs once, in order; optional ones anywhere after what they
   read;
2. then every backward operator once, in order, with forward operators that can be re-run anywhere between.

A step needs everything it reads in memory. A version of a value dies at its last read before it is next
written; what is held to the end of the step (outputs, parameter gradients) never dies. A step's memory is
what is live, plus its new outputs, plus its workspace, less what it overwrites; an overwritten value must
not be read later.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from os import PathLike
from typing import TypeAlias

from monetlite.core.choices import Choices
from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.graph import AS_TRACED, OperatorGraph, Phase, TensorSpec
from monetlite.core.source import ModelSource
from monetlite.core.units import format_bytes

Step: TypeAlias = tuple[int, int]
"""(operator, index of the implementation it runs with)."""


class Status(StrEnum):
    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIMEOUT = "timeout"
    """Time ran out with nothing found, and infeasibility is not proven."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What to run, in which order and how, and what the solver promises of it.

    Attributes:
        name: of the model; fingerprint: of the operator graph it was solved for; structure: the same without
            sizes, which another batch size of the model shares; operators: how many it has.
        inputs: layouts of the input tensors it was solved for.
        choices: what it chooses, by operator name. `steps(graph)` spells it out.
        budget_bytes: the budget it was solved for; peak_bytes: the peak it is predicted to reach.
        latency_ms: the predicted step time; plain_latency_ms and plain_peak_bytes: those of plain training.
        lower_bound_ms: no schedule within the budget is faster than this.
        status: optimal or feasible. solver, seconds: how it was found and how long that took.
        device, kind: what the costs are of, and whether they were measured or estimated; environment: the
            versions behind them; optimizer: whose state is counted, if any; accumulate: whether
            gradients of earlier batches are.
        tolerance: the most that an implementation it may use differs from the default one; layout: of images
            in the graph it was solved for (see `trace`); autocast: the dtype of `torch.autocast` around it, if on.
        smallest_proven_bytes: nothing fits below this; smallest_reached_bytes: the smallest peak for which a
            schedule is known.
        reserved_bytes: if it was solved for a budget of reserved memory, the least that torch's CUDA allocator can
            be limited to for it, as predicted.
        source: what the model can be built from again, if it has a name that means the same everywhere.
        operator_digests: of each operator, to say which one differs where the structure does.
    """

    name: str
    fingerprint: str
    structure: str
    operators: int
    inputs: Mapping[str, TensorSpec]
    choices: Choices
    budget_bytes: int
    peak_bytes: int
    latency_ms: float
    lower_bound_ms: float
    status: Status
    plain_peak_bytes: int
    plain_latency_ms: float
    device: str
    kind: str
    solver: str
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    accumulate: bool = False
    tolerance: float = 0.0
    layout: str = AS_TRACED
    autocast: str = ""
    smallest_proven_bytes: int = 0
    smallest_reached_bytes: int | None = None
    reserved_bytes: int | None = None
    source: ModelSource | None = None
    operator_digests: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """(latency − bound) / latency: how much faster, at most, the best schedule could be."""
        if self.latency_ms <= 0:
            return 0.0
        return max(0.0, (self.latency_ms - self.lower_bound_ms) / self.latency_ms)

    @property
    def overhead(self) -> float:
        """Predicted step time over plain training's, less one."""
        return self.latency_ms / self.plain_latency_ms - 1 if self.plain_latency_ms > 0 else 0.0

    def steps(self, graph: OperatorGraph) -> tuple[Step, ...]:
        """(operator, implementation) pairs in execution order.

        Raises:
            ScheduleMismatch: the graph lacks an operator or an implementation that the schedule names.
        """
        return self.choices.steps(graph)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the schedule as YAML, atomically.

        Raises:
            ScheduleFileError: the file can't be written; what was there before is left as it was.
        """
        from monetlite.core.files.schedules import save_schedule

        save_schedule(self, path)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Memory and latency of a schedule, step by step.

    `memory_bytes[i]` is the most that step i holds; `latencies_ms[i]` how long it takes; `writes[i]` the values
    it writes; `frees[i]` what dies at it.
    """

    steps: tuple[Step, ...]
    memory_bytes: tuple[int, ...]
    latencies_ms: tuple[float, ...]
    writes: tuple[tuple[int, ...], ...]
    frees: tuple[frozenset[int], ...]
    resident_bytes: int

    @cached_property
    def live(self) -> tuple[frozenset[int], ...]:
        """For each step, the values in memory before it starts. Takes memory quadratic in the steps."""
        live: set[int] = set()
        before: list[frozenset[int]] = []
        for writes, frees in zip(self.writes, self.frees, strict=True):
            before.append(frozenset(live))
            live = (live | set(writes)) - frees
        return tuple(before)

    @property
    def peak_bytes(self) -> int:
        return max(self.memory_bytes, default=self.resident_bytes)

    @property
    def peak_step(self) -> int:
        return max(range(len(self.memory_bytes)), key=self.memory_bytes.__getitem__)

    @property
    def latency_ms(self) -> float:
        return sum(self.latencies_ms)


def simulate(profile: Profile, schedule: Schedule | Iterable[Step], budget_bytes: int | None = None) -> Timeline:
    """Run a schedule on paper: check that it is legal, and return its memory and latency step by step.

    Args:
        profile: the graph and its costs.
        schedule: a schedule, or its steps alone.
        budget_bytes: if given, no step may need more.

    Raises:
        IllegalSchedule: a rule of legality is broken, or the budget exceeded; names the step.
    """
    graph = profile.graph
    steps = schedule.steps(graph) if isinstance(schedule, Schedule) else tuple(schedule)
    check_order(graph, [operator for operator, _ in steps])
    for at, (index, choice) in enumerate(steps):
        if not 0 <= choice < len(graph.operators[index].implementations):
            raise IllegalSchedule(f"step {at} ({graph.operators[index].name}): there is no implementation {choice}")
    frees = deaths(graph, steps)
    size = [value.size_bytes for value in graph.values]
    live: set[int] = set()
    ran: set[int] = set()
    held_bytes = graph.resident.total
    memory: list[int] = []
    latencies: list[float] = []
    for at, (index, choice) in enumerate(steps):
        operator = graph.operators[index]
        implementation = operator.implementations[choice]
        if missing := [value for value in implementation.reads if value not in live]:
            names = ", ".join(graph.values[value].name for value in missing)
            raise IllegalSchedule(f"step {at} ({operator.name}): reads {names}, which is not in memory there")
        for value in implementation.overwrites:
            if value not in frees[at]:
                raise IllegalSchedule(
                    f"step {at} ({operator.name}, {implementation.name}): overwrites {graph.values[value].name}, "
                    "which is read later"
                )
        latency_ms, workspace_bytes = profile.costs[index][choice].of_run(again=index in ran)
        ran.add(index)
        new_bytes = sum(size[value] for value in implementation.writes if value not in live)
        overwritten_bytes = sum(size[value] for value in implementation.overwrites)
        here = held_bytes + new_bytes + workspace_bytes - overwritten_bytes
        if budget_bytes is not None and here > budget_bytes:
            raise IllegalSchedule(
                f"step {at} ({operator.name}): needs {format_bytes(here)} ({here} bytes), "
                f"over the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes)"
            )
        memory.append(here)
        latencies.append(latency_ms)
        live.update(implementation.writes)
        dying = frees[at] & live
        held_bytes += new_bytes - sum(size[value] for value in dying)
        live -= dying
    return Timeline(
        steps=steps,
        memory_bytes=tuple(memory),
        latencies_ms=tuple(latencies),
        writes=tuple(graph.operators[index].implementations[choice].writes for index, choice in steps),
        frees=frees,
        resident_bytes=graph.resident.total,
    )


def deaths(graph: OperatorGraph, steps: Iterable[Step]) -> tuple[frozenset[int], ...]:
    """For each step, the values whose present version is not read after it."""
    held = {index for index, value in enumerate(graph.values) if value.held}
    needed = set(held)
    dying: list[frozenset[int]] = []
    for index, choice in reversed(tuple(steps)):
        implementation = graph.operators[index].implementations[choice]
        here = {value for value in implementation.writes if value not in needed}
        needed.difference_update(set(implementation.writes) - held)
        here.update(value for value in implementation.reads if value not in needed)
        needed.update(implementation.reads)
        dying.append(frozenset(here))
    return tuple(reversed(dying))


def check_order(graph: OperatorGraph, operators: Iterable[int]) -> None:
    """Check rules 1 and 2 of legality on a sequence of operators.

    Raises:
        IllegalSchedule: an operator is missing, out of place, or re-run though it can't be.
    """
    mandatory = [i for i, op in enumerate(graph.operators) if op.phase is Phase.FORWARD and not op.optional]
    backward = [i for i, op in enumerate(graph.operators) if op.phase is Phase.BACKWARD]
    expected = iter(mandatory)
    waiting = next(expected, None)
    at_backward = 0
    ran: set[int] = set()
    for at, index in enumerate(operators):
        if not 0 <= index < len(graph.operators):
            raise IllegalSchedule(f"step {at}: there is no operator {index}")
        operator = graph.operators[index]
        if operator.phase is Phase.BACKWARD:
            if waiting is not None:
                raise IllegalSchedule(
                    f"step {at} ({operator.name}): backward begins before {graph.operators[waiting].name} has run"
                )
            if at_backward >= len(backward) or backward[at_backward] != index:
                raise IllegalSchedule(
                    f"step {at} ({operator.name}): backward operators must run once each, in order"
                )
            at_backward += 1
        elif index == waiting:
            waiting = next(expected, None)
        elif not operator.optional and waiting is not None:
            raise IllegalSchedule(f"step {at} ({operator.name}): the forward pass must run once, in order")
        elif index in ran and not operator.rerunnable:
            raise IllegalSchedule(f"step {at} ({operator.name}): can't be run again (random, or a side effect)")
        ran.add(index)
    if waiting is not None:
        raise IllegalSchedule(f"{graph.operators[waiting].name} is never run")
    if at_backward < len(backward):
        raise IllegalSchedule(f"{graph.operators[backward[at_backward]].name} is never run")


def plain_steps(graph: OperatorGraph) -> tuple[Step, ...]:
    """The steps of plain training: everything once, with the default implementations.

    An optional operator runs right before the first backward operator that needs it, as autograd's own
    formulas do.
    """
    steps: list[Step] = []
    live: set[int] = set()

    def run(index: int) -> None:
        implementation = graph.operators[index].implementations[0]
        for value in implementation.reads:
            if value not in live:
                run(graph.writer[value])
        steps.append((index, 0))
        live.update(implementation.writes)

    for index, operator in enumerate(graph.operators):
        if not operator.optional:
            run(index)
    return tuple(steps)
