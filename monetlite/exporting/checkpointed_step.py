"""The step of a checkpoint plan, with its memory and time: what `torch.utils.checkpoint` makes of a recorded step.

A plan wraps some blocks, and says of each which results are saved. As `torch.utils.checkpoint` does it without
reentrant autograd, and with selective contexts:

| in the step | of a wrapped block |
| --- | --- |
| forward | saved results and the block's inputs are kept; what the code lets go of dies |
| when the backward pass first asks for something of it | it runs again, up to the last tensor that autograd kept |
| then | saved results are taken; a tensor dies when the node that kept it is done, the inputs with the last node |

All of it is one operator graph, in which what runs again are operators of their own. So `simulate` has the plan's
memory and latency.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import Implementation, Operator, OperatorGraph, Phase, Value, ValueKind
from monetlite.core.options import PricingOptions
from monetlite.core.simulate import Timeline, simulate
from monetlite.core.steps import plain_steps
from monetlite.exporting.eager_step import OUTSIDE_BLOCKS, EagerCall, EagerStep
from monetlite.operators.random import state_bytes
from monetlite.profiling.step_additions import with_additions

CheckpointPlan: TypeAlias = Mapping[int, frozenset[int]]
"""For each wrapped block, the calls whose results are saved; other blocks are not wrapped."""
HELD = "monetlite.held"
"""Family of operators that only say that values are in memory up to there."""
_STATE = -1
_NOTHING = Cost(latency_ms=0.0, workspace_bytes=0)


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Places of a block's recomputation.

    Attributes:
        stop: the calls before this one run again. trigger: the backward call before which they do.
        release: the backward call after which nothing of the block is kept.
    """

    stop: int
    trigger: int
    release: int


def recomputes(step: EagerStep) -> dict[int, Recompute]:
    """The recomputation of each block that can be checkpointed, by the block's position."""
    found = {}
    for number, block in enumerate(step.blocks):
        kept = [item for item in step.kept if item.block == number]
        asked = [item.needed for item in kept if item.needed is not None]
        if block.problem or not asked or not _repeats(step, number):
            continue
        found[number] = Recompute(
            stop=max(item.made for item in kept),
            trigger=min(asked),
            release=max((item.released or len(step.calls)) for item in kept) - 1,
        )
    return found


def _repeats(step: EagerStep, number: int) -> bool:
    """True if a block changes nothing in place that it did not make, but for resident tensors."""
    block = step.blocks[number]
    own = {value for call in step.calls[block.start : block.end] for value in call.writes}
    changed = (value for call in step.calls[block.start : block.end] for value in call.changes if value is not None)
    return own.issuperset(changed)


def savable(step: EagerStep, number: int, recompute: Recompute) -> list[int]:
    """Calls of a block whose results a policy may save.

    What is changed in place later may not be saved: torch refuses it. A random operator isn't: where one is left
    out of the recomputation, those after it draw other numbers than they did.
    """
    changed = {value for call in step.calls for value in call.changes}
    return [
        at
        for at in range(step.blocks[number].start, recompute.stop)
        if (call := step.calls[at]).writes
        and not call.changes
        and not call.draws
        and changed.isdisjoint(call.writes)
    ]


@dataclass(frozen=True, kw_only=True)
class PricedStep:
    """A recorded step with its costs.

    Attributes:
        costs: of each call. options: what is counted beside the model.
        policy_ms: time that a selective context takes for each operator that reaches it.
    """

    step: EagerStep
    costs: Sequence[Cost]
    options: PricingOptions = field(default_factory=PricingOptions)
    policy_ms: float = 0.0

    @cached_property
    def recompute(self) -> dict[int, Recompute]:
        return recomputes(self.step)


@dataclass(frozen=True, kw_only=True)
class CheckpointedStep:
    """The operators of a plan with their costs; `places` has the recorded call that each belongs to or precedes."""

    profile: Profile
    places: tuple[int, ...]

    @cached_property
    def timeline(self) -> Timeline:
        """Memory and latency of each operator."""
        return simulate(self.profile, plain_steps(self.profile.graph))


