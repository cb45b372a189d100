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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from monetlite.core.costs import Cost, Profile, ProfileKind
from monetlite.core.graph import (
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    TensorSpec,
    Value,
    ValueKind,
)
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
        if block.called_again or block.changed or not asked or not _repeats(step, number):
            continue
        found[number] = Recompute(
            stop=max(item.made for item in kept),
            trigger=min(asked),
            release=max((item.released or len(step.calls)) for item in kept) - 1,
        )
    return found


def _repeats(step: EagerStep, number: int) -> bool:
    """True if a block computes the same when it runs again.

    It may change values that it made, and resident tensors. Of the latter, it may compute with those that are not
    changed from then on.
    """
    block = step.blocks[number]
    calls = range(block.start, block.end)
    own = {value for at in calls for value in step.calls[at].writes}
    changed = {value for at in calls for value in step.calls[at].changes if isinstance(value, int)}
    last_change = {
        name: at for at in range(step.border) for name in step.calls[at].changes if isinstance(name, str)
    }
    return own.issuperset(changed) and not any(
        last_change.get(name, -1) >= at
        for at in calls
        if step.calls[at].writes
        for name in step.calls[at].resident_reads
    )


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
class _Composer:
    """Puts the operators of a plan together."""

    priced: PricedStep
    plan: CheckpointPlan
    operators: list[Operator] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """For each operator, the recorded call that it belongs to or precedes."""
    copies: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each wrapped block, the values that its recomputation makes, by those that it made first."""
    states: dict[int, int] = field(default_factory=dict)
    """For each wrapped block, the value that is the generator's state."""

    def __post_init__(self) -> None:
        self.step, self.recompute = self.priced.step, self.priced.recompute
        self.values = list(zip(self.step.sizes, self.step.specs, strict=True))
        """Size and form of each value: the recorded ones first."""
        self.block_of = {value: call.block for call in self.step.calls for value in call.writes}

    def compose(self) -> None:
        """Make the operators, in order."""
        step = self.step
        starting = {step.blocks[number].start: number for number in self.plan}
        due: defaultdict[int, list[int]] = defaultdict(list)
        state_size = state_bytes("cpu") if step.device == "cpu" else 0  # the state stays in main memory
        for number in self.plan:
            due[self.recompute[number].trigger].append(number)
            self.copies[number] = self._copies_of(number)
            self.states[number] = self._new_value(state_size, TensorSpec(shape=(), stride=(), dtype="uint8"))
        self.held = self._held()
        for at, call in enumerate(step.calls):
            for number in due[at]:
                self._recompute(number)
            if at in starting:
                self._begin(starting[at], Phase.FORWARD)
            phase = Phase.FORWARD if at < step.border else Phase.BACKWARD
            reads = self.held[at] | {self._read(item) for item in call.reads}
            self._add(f"{at}", at, phase, self.priced.costs[at], reads, call.writes, call)

    def _add(
        self,
        name: str,
        place: int,
        phase: Phase,
        cost: Cost,
        reads: set[int],
        writes: tuple[int, ...],
        call: EagerCall | None = None,
    ) -> None:
        """Add an operator; without a recorded call it only holds what it reads."""
        default = Implementation(
            name="default",
            reads=tuple(sorted(reads - set(writes))),
            writes=writes,
            call=None if call is None else call.call,
        )
        self.operators.append(
            Operator(
                name=name,
                family=HELD if call is None else call.name,
                phase=phase,
                implementations=(default,),
                rerunnable=False,
                module="" if call is None else call.module,
            )
        )
        self.costs.append(cost)
        self.places.append(place)

    def _read(self, item: tuple[int, int | None]) -> int:
        """The value behind a read: of what autograd kept in a wrapped block, the recomputed one."""
        value, kept = item
        block = OUTSIDE_BLOCKS if kept is None else self.step.kept[kept].block
        return self.copies.get(block, {}).get(value, value)

    def _held(self) -> defaultdict[int, set[int]]:
        """Values to hold up to a call, by the code, by autograd, or as inputs of wrapped blocks."""
        until: defaultdict[int, set[int]] = defaultdict(set)
        for value, last in enumerate(self.step.held):
            if last is not None:
                until[last].add(value)
        for number in self.plan:
            until[self.recompute[number].release] |= {*self.step.blocks[number].inputs, self.states[number]}
        for kept in self.step.kept:
            at = (len(self.step.calls) if kept.released is None else kept.released) - 1
            first = self.recompute[kept.block].trigger if kept.block in self.plan else self.step.border
            if kept.value is not None and at >= first:
                until[at].add(self.copies.get(kept.block, {}).get(kept.value, kept.value))
        return until

    def _copies_of(self, number: int) -> dict[int, int]:
        copies = {}
        for at in range(self.step.blocks[number].start, self.recompute[number].stop):
            if at not in self.plan[number]:
                for value in self.step.calls[at].writes:
                    copies[value] = self._new_value(*self.values[value])
        return copies

    def _new_value(self, size_bytes: int, spec: TensorSpec) -> int:
        self.values.append((size_bytes, spec))
        return len(self.values) - 1

    def _begin(self, number: int, phase: Phase) -> None:
        """Begin a block: note the generator's state the first time, and take the time of selective contexts."""
        ms = self.priced.policy_ms * self.step.blocks[number].dispatched if self.plan[number] else 0.0
        cost = Cost(latency_ms=0.0, workspace_bytes=0, host_ms=ms)
        if self.step.device == "cpu":
            cost = Cost(latency_ms=ms, workspace_bytes=0)
        forward = phase is Phase.FORWARD
        place = self.step.blocks[number].start if forward else self.recompute[number].trigger
        self._add(f"{number}.begin.{phase}", place, phase, cost, set(), (self.states[number],) if forward else ())

    def _recompute(self, number: int) -> None:
        """Add what runs again of a block."""
        block, place, copies = self.step.blocks[number], self.recompute[number].trigger, self.copies[number]
        self._begin(number, Phase.BACKWARD)
        for at in range(block.start, self.recompute[number].stop):
            call = self.step.calls[at]
            own = {copies.get(value, value) for value in self.held[at] if self.block_of.get(value) == number}
            if at in self.plan[number]:
                self._add(f"{at}.taken", place, Phase.BACKWARD, _NOTHING, own | set(call.writes), ())
                continue
            reads = own | {copies.get(value, value) for value, _ in call.reads}
            writes = tuple(copies[value] for value in call.writes)
            self._add(f"{at}.again", place, Phase.BACKWARD, self.priced.costs[at], reads, writes, call)


