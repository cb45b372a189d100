"""Training of a model that TorchDynamo takes apart: the pieces that it captures, by plans under one budget.

| step | what runs |
| --- | --- |
| 1 | each piece is captured; it stores as little as it can and recomputes the rest |
| 2 | the same, while memory and time between the pieces are recorded |
| 3 and on | by a schedule of the whole step: the pieces joined with what was recorded (`core.joining`) |

A piece may run several times in a step, by another plan each time. A step may leave planned runs out. Where it
runs other pieces than the planned step, or more, those run by the programs of step 1, and such a step is recorded
and planned, too: a model may have several kinds of steps, as one with two tasks has.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.announcing import planned, tell, warn
from monetlite.core.errors import TraceError
from monetlite.core.graph import AS_TRACED
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.core.weak_calls import weakly
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals.torch_dynamo import (
    RESTARTS,
    UNSUPPORTED,
    BreaksAgain,
    LeftOut,
    break_reason,
    captured_code,
)
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.fx.torch_internals.torch_varying import VaryingSizes
from monetlite.fx.whole_numbers import WithoutNumbers
from monetlite.operators.random import forked_state
from monetlite.planning.beside_training import least_stored
from monetlite.profiling.memory_use import workspaces_bytes
from monetlite.runtime.breaks import Breaks
from monetlite.runtime.buffers import eager
from monetlite.runtime.captured_piece import CapturedPiece
from monetlite.runtime.gradient_delivery import CapturedStep, delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.open_runs import OpenRuns
from monetlite.runtime.pieces_planning import PiecesPlanning
from monetlite.runtime.planned_pieces import StepOfPieces
from monetlite.runtime.recorded_step import Given, RecordedStep
from monetlite.runtime.recording_policy import RecordingPolicy
from monetlite.runtime.serving import own_bytes
from monetlite.runtime.step_record import StepRecord
from monetlite.tracing.capture import Joint
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.step_inputs import (
    autocast_dtype,
    device_of,
    on_its_gpu,
    resident_bytes,
    tensors_in_order,
)


class PiecewiseTraining:
    """The training steps of a model in pieces, within a budget.

    `backend` captures each piece. `step_begins` and `forward_ends` stand around each forward pass.

    Args:
        model, budget, wait: as for `MONeTWrapper`.
        pricing, solving: options.
        reason: why the model can't be captured whole.
        before_bytes: of an earlier plan's budget, for steps that no share of their own is enough for.

    Attributes:
        sizes: of what the pieces take, as captures see them.
        left_out: functions that can't be planned whole, from the outermost on: those that they call are. None where
            whoever compiles doesn't take them back (`torch_dynamo.left_out`): then none are.
        lost: True before the first step, and after a planned step in which no piece ran.
        again: functions that are compiled up to a break in one step after another.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: str | int | float,
        pricing: PricingOptions,
        solving: SolvingOptions,
        wait: bool,
        reason: TraceError,
        before_bytes: int = 0,
    ) -> None:
        self.lost = True
        self.left_out: set[CodeType] | None = None
        self._weak_model = weakref.ref(model)
        self._pricing = pricing
        self._breaks = Breaks(type(model).__name__, reason)
        self.sizes, self.again = VaryingSizes(), BreaksAgain()
        self._captured: list[CapturedStep] = []
        self._runs = OpenRuns(None, None, None)  # of the first piece: an unused output keeps later ones open
        self._known = 0  # captured graphs when the last step ended
        self._planning = PiecesPlanning(type(model).__name__, budget, pricing, solving, wait, before_bytes)
        self._policy = RecordingPolicy()
        self._step = StepOfPieces()  # the present one
        self._record: StepRecord | None = None
        self._border = time.monotonic()

    @property
    def _model(self) -> nn.Module:
        model = self._weak_model()  # torch.compile keeps backends for good, and they keep this object
        assert model is not None
        return model

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the last step; None before one is planned, and where nothing can be."""
        return None if self._step.plan is None else self._step.plan.schedule

    def step_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Go on planning, before the forward pass of a step.

        Raises:
            TraceError: nothing can be planned, and plain training does not keep to the budget.
            Those of `monetlite.optimize`.
        """
        self._go_on()
        input_bytes = own_bytes(tensors_among((args, kwargs)))
        self._runs.begin(None, input_bytes)
        if self._runs.most > 1:
            self._breaks.warn_of_runs()
        self._step = StepOfPieces(self._planning.plans, input_bytes)
        if self._policy.step_begins(self._step.larger, input_bytes):
            self._begin_record(args, kwargs)

    def forward_ends(self) -> None:
        """Note that the forward pass of a step has ended."""
        captured, self._known = len(self._captured) > self._known, len(self._captured)
        planned = self._step.plan is not None
        self.again.step_ends(in_vain=planned and not captured)
        self.lost = planned and not self._step.ran
        self.sizes.first_step = False
        if planned and captured:
            self._breaks.warn_of_captures()
        if self._record is not None:
            self._record.forward_ends()
        if planned:
            self._policy.planned_step_ends(self._step, self._record is not None, self._planning.searching)

    def forward_fails(self) -> None:
        """Note that an exception ended the forward pass of a step. Nothing is learnt of it."""
        if self._record is not None:
            self._record.end()

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture a piece; one that can't be planned runs as in plain training."""
        self._breaks.note(graph)
        try:
            rest = WithoutNumbers(graph, inputs, as_tensors=True)
        except TraceError:  # sizes, which the piece is planned for
            return self._planned_piece(graph, inputs)
        return rest.joined(self._planned_piece(rest.graph, rest.inputs))

    def _planned_piece(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        pieces: list[CapturedPiece] = []
        autocast = autocast_dtype(device_of(graph, inputs))
        handed_on = [at for at, item in enumerate(inputs) if isinstance(item, torch.Tensor) and not item.is_leaf]

        def build(joint: Joint, given: Sequence[Any]) -> Traced:
            return build_graph(joint, graph, (tuple(given), {}), autocast=autocast, handed_on=handed_on)

        def partition(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
            if not Reachability(joint.graph.graph, joint.forward_outputs).takes_arguments:
                raise TraceError("it changes an input that shares memory with another")
            pieces.append(CapturedPiece(joint, build, inputs))
            first = pieces[-1].first
            return lower(first.traced, least_stored(first.traced.graph, first.readers(first.unsaved(inputs))))

        def keep(step: CapturedStep) -> None:
            piece = pieces[-1]
            piece.step, (piece.least,) = step, step.versions
            step.watch = weakly(self._watch, piece)
            if not self._captured:
                self._runs.keep(step)
            self._captured.append(step)

        try:
            with on_its_gpu(graph, inputs):
                call = delivering_backend(partition, eager, keep, holds_inputs=False)(graph, inputs)
        except RESTARTS:
            raise
        except UNSUPPORTED as error:
            self._breaks.note_unplanned(error)
            raise
        except Exception as error:
            if any(isinstance(item, torch.SymInt) for item in inputs):
                raise self.sizes.capture_again() from error
            self._breaks.note_unplanned(error)
            if self.left_out is not None and isinstance(error, TraceError):
                code = captured_code()
                whole = break_reason(graph) is None and (self.left_out or not self._captured)
                if whole or code in self.left_out:  # tried again with a break
                    self.left_out.add(code)
                    raise LeftOut(str(error)) from error
            return graph
        return weakly(self._run, pieces[-1], call) if pieces else call

    def _run(self, piece: CapturedPiece, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a piece by the programs that are planned for this place of the step."""
        sizes = piece.sizes(arguments)
        piece.step.versions = [self._step.version(piece, sizes)]
        record = self._record
        if record is None:
            return call(*arguments)
        record.run_begins(piece, arguments)
        outputs = call(*arguments)
        record.run_ends(arguments, outputs)
        return outputs

    def _begin_record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors, device = tensors_in_order(self._model, args, kwargs), device_of(self._model, (args, kwargs))
        given = Given(
            specs={f"input{number}": spec_of(tensor) for number, tensor in enumerate(tensors)},
            size_bytes=own_bytes(tensors_among((args, kwargs))),
            resident=replace(resident_bytes(self._model, tensors), libraries=workspaces_bytes(device)),
        )
        try:
            self._record = StepRecord(device, self._model.parameters(), given)
        except RuntimeError:  # somebody else profiles: at another step
            return
        self._policy.wanted = False

    def _watch(self, piece: CapturedPiece, ends: bool) -> None:
        if not ends and piece.step is self._captured[0]:
            self._runs.backward_begins()
        if self._record is not None:
            self._record.backward(piece, ends)

    def _go_on(self) -> None:
        """Plan, between two steps, as far as there is something to plan."""
        now = time.monotonic()
        if self._record is None and not self._planning.searching:
            return
        with forked_state(device_of(self._model, ())), interrupts_kept():
            if self._record is None:
                self._planning.advance(now - self._border)
            else:
                record, self._record = self._record, None
                try:
                    recorded = record.end()
                    if recorded is not None:
                        self._policy.note_record(self._step.outgrown)
                        self._learn(recorded)
                    elif self._planning.last is None:
                        self._policy.wanted = True
                except BaseException:
                    self._planning.plans, self._policy.wanted = [], True  # no step goes on unplanned, unsaid
                    raise
        self._border = time.monotonic()

    def _learn(self, recorded: RecordedStep) -> None:
        """Plan for a recorded step, or see that it kept to the budget where none of it can be planned."""
        plan = self._planning.last
        if plan is not None and self._policy.settling:
            # A pass that comes again keeps more than a plan counts, which no other plan would mend.
            if not self._planning.searching and recorded.runs_as(plan.recorded) and not recorded.repeats:
                self._policy.settled = True
                if not self._planning.settle(recorded) and self._policy.plan_again():
                    self._plan_for(recorded)
        elif recorded.planned:
            self._policy.measured_bytes = None
            self._plan_for(recorded)
        elif plan is not None or (not recorded.in_order and self._policy.may_repeat):
            self._policy.wanted = plan is None
        else:
            self._leave_as_it_is(recorded)

    def _plan_for(self, recorded: RecordedStep) -> None:
        """Plan for a recorded step, and tell of it.

        Raises:
            Those of `PiecesPlanning.plan_for`.
        """
        self._policy.plan_begins()
        try:
            found = self._planning.plan_for(recorded, self._policy.headroom(self._step.outgrown))
        finally:
            if self._planning.fixed:
                self._policy.fix_sizes()
        plan = self._planning.last
        if not found:
            self._policy.wanted = plan is None and self._policy.may_repeat
            return
        assert plan is not None
        of_whole_models = self._pricing.compile or self._pricing.layout not in (None, AS_TRACED)
        ignored = " Layouts and compile=True are of whole models only." if of_whole_models else ""
        self._breaks.warn_of_pieces(plan.recorded, ignored)
        tell(f"plan of {len(plan.recorded.planned)} pieces: {planned(plan.schedule)}")

    def _leave_as_it_is(self, recorded: RecordedStep) -> None:
        """Have steps run without a plan, where nothing can be planned.

        Raises:
            TraceError: such a step exceeds the budget.
        """
        peak_bytes = recorded.peak_bytes
        budget_bytes, budget = self._planning.budget_of(peak_bytes)
        if recorded.in_order:
            said = "None of it can be planned, so it trains as it is"
        else:
            said = (
                "Its pieces can't be planned together, as their backward parts don't run once each after the "
                "forward pass, so each stores as little as it can"
            )
        said = f"{said}, and a step takes {format_bytes(peak_bytes)} of the budget of {budget}"
        if peak_bytes > budget_bytes:
            raise TraceError(
                f"{type(self._model).__name__} can't be captured whole. {said}: raise the budget, or change what "
                f"can't be captured:{self._breaks.listed}"
            ) from self._breaks.reason
        if self._policy.measured_bytes is None:
            warn(f"{type(self._model).__name__} can't be captured whole. {said}:{self._breaks.listed}")
        self._policy.measured_bytes = recorded.given.size_bytes
