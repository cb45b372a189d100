"""Training of a model that TorchDynamo takes apart: the pieces that it captures, by plans under one budget.

| step | what runs |
| --- | --- |
| 1 | each piece is captured; it stores as little as it can and recomputes the rest |
| 2 | the same, while memory and time between the pieces are recorded |
| 3 and on | by a schedule of the whole step: the pieces joined with what was recorded (`core.joining`) |

A piece may run several times in a step, by another plan each time. A step may leave planned runs out. Where it
runs other pieces than the planned step, or more, those run by the programs of step 1, and the next step is recorded
anew.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from monetlite.core.costs import Profile, without_costs
from monetlite.core.errors import IllegalSchedule, ModelError, TraceError
from monetlite.core.graph import DELIVERY, LOSS, Phase, Resident, TensorSpec, ValueKind
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.joining import JoinedStep, Piece, join
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, check_legal
from monetlite.core.units import format_bytes
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.torch_internals.torch_dynamo import REFUSALS, break_reason, taken_apart
from monetlite.fx.torch_internals.torch_modules import called_instead_for_now
from monetlite.operators import cudnn
from monetlite.operators.random import forked_state
from monetlite.profiling.step_additions import with_additions
from monetlite.runtime.announcing import planned, tell
from monetlite.runtime.buffers import eager
from monetlite.runtime.gradient_delivery import CapturedStep, Version, delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.refinement import PLANNING_SHARE
from monetlite.runtime.step_record import RecordedStep, StepRecord
from monetlite.tracing.capture import Joint, capture_settings, compile_step, module_call, training_step
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.refusals import explain, own_error
from monetlite.tracing.step_inputs import (
    autocast_dtype,
    device_of,
    on_its_gpu,
    resident_bytes,
    tensors_in_order,
)
from monetlite.tracing.whole_kernels import kernels_kept_whole

if TYPE_CHECKING:
    from monetlite.planning.beside_training import PlanningBesideTraining

MAX_RECORDS = 4
"""Steps that are recorded, of different pieces, before the plan is left as it is."""
MAX_STEPS_WITHOUT = 2
"""Steps that may run no piece, before the model is refused."""
MAX_RETRIES = 3
"""Plans that are made, each for less memory, until one keeps to the budget in the order in which pieces run it."""
MAX_LISTED = 5
"""Lines that a warning names."""


@dataclass(eq=False)
class CapturedPiece:
    """A graph that TorchDynamo has captured, and its programs by the steps they run."""

    traced: Traced | None = None
    step: CapturedStep | None = None
    versions: dict[tuple[Step, ...] | None, Version] = field(default_factory=dict)

    def version(self, steps: tuple[Step, ...] | None) -> Version:
        """Its programs for some steps; None for those that store least."""
        assert self.step is not None
        assert self.traced is not None
        if steps not in self.versions:
            made = self.step.current if steps is None else self.step.exchange(*lower(self.traced, steps))
            self.versions[steps] = made
        return self.versions[steps]

    def serves_as(self, other: "CapturedPiece") -> bool:
        """True if the other's steps also run this piece, in no more memory."""
        assert self.traced is not None
        assert other.traced is not None
        ours, theirs = self.traced.graph, other.traced.graph
        if self is other:
            return True
        smaller = sum(value.size_bytes for value in ours.values) <= sum(value.size_bytes for value in theirs.values)
        return smaller and ours.structure == theirs.structure

    def gradient_values(self, positions: Sequence[int]) -> dict[int, int]:
        """The values of its graph that are gradients of inputs, by the inputs' positions."""
        assert self.traced is not None
        joint = self.traced.joint
        results: Any = joint.graph.graph.output_node().args[0]
        delivered = {
            ref.node: ref.value
            for operator in self.traced.graph.operators
            if operator.family == DELIVERY and operator.implementations[0].call is not None
            for ref in operator.implementations[0].call.tensors()
        }
        found = {}
        for at in positions:
            node = results[joint.forward_outputs + at]
            value = delivered.get(node.name) if isinstance(node, fx.Node) else None
            if value is not None:
                found[at] = value
        return found

    def unsaved(self, inputs: Sequence[Any]) -> set[int]:
        """Positions of inputs that plain training does not save: they may change before the backward part."""
        assert self.traced is not None
        nodes = self.traced.joint.graph.graph.find_nodes(op="placeholder")
        saved = {
            ref.node
            for operator in self.traced.graph.operators
            if operator.phase is Phase.BACKWARD and (call := operator.implementations[0].call) is not None
            for ref in call.tensors()
        }
        return {
            at
            for at, item in enumerate(inputs)
            if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter) and nodes[at].name not in saved
        }

    def readers(self, inputs: Collection[int], outputs: bool = False) -> frozenset[int]:
        """The forward operators that read some inputs, by position, or any output."""
        assert self.traced is not None
        graph, nodes = self.traced.graph, self.traced.joint.graph.graph.find_nodes(op="placeholder")
        names = {nodes[at].name for at in inputs}
        handed_on = {index for index, value in enumerate(graph.values) if value.kind is ValueKind.OUTPUT}
        return frozenset(
            index
            for index, operator in enumerate(graph.operators)
            if operator.phase is Phase.FORWARD and (call := operator.implementations[0].call) is not None
            if any(ref.node in names or (outputs and ref.value in handed_on) for ref in call.tensors())
        )

    def readers_of_outputs(self) -> frozenset[tuple[int, str]]:
        """The implementations of backward operators that read an output, where the default ones don't."""
        assert self.traced is not None
        graph = self.traced.graph
        handed_on = {index for index, value in enumerate(graph.values) if value.kind is ValueKind.OUTPUT}
        return frozenset(
            (index, item.name)
            for index, operator in enumerate(graph.operators)
            if operator.phase is Phase.BACKWARD and operator.family != LOSS
            for item in operator.implementations[1:]
            if not handed_on.isdisjoint(item.reads)
        )