def checkpointed(priced: PricedStep, plan: CheckpointPlan) -> CheckpointedStep:
    """The operator graph of a plan, with costs. It wraps only blocks that can be checkpointed."""
    step, composer = priced.step, _Composer(priced=priced, plan=plan)
    composer.compose()
    backward = {
        value for operator in composer.operators if operator.phase is Phase.BACKWARD for value in operator.writes
    }
    values = []
    for value, (size_bytes, spec) in enumerate(composer.values):
        kind = ValueKind.GRADIENT if value in backward else ValueKind.ACTIVATION
        if value in step.gradients:
            kind = ValueKind.PARAM_GRAD
        elif value < len(step.sizes) and step.held[value] is None:
            kind = ValueKind.OUTPUT
        values.append(Value(name=f"v{value}", kind=kind, size_bytes=size_bytes, shape=spec.shape, dtype=spec.dtype))
    graph = OperatorGraph(
        name=step.name,
        operators=tuple(composer.operators),
        values=tuple(values),
        resident=step.resident,
        inputs=step.inputs,
        device=step.device,
    )
    profile = Profile(
        graph=graph,
        device=step.device,
        kind=ProfileKind.MEASURED,
        costs=tuple((cost,) for cost in composer.costs),
    )
    profile = with_additions(profile, priced.options)
    added = len(profile.costs) - len(composer.costs)
    return CheckpointedStep(profile=profile, places=(*composer.places, *[len(step.calls) - 1] * added))