@dataclass(kw_only=True)
class _Row:
    """An operator to be: `call` is recorded, None for one that only holds."""

    name: str
    place: int
    phase: Phase
    call: EagerCall | None
    cost: Cost
    reads: set[int]
    writes: tuple[int, ...] = ()


@dataclass(kw_only=True)
class _Composer:
    """Puts the operators of a plan together."""

    priced: PricedStep
    plan: CheckpointPlan
    rows: list[_Row] = field(default_factory=list)
    copies: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each wrapped block, the values that its recomputation makes, by those that it made first."""
    states: dict[int, int] = field(default_factory=dict)
    """For each wrapped block, the value that is the generator's state."""
    copied: list[int] = field(default_factory=list)
    """For each value beyond the recorded ones, the one that it is made like, or `_STATE`."""

    def __post_init__(self) -> None:
        self.step, self.recompute, self.costs = self.priced.step, self.priced.recompute, self.priced.costs

    def compose(self) -> list[_Row]:
        step = self.step
        starting = {step.blocks[number].start: number for number in self.plan}
        self.block_of = {value: call.block for call in step.calls for value in call.writes}
        held: dict[int, set[int]] = {}
        for value, at in enumerate(step.held):
            if at is not None:
                held.setdefault(at, set()).add(value)
        released = self._released()
        due: dict[int, list[int]] = {}
        for number in self.plan:
            due.setdefault(self.recompute[number].trigger, []).append(number)
        for at, call in enumerate(step.calls):
            for number in due.get(at, ()):
                self._recompute(number, held)
            if at in starting:
                self._begin(starting[at], Phase.FORWARD)
            phase = Phase.FORWARD if at < step.border else Phase.BACKWARD
            row = _Row(
                name=f"{at}",
                place=at,
                phase=phase,
                call=call,
                cost=self.costs[at],
                reads={self._read(item) for item in call.reads},
                writes=call.writes,
            )
            row.reads |= held.get(at, set()) - set(call.writes)
            row.reads |= {value for value in released.get(at, ()) if value not in call.writes}
            self.rows.append(row)
        return self.rows

    def _read(self, item: tuple[int, int | None]) -> int:
        """The value behind a read: of what autograd kept in a wrapped block, the recomputed one."""
        value, kept = item
        block = OUTSIDE_BLOCKS if kept is None else self.step.kept[kept].block
        return self.copies.get(block, {}).get(value, value)

    def _released(self) -> dict[int, list[int]]:
        """Values to hold up to a call: those that autograd keeps, and the inputs of wrapped blocks."""
        until: dict[int, list[int]] = {}
        for number in self.plan:
            self.copies[number] = self._copies_of(number)
            self.states[number] = self._new_value(_STATE)
            held = until.setdefault(self.recompute[number].release, [])
            held += [*self.step.blocks[number].inputs, self.states[number]]
        for kept in self.step.kept:
            at = (len(self.step.calls) if kept.released is None else kept.released) - 1
            if kept.value is None or at < self.step.border:
                continue
            if kept.block in self.plan:
                if at < self.recompute[kept.block].trigger:
                    continue
                until.setdefault(at, []).append(self.copies[kept.block].get(kept.value, kept.value))
            else:
                until.setdefault(at, []).append(kept.value)
        return until

    def _copies_of(self, number: int) -> dict[int, int]:
        copies = {}
        for at in range(self.step.blocks[number].start, self.recompute[number].stop):
            if at not in self.plan[number]:
                for value in self.step.calls[at].writes:
                    copies[value] = self._new_value(value)
        return copies

    def _new_value(self, like: int) -> int:
        self.copied.append(like)
        return len(self.step.sizes) + len(self.copied) - 1

    def _begin(self, number: int, phase: Phase) -> None:
        """Begin a block: note the generator's state the first time, and take the time of selective contexts."""
        ms = self.priced.policy_ms * self.step.blocks[number].dispatched if self.plan[number] else 0.0
        cost = Cost(latency_ms=0.0, workspace_bytes=0, host_ms=ms)
        if self.step.device == "cpu":
            cost = Cost(latency_ms=ms, workspace_bytes=0)
        forward = phase is Phase.FORWARD
        place = self.step.blocks[number].start if forward else self.recompute[number].trigger
        writes = (self.states[number],) if forward else ()
        name = f"{number}.begin.{phase}"
        self.rows.append(
            _Row(name=name, place=place, phase=phase, call=None, cost=cost, reads=set(), writes=writes)
        )

    def _recompute(self, number: int, held: Mapping[int, set[int]]) -> None:
        """Add what runs again of a block."""
        block, copies = self.step.blocks[number], self.copies[number]
        self._begin(number, Phase.BACKWARD)
        for at in range(block.start, self.recompute[number].stop):
            call, saved = self.step.calls[at], at in self.plan[number]
            own = {value for value in held.get(at, ()) if self.block_of[value] == number} - set(call.writes)
            reads = set(call.writes) if saved else {copies.get(value, value) for value, _ in call.reads}
            self.rows.append(
                _Row(
                    name=f"{at}.{'taken' if saved else 'again'}",
                    place=self.recompute[number].trigger,
                    phase=Phase.BACKWARD,
                    call=None if saved else call,
                    cost=_NOTHING if saved else self.costs[at],
                    reads=reads | {copies.get(value, value) for value in own},
                    writes=() if saved else tuple(copies[value] for value in call.writes),
                )
            )


