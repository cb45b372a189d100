"""What the exact methods share: each operator's worthwhile implementations, and the order of the main run.

The *main* operators are those every schedule runs once and in order: forward operators that are not optional,
then backward operators. Everything else a schedule does (re-runs, optional operators) happens in the gaps
between them; `stage t` is the gap just before main operator t.
"""

from dataclasses import dataclass
from functools import cached_property

from monetlite.core.costs import Profile
from monetlite.core.graph import Phase


@dataclass(frozen=True, slots=True)
class Option:
    """One implementation of an operator as the solver sees it.

    `first_extra_bytes` and `again_extra_bytes` are the workspace less what it overwrites: what a first run,
    or a run after the first, takes beyond the values that are live and those it writes.
    """

    choice: int
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    first_ms: float
    again_ms: float
    first_extra_bytes: int
    again_extra_bytes: int

    @property
    def rerun_differs(self) -> bool:
        """Whether a run after the first costs something else than the first."""
        return (self.first_ms, self.first_extra_bytes) != (self.again_ms, self.again_extra_bytes)

    def dominates(self, other: "Option") -> bool:
        """Whether this can replace `other` in every schedule, at no more latency or memory."""
        return (
            self.reads <= other.reads
            and self.writes == other.writes
            and self.overwrites <= other.overwrites
            and self.first_ms <= other.first_ms
            and self.again_ms <= other.again_ms
            and self.first_extra_bytes <= other.first_extra_bytes
            and self.again_extra_bytes <= other.again_extra_bytes
        )


def operator_options(profile: Profile, operator: int) -> tuple[Option, ...]:
    """The implementations of an operator that a schedule may use, without the dominated ones.

    One that overwrites a value held to the end of the step, or one it does not read, can never be legal.
    """
    graph = profile.graph
    found: list[Option] = []
    for choice, implementation in enumerate(graph.operators[operator].implementations):
        overwrites = frozenset(implementation.overwrites)
        if any(graph.values[value].held or value not in implementation.reads for value in overwrites):
            continue
        cost = profile.costs[operator][choice]
        first_ms, first_bytes = cost.of_run(again=False)
        again_ms, again_bytes = cost.of_run(again=True)
        overwritten_bytes = sum(graph.values[value].size_bytes for value in implementation.overwrites)
        option = Option(
            choice=choice,
            reads=frozenset(implementation.reads),
            writes=frozenset(implementation.writes),
            overwrites=overwrites,
            first_ms=first_ms,
            again_ms=again_ms,
            first_extra_bytes=first_bytes - overwritten_bytes,
            again_extra_bytes=again_bytes - overwritten_bytes,
        )
        if not any(kept.dominates(option) for kept in found):
            found = [kept for kept in found if not option.dominates(kept)]
            found.append(option)
    return tuple(found)


@dataclass(frozen=True)
class Outline:
    """A profile, reduced to what the exact methods and bounds need.

    Attributes:
        profile: what was reduced.
        options: for each operator, its worthwhile implementations.
        main: the main operators, in order; the first `forward_main` of them are forward.
    """

    profile: Profile
    options: tuple[tuple[Option, ...], ...]
    main: tuple[int, ...]
    forward_main: int

    @classmethod
    def of(cls, profile: Profile) -> "Outline":
        operators = profile.graph.operators
        forward = [i for i, op in enumerate(operators) if op.phase is Phase.FORWARD and not op.optional]
        backward = [i for i, op in enumerate(operators) if op.phase is Phase.BACKWARD]
        return cls(
            profile=profile,
            options=tuple(operator_options(profile, index) for index in range(len(operators))),
            main=tuple(forward + backward),
            forward_main=len(forward),
        )

    @cached_property
    def size_bytes(self) -> tuple[int, ...]:
        return tuple(value.size_bytes for value in self.profile.graph.values)

    @cached_property
    def held(self) -> tuple[bool, ...]:
        return tuple(value.held for value in self.profile.graph.values)

    @cached_property
    def resident_bytes(self) -> int:
        return self.profile.graph.resident.total

    @cached_property
    def extra(self) -> tuple[int, ...]:
        """The operators that may run outside the main run: forward ones, optional or rerunnable."""
        return tuple(
            index
            for index, op in enumerate(self.profile.graph.operators)
            if op.phase is Phase.FORWARD and (op.optional or op.rerunnable)
        )

    @cached_property
    def position(self) -> dict[int, int]:
        """The place of each main operator in the main run."""
        return {operator: at for at, operator in enumerate(self.main)}

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the operators that some implementation writes it with (nearly always one)."""
        found: list[set[int]] = [set() for _ in self.size_bytes]
        for operator, options in enumerate(self.options):
            for option in options:
                for value in option.writes:
                    found[value].add(operator)
        return tuple(tuple(sorted(operators)) for operators in found)

    @cached_property
    def must_read(self) -> tuple[frozenset[int], ...]:
        """For each operator, the values that it reads whichever implementation runs."""
        return tuple(
            frozenset.intersection(*(option.reads for option in options)) if options else frozenset()
            for options in self.options
        )

    @cached_property
    def may_read(self) -> tuple[frozenset[int], ...]:
        """For each operator, the values that some implementation reads."""
        return tuple(frozenset().union(*(option.reads for option in options)) for options in self.options)

    @cached_property
    def always_writes(self) -> tuple[frozenset[int], ...]:
        """For each operator, the values that it writes whichever implementation runs."""
        return tuple(
            frozenset.intersection(*(option.writes for option in options)) if options else frozenset()
            for options in self.options
        )

    @cached_property
    def runnable(self) -> bool:
        """Whether every main operator has an implementation that can be legal at all."""
        return all(self.options[operator] for operator in self.main)

    @cached_property
    def extra_set(self) -> frozenset[int]:
        return frozenset(self.extra)

    @cached_property
    def main_readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the places in the main run that read it in every implementation."""
        found: list[list[int]] = [[] for _ in self.size_bytes]
        for at, operator in enumerate(self.main):
            for value in self.must_read[operator]:
                found[value].append(at)
        return tuple(tuple(places) for places in found)

    def is_forward(self, operator: int) -> bool:
        return self.profile.graph.operators[operator].phase is Phase.FORWARD

    def useful_before(self, place: int) -> set[int]:
        """The values that could serve anything from just before a place in the main run to the end."""
        useful = {value for operator in self.main[place:] for value in self.may_read[operator]}
        for operator in reversed(self.extra):
            if any(not useful.isdisjoint(option.writes) for option in self.options[operator]):
                useful |= self.may_read[operator]
        return useful

    def least_ms(self, operator: int) -> float:
        """The least latency of a run outside the main run; it may be the first of an optional one."""
        options = self.options[operator]
        if operator in self.position:
            return min((option.again_ms for option in options), default=0.0)
        return min((min(option.first_ms, option.again_ms) for option in options), default=0.0)

    @cached_property
    def main_least_ms(self) -> tuple[float, ...]:
        """The least latency of each main operator's one mandatory run."""
        return tuple(min((o.first_ms for o in self.options[op]), default=0.0) for op in self.main)