@dataclass(frozen=True)
class PlannedPieces:
    """A step in pieces that is planned: its runs in order, and the steps of those that have a backward part."""

    recorded: RecordedStep
    joined: JoinedStep
    steps: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)


class PiecewiseTraining:
    """The training steps of a model in pieces, within a budget.

    Args:
        model, budget, options, wait: as for `MONeTWrapper`.
        reason: the error of capturing it whole.

    Attributes:
        schedule: of the whole step; None before it is planned.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: str | int | float,
        options: Mapping[str, Any],
        wait: bool,
        reason: TraceError,
    ) -> None:
        self.schedule: Schedule | None = None
        self._model, self._budget, self._wait, self._reason = model, budget, wait, reason
        self._pricing, self._solving = split_options(options)
        self._compiled = compile_step(training_step(model), self._backend, whole=False)
        # TorchDynamo captures functions of torch as part of others only. If what calls them can't be captured, as a
        # loop that data ends, they are captured by themselves.
        self._children = {
            module: compile_step(module_call(module), self._backend, whole=False)
            for module in _outermost(model)
            if module is not model
        }
        self._breaks: dict[str, None] = {}
        """Lines that end pieces, and why."""
        self._unplanned: dict[str, None] = {}
        """Reasons why captured graphs run as in plain training."""
        self._next = self._unplanned_runs = 0
        """Number of the next planned run of the present step, and of runs that the plan does not have."""
        self._plan: PlannedPieces | None = None
        self._planning: PlanningBesideTraining | None = None
        self._record: StepRecord | None = None
        self._budget_bytes = 0
        self._priced: JoinedStep | None = None
        """The planned step with the costs that it was planned by."""
        self._records = self._steps = 0
        self._pieces_ran = False
        self._wanted = True  # the next step is to be recorded
        self._inputs: list[TensorSpec] = []
        self._resident = Resident()
        self._border = time.monotonic()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass of a step.

        Raises:
            Those of `monetlite.optimize`.
        """
        self._go_on()
        if not self._pieces_ran and self._steps >= MAX_STEPS_WITHOUT:
            raise self._reason
        self._next = self._unplanned_runs = 0
        self._steps += 1
        if self._wanted and self._steps > 1:
            self._begin_record(args, kwargs)
        with capture_settings(), taken_apart(), called_instead_for_now(self._children):
            try:
                output = self._compiled(*args, **kwargs)
            except REFUSALS as error:
                raise own_error(error) or explain(error) from error
        if self._record is not None:
            self._record.forward_ends()
        if self._plan is not None and self._record is None:
            self._wanted = self._unplanned_runs > 0 and self._records < MAX_RECORDS
        return output

    def _backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture a piece; one that can't be planned runs as in plain training."""
        from monetlite.planning.beside_training import least_stored

        self._note_break(graph)
        piece = CapturedPiece()
        autocast = autocast_dtype(device_of(graph, inputs))

        def partition(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
            piece.traced = build_graph(joint, graph, (tuple(inputs), {}), autocast=autocast)
            return lower(piece.traced, least_stored(piece.traced.graph, piece.readers(piece.unsaved(inputs))))

        def keep(step: CapturedStep) -> None:
            piece.step = step

        try:
            with on_its_gpu(graph, inputs), kernels_kept_whole():
                call = delivering_backend(partition, eager, keep)(graph, inputs)
        except Exception as error:
            self._unplanned[str(error).strip().partition("\n")[0] or type(error).__name__] = None
            return graph
        if piece.step is None:
            return call
        piece.version(None)
        piece.step.watch = lambda what: self._watch(piece, what)
        return lambda *arguments: self._run(piece, call, arguments)

    def _run(self, piece: CapturedPiece, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a piece by the programs that are planned for this place of the step."""
        self._pieces_ran = True
        assert piece.step is not None
        piece.step.current = piece.version(self._meant(piece))
        if self._record is None:
            return call(*arguments)
        self._record.run_begins(piece, arguments)
        outputs = call(*arguments)
        self._record.run_ends(arguments, outputs)
        return outputs

    def _meant(self, piece: CapturedPiece) -> tuple[Step, ...] | None:
        """The steps that are planned for the next run of the present step; None for those that store least.

        Planned runs are taken in order. Some may be left out, as where layers are dropped at random.
        """
        if self._plan is None:
            return None
        runs = self._plan.recorded.runs
        found = next((at for at in range(self._next, len(runs)) if piece.serves_as(runs[at].piece)), None)
        if found is None:
            self._unplanned_runs += 1
            return None
        self._next = found + 1
        return self._plan.steps.get(found)

    def _begin_record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in_order(self._model, args, kwargs)
        try:
            self._record = StepRecord(device_of(self._model, (args, kwargs)), self._model.parameters())
        except RuntimeError:  # somebody else's profiler is on: at another step
            return
        self._wanted = False
        self._records += 1
        self._resident = resident_bytes(self._model, tensors)
        self._inputs = [spec_of(tensor) for tensor in tensors]

    def _watch(self, piece: CapturedPiece, what: str) -> None:
        if self._record is not None:
            self._record.backward(piece, what == "end")

    def _go_on(self) -> None:
        """Plan, between two steps, as far as there is something to plan."""
        now = time.monotonic()
        if self._record is None and self._planning is None:
            return
        with forked_state(device_of(self._model, ())), interrupts_kept():
            if self._record is not None:
                record, self._record = self._record, None
                recorded = record.end()
                if recorded is not None:
                    try:
                        self._begin_plan(recorded)
                    except BaseException:
                        self._plan, self._wanted = None, True  # the next steps don't go on without a plan, unsaid
                        raise
                elif self._plan is None:
                    self._wanted = self._records < MAX_RECORDS
                    if not self._wanted:
                        warnings.warn(
                            f"{type(self._model).__name__} trains in pieces that can't be planned together, as "
                            "their backward parts don't run once each after the forward pass. Each stores as "
                            "little as it can; no budget is kept",
                            stacklevel=6,
                        )
            elif self._planning is not None:
                better = self._planning.advance(PLANNING_SHARE * (now - self._border))
                if better is not None and self._take(better):
                    self._planning.told.append(f"better plan, from this step on: {planned(better)}")
                while self._planning.told:
                    tell(self._planning.told.pop(0))
                if self._planning.finished:
                    self._planning = None
        self._border = time.monotonic()

    def _begin_plan(self, recorded: RecordedStep) -> None:
        from monetlite.planning.beside_training import PlanningBesideTraining

        pieces = list(dict.fromkeys(recorded.runs[number].piece for number in recorded.planned))
        graphs = [piece.traced.graph for piece in pieces]

        def joined(profiles: Sequence[Profile]) -> JoinedStep:
            return self._joined(recorded, dict(zip(pieces, profiles, strict=True)))

        def step(profiles: list[Profile]) -> list[Profile]:
            self._priced = joined([profile.restricted(_is_ours) for profile in profiles])
            return [self._priced.profile]

        self._plan = PlannedPieces(recorded, joined([without_costs(graph) for graph in graphs]))
        planning = PlanningBesideTraining(graphs, self._budget, self._pricing, self._solving, step)
        schedule = planning.best() if self._wait else planning.first()
        self._budget_bytes = schedule.budget_bytes
        for _ in range(MAX_RETRIES):
            excess_bytes = self._peak_bytes(schedule) - self._budget_bytes
            if excess_bytes <= 0:
                break
            planning.take_off(excess_bytes)
            schedule = planning.best() if self._wait else planning.first()
        self._planning = None if planning.finished else planning
        if not self._take(schedule):
            raise ModelError(
                "no plan of the pieces keeps to the budget in the order in which they run; raise the budget by "
                "some percent, and please report this with the model"
            )
        self._warn(recorded, schedule)
        tell(f"plan of {len(recorded.planned)} pieces: {planned(schedule)}")

    def _joined(self, recorded: RecordedStep, profiles: Mapping[Any, Profile]) -> JoinedStep:
        pieces = []
        for run in (recorded.runs[number] for number in recorded.planned):
            values = run.piece.gradient_values(list(run.takers))
            handed_back = {value: run.takers[at] for at, value in values.items()}
            once = run.piece.readers(run.changed, run.outputs_changed)
            avoided = run.piece.readers_of_outputs() if run.outputs_changed else frozenset()
            profile = profiles[run.piece]
            pieces.append(Piece(profile=profile, handed_back=handed_back, once=once, avoided=avoided))
        return join(
            type(self._model).__name__,
            pieces,
            recorded.outside,
            resident=self._resident,
            inputs={f"input{number}": spec for number, spec in enumerate(self._inputs)},
        )

    def _take(self, schedule: Schedule) -> bool:
        """Run the steps to come by a schedule; False if its steps can't be run in pieces."""
        assert self._plan is not None
        recorded, joined = self._plan.recorded, self._plan.joined
        peak_bytes = self._peak_bytes(schedule)
        if peak_bytes > self._budget_bytes:
            return False
        parts = joined.split(joined.in_order(schedule.choices.steps(joined.profile.graph)))
        steps = dict(zip(recorded.planned, parts, strict=True))
        try:
            for number, own in steps.items():
                check_legal(recorded.runs[number].piece.traced.graph, own)
        except IllegalSchedule:
            return False
        self._plan = PlannedPieces(recorded, joined, steps)
        self.schedule = replace(schedule, peak_bytes=peak_bytes, budget_bytes=self._budget_bytes)
        return True

    def _peak_bytes(self, schedule: Schedule) -> int:
        """The peak of a schedule as the pieces run it."""
        assert self._priced is not None
        profile = with_additions(self._priced.profile, self._pricing)
        steps = self._priced.in_order(schedule.choices.steps(profile.graph))
        return simulate(profile, steps).peak_bytes

    def _note_break(self, graph: fx.GraphModule) -> None:
        reason = break_reason(graph)
        if reason is not None:
            frame = reason.user_stack[-1] if reason.user_stack else None
            where = f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})" if frame else "the model"
            self._breaks[f"{where}: {str(reason.reason).splitlines()[0]}"] = None

    def _warn(self, recorded: RecordedStep, schedule: Schedule) -> None:
        """Say once what the pieces are, and how much of the step is planned."""
        if self._records > 1:
            return
        outside_ms = sum(item.forward_ms + item.backward_ms for item in recorded.outside)
        kept_bytes = sum(item.kept_bytes for item in recorded.outside)
        share = max(0.0, 1 - outside_ms / max(1e-9, 1e3 * recorded.seconds))
        # TorchDynamo tells no reason with a graph that ends where a function is left out as a whole.
        reasons = [*self._breaks, *self._unplanned] or [str(self._reason).partition(". ")[0]]
        listed = [f"\n  {line}" for line in reasons]
        if len(listed) > MAX_LISTED:
            listed[MAX_LISTED:] = [f"\n  and {len(listed) - MAX_LISTED} more"]
        warnings.warn(
            f"{type(self._model).__name__} can't be captured whole. It trains in {len(recorded.planned)} pieces, "
            f"with {share:.0%} of the step's time planned; code between them runs as in plain training, and keeps "
            f"{format_bytes(kept_bytes)}. whole=True refuses that. What ends pieces:{''.join(listed)}",
            stacklevel=6,
        )


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of torch with parts that are no part of another one."""
    if type(module).__module__.startswith("torch.nn.") and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        if any(True for _ in module.children()):
            yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _is_ours(item: Any) -> bool:
    """True for implementations that pieces can run: without a guard on weights, and not one of cuDNN's plans."""
    return item.guard is None and not item.name.startswith(cudnn.PREFIX)