def checkpointed(priced: PricedStep, plan: CheckpointPlan) -> CheckpointedStep:
    """The operator graph of a plan, with costs. It wraps only blocks that can be checkpointed."""
    step, composer = priced.step, _Composer(priced=priced, plan=plan)
    rows = composer.compose()
    backward = {value for row in rows if row.phase is Phase.BACKWARD for value in row.writes}
    values = []
    for value, of in enumerate((*range(len(step.sizes)), *composer.copied)):
        kind = ValueKind.GRADIENT if value in backward else ValueKind.ACTIVATION
        if value in step.gradients:
            kind = ValueKind.PARAM_GRAD
        elif value < len(step.sizes) and step.held[value] is None:
            kind = ValueKind.OUTPUT
        if of == _STATE:
            size = state_bytes("cpu") if step.device == "cpu" else 0  # the state stays in main memory
            values.append(Value(name=f"v{value}", kind=kind, size_bytes=size, dtype="uint8"))
            continue
        spec = step.specs[of]
        values.append(
            Value(name=f"v{value}", kind=kind, size_bytes=step.sizes[of], shape=spec.shape, dtype=spec.dtype)
        )
    graph = OperatorGraph(
        name=step.name,
        operators=tuple(map(_operator, rows)),
        values=tuple(values),
        resident=step.resident,
        inputs=step.inputs,
        device=step.device,
    )
    profile = Profile(
        graph=graph, device=step.device, kind=ProfileKind.MEASURED, costs=tuple((row.cost,) for row in rows)
    )
    profile = with_additions(profile, priced.options)
    places = [row.place for row in rows]
    places += [len(step.calls) - 1] * (len(profile.costs) - len(rows))
    return CheckpointedStep(profile=profile, places=tuple(places))


def _operator(row: _Row) -> Operator:
    reads = tuple(sorted(row.reads - set(row.writes)))
    default = Implementation(
        name="default", reads=reads, writes=row.writes, call=None if row.call is None else row.call.call
    )
    family = HELD if row.call is None else row.call.name
    module = "" if row.call is None else row.call.module
    return Operator(
        name=row.name, family=family, phase=row.phase, implementations=(default,), rerunnable=False, module=module
    )
