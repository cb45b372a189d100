"""Simulation of a schedule: the one definition of its memory and latency.

A step's memory is what is live (`monetlite.core.steps`), plus its new outputs, plus its workspace, less what it
overwrites. The rules are those of the solver instances made from the measurements of MONeT's authors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from monetlite.core.costs import Profile
from monetlite.core.errors import IllegalSchedule
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step, border, check_legal, reruns, step_in_words
from monetlite.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Memory and latency of a schedule, step by step.

    `memory_bytes[i]` is the memory of step i and `workspace_bytes[i]` its workspace, `latencies_ms[i]` its latency
    on the device, `hosts_ms[i]` the time of the host for it, `writes[i]` the values that it writes and `frees[i]`
    those that die at it. The forward part ends at `border`.
    """

    steps: tuple[Step, ...]
    memory_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    latencies_ms: tuple[float, ...]
    writes: tuple[tuple[int, ...], ...]
    frees: tuple[frozenset[int], ...]
    resident_bytes: int
    hosts_ms: tuple[float, ...]
    border: int

    @cached_property
    def live(self) -> tuple[frozenset[int], ...]:
        """The values in memory before each step. Takes memory quadratic in the number of steps."""
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
    def device_ms(self) -> float:
        """Latency of a device that never waits for the host."""
        return sum(self.latencies_ms)

    @property
    def latency_ms(self) -> float:
        """Latency of the step: of each of its two parts, the device's or the host's, whichever is larger."""
        if not any(self.hosts_ms):
            return self.device_ms
        parts = slice(self.border), slice(self.border, None)
        return sum(max(sum(self.latencies_ms[part]), sum(self.hosts_ms[part])) for part in parts)


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
    frees = check_legal(graph, steps)
    size = [value.size_bytes for value in graph.values]
    live = bytearray(len(size))
    held_bytes = graph.resident.total
    memory: list[int] = []
    workspaces: list[int] = []
    latencies: list[float] = []
    hosts: list[float] = []
    for at, ((index, choice), dying, again) in enumerate(zip(steps, frees, reruns(steps), strict=True)):
        implementation = graph.operators[index].implementations[choice]
        cost = profile.costs[index][choice]
        latency_ms, workspace_bytes = cost.of_run(again=again)
        hosts.append(cost.host_of_run(again=again))
        for value in implementation.writes:
            if not live[value]:
                live[value] = True
                held_bytes += size[value]
        here = held_bytes + workspace_bytes
        for value in implementation.overwrites:
            here -= size[value]
        if budget_bytes is not None and here > budget_bytes:
            raise IllegalSchedule(
                f"{step_in_words(at)} ({graph.operators[index].name}): needs {format_bytes(here)} ({here} bytes), "
                f"over the budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes)"
            )
        memory.append(here)
        workspaces.append(workspace_bytes)
        latencies.append(latency_ms)
        for value in dying:
            live[value] = False
            held_bytes -= size[value]
    return Timeline(
        steps=steps,
        memory_bytes=tuple(memory),
        workspace_bytes=tuple(workspaces),
        latencies_ms=tuple(latencies),
        writes=tuple(graph.operators[index].implementations[choice].writes for index, choice in steps),
        frees=frees,
        resident_bytes=graph.resident.total,
        hosts_ms=tuple(hosts),
        border=border(graph, steps),
    )
