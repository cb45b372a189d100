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

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.announcing import bettered, planned, tell, warn
from monetlite.core.costs import Profile, without_costs
from monetlite.core.errors import (
    IllegalSchedule,
    InfeasibleBudget,
    ModelError,
    MonetliteError,
    ProfileError,
    TraceError,
)
from monetlite.core.graph import AS_TRACED
from monetlite.core.interrupts import interrupts_kept
from monetlite.core.joining import JoinedStep, Piece, join
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, check_legal
from monetlite.core.units import format_bytes, is_percentage, parse_budget
from monetlite.core.weak_calls import weakly
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals.torch_aot import keeps_gradients
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
from monetlite.operators import cudnn
from monetlite.operators.random import forked_state
from monetlite.planning.beside_training import PlanningBesideTraining, least_stored
from monetlite.profiling.memory_use import workspaces_bytes
from monetlite.profiling.step_additions import with_additions
from monetlite.runtime.breaks import Breaks
from monetlite.runtime.buffers import eager
from monetlite.runtime.captured_piece import CapturedPiece, SizedPiece
from monetlite.runtime.gradient_delivery import CapturedStep, Version, delivering_backend
from monetlite.runtime.lowering import lower
from monetlite.runtime.recorded_step import Given, RecordedStep
from monetlite.runtime.serving import own_bytes
from monetlite.runtime.step_record import StepRecord
from monetlite.tracing.capture import (
    Joint,
)
from monetlite.tracing.operator_graph import Traced, build_graph
from monetlite.tracing.sized_graphs import Limits
from monetlite.tracing.step_inputs import (
    autocast_dtype,
    device_of,
    on_its_gpu,
    resident_bytes,
    tensors_in_order,
)
from monetlite.tracing.whole_kernels import kernels_kept_whole

MAX_RECORDS = 4
"""Steps that are recorded, of different pieces, before the plan is left as it is; and by one plan, for its peak."""
MAX_GROWN = 16
"""The same, of larger inputs."""
GROWING, HEADROOM = 3, 1.25
"""Steps with larger inputs from which on plans are for sizes that are so many times as large."""
MAX_KINDS = 4
"""Kinds of steps that have plans."""
MAX_AWAITED = 8
"""Steps that are recorded until one comes again that runs others than the planned pieces."""
UNEXPLAINED, UNEXPLAINED_BYTES = 1e-3, 4096
"""Part of a planned peak, or bytes, by which a step by it may take more, for numbers that nobody plans."""
NOTEWORTHY = 1.02
"""Inputs that are so many times as large as the planned step's are larger."""
MAX_RETRIES = 3
"""Plans that are made, each for less memory, until one keeps to the budget in the order in which pieces run it."""


@dataclass(frozen=True)
class PlannedPieces:
    """A step in pieces that is planned: its runs in order, and the steps of those that have a backward part."""

    recorded: RecordedStep
    joined: JoinedStep
    steps: Mapping[int, tuple[Step, ...]]
    schedule: Schedule
    _carried: dict[tuple[int, SizedPiece], Version] = field(default_factory=dict)

    def next_run(self, first: int, piece: CapturedPiece) -> int | None:
        """The first run of a piece, from one on."""
        runs = self.recorded.runs
        return next((at for at in range(first, len(runs)) if runs[at].captured is piece), None)

    def begins(self, ran: Sequence[CapturedPiece]) -> bool:
        """True if the step begins with these pieces."""
        return [run.captured for run in self.recorded.runs[: len(ran)]] == ran

    def version(self, run: int, piece: SizedPiece) -> Version:
        """The programs of a run on a piece that serves as its own."""
        own, planned_for = self.steps.get(run), self.recorded.runs[run].piece
        if own is None:
            return piece.captured.least
        if piece is planned_for:
            return piece.version(own)
        if (run, piece) not in self._carried:
            steps = piece.carried_over(own, planned_for)
            self._carried[run, piece] = piece.captured.least if steps is None else piece.version(steps)
        return self._carried[run, piece]


class PiecewiseTraining:
    """The training steps of a model in pieces, within a budget.

    `backend` captures each piece. `step_begins` and `forward_ends` stand around each forward pass.

    Args:
        model, budget, wait: as for `MONeTWrapper`.
        pricing, solving: options.
        reason: why the model can't be captured whole.
        before_bytes: of an earlier plan's budget, for steps that no share of their own is enough for.

    Attributes:
        schedule: of the last step; None before one is planned, and where nothing can be.
        sizes: of what the pieces take, as captures see them.
        left_out: functions that can't be planned whole, from the outermost on: those that they call are. None where
            whoever compiles doesn't take them back (`torch_dynamo.left_out`): then none are.
        lost: True before the first step, and after a step in which nothing of the plan ran.
        again: what captures compile in one step after another.
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
        self.schedule: Schedule | None = None
        self.lost = True
        self.left_out: set[CodeType] | None = None
        self._held_elsewhere, self._budget, self._wait = weakref.ref(model), budget, wait
        self._before_bytes = before_bytes  # the most of all plans' so far
        self._pricing, self._solving = pricing, solving
        self._breaks = Breaks(type(model).__name__, reason)
        self.sizes, self.again = VaryingSizes(), BreaksAgain()
        self._captured: list[CapturedStep] = []
        self._known = 0  # captured graphs when the last step ended
        self._next = self._unplanned_runs = 0
        """Number of the next planned run of the present step, and of runs that the plan does not have."""
        self._larger = self._outgrown = False
        """The present step has larger inputs than the planned one; it or one of its runs has."""
        self._plans: list[PlannedPieces] = []  # one for each kind of steps, the last that was made first
        self._now: PlannedPieces | None = None  # that of the present step
        self._ran: list[CapturedPiece] = []  # in the present step
        self._planning: PlanningBesideTraining | None = None
        self._record: StepRecord | None = None
        self._budget_bytes = 0
        self._priced: JoinedStep | None = None
        """The planned step with the costs that it was planned by."""
        self._profiles: Mapping[Any, Profile] = {}
        """The priced profiles of its pieces."""
        self._unexplained_bytes = 0
        """Bytes that a step by the last plan took beyond the peak that follows from these."""
        self._records = self._grown = self._settles = self._steps = 0
        self._wanted = True  # the next step is to be recorded
        self._awaited = 0  # steps to be recorded until one comes again that runs others than the planned pieces
        self._settling = self._settled = False
        """The next record is of a step by the final plan; that has given the plan's peak."""
        self._measured_bytes: int | None = None
        """Bytes of the largest inputs of steps that were measured, where nothing is planned."""
        self._border = time.monotonic()

    @property
    def _model(self) -> nn.Module:
        model = self._held_elsewhere()  # torch.compile keeps backends for good, and they keep this object
        assert model is not None
        return model

    @property
    def _plan(self) -> PlannedPieces | None:
        """The last plan that was made."""
        return self._plans[0] if self._plans else None

    def step_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Go on planning, before the forward pass of a step.

        Raises:
            TraceError: nothing can be planned, and plain training does not keep to the budget.
            Those of `monetlite.optimize`.
        """
        self._go_on()
        # The first piece: an output that the loss doesn't use keeps later ones open.
        if any(step.open_runs() for step in self._captured[:1]):
            self._breaks.warn_of_runs()
        self._next = self._unplanned_runs = 0
        self._steps += 1
        input_bytes = own_bytes(tensors_among((args, kwargs)))
        planned_bytes = max((plan.recorded.given.size_bytes for plan in self._plans), default=math.inf)
        self._larger = self._outgrown = input_bytes > NOTEWORTHY * planned_bytes
        self._now, self._ran = max(self._plans, key=lambda plan: len(plan.recorded.runs), default=None), []
        if self._larger:
            self._wanted = self._grown < MAX_GROWN
        if self._measured_bytes is not None:
            self._wanted = input_bytes > self._measured_bytes
        if self._wanted and self._steps > 1:
            self._begin_record(args, kwargs)

    def forward_ends(self) -> None:
        """Note that the forward pass of a step has ended."""
        captured, self._known = len(self._captured) > self._known, len(self._captured)
        self.again.step_ends(in_vain=self._plan is not None and not captured)
        self.lost = self._plan is not None and self._next + self._unplanned_runs == 0
        self.sizes.first_step = False
        if self._plan is not None and captured:
            self._breaks.warn_of_captures()
        if self._record is not None:
            self._record.forward_ends()
        if self._plan is None:
            return
        if self._now is not None:
            self.schedule = self._now.schedule
        self._settling = self._unplanned_runs == 0
        if self._record is not None:
            self._awaited = max(0, self._awaited - 1) if self._settling else 0
            self._wanted = self._awaited > 0
        elif self._settling:
            self._wanted = self._planning is None and not self._settled and self._settles < MAX_RECORDS
        elif not self._larger and self._settles < 2 * MAX_AWAITED:
            self._wanted = self._grown < MAX_GROWN if self._outgrown else self._records < MAX_RECORDS
            self._awaited = MAX_AWAITED if self._wanted else 0

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
            self._captured.append(step)

        try:
            with on_its_gpu(graph, inputs), kernels_kept_whole():
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
        piece.step.versions = [self._meant(piece, sizes)]
        if self._record is None:
            return call(*arguments)
        self._record.run_begins(piece, arguments)
        outputs = call(*arguments)
        self._record.run_ends(arguments, outputs)
        return outputs

    def _meant(self, piece: CapturedPiece, sizes: Limits) -> Version:
        """The programs that are planned for the next run of the present step; else those that store least.

        Planned runs are taken in order. Some may be left out, as where layers are dropped at random. Of a step with
        larger inputs than the planned one's, none are taken: code between the pieces takes more, too.
        """
        self._ran.append(piece)
        if self._now is None or self._larger:
            self._unplanned_runs += self._larger
            return piece.least
        found = self._now.next_run(self._next, piece)
        if found is None and (other := next((plan for plan in self._plans if plan.begins(self._ran)), None)):
            self._now, found = other, len(self._ran) - 1
        runs = self._now.recorded.runs
        to_come = range(self._next, len(runs))
        if found is not None:
            self._next = found + 1
            if runs[found].piece.serves(sizes):
                return self._now.version(found, runs[found].piece)
            self._outgrown = True
        else:
            own = piece.serving(sizes)
            found = next((at for at in to_come if own is not None and own.serves_as(runs[at].piece)), None)
            if own is not None and found is not None:
                self._next = found + 1
                return self._now.version(found, own)
        self._unplanned_runs += 1
        return piece.least

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
        self._wanted = False

    def _watch(self, piece: CapturedPiece, ends: bool) -> None:
        if self._record is not None:
            self._record.backward(piece, ends)

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
                    self._settles += self._settling
                    self._records += not self._settling and not self._outgrown
                    self._grown += not self._settling and self._outgrown
                    try:
                        self._learn(recorded)
                    except BaseException:
                        self._plans, self._wanted = [], True  # no step goes on unplanned, unsaid
                        raise
                elif self._plan is None:
                    self._wanted = True
            elif self._planning is not None:
                better, plan = self._planning.advance(now - self._border), self._plan
                if better is not None and plan is not None and self._take(plan.recorded, plan.joined, better):
                    self._planning.told.append(bettered(plan.schedule, better))
                while self._planning.told:
                    tell(self._planning.told.pop(0))
                if self._planning.finished:
                    self._planning = None
        self._border = time.monotonic()

    def _learn(self, recorded: RecordedStep) -> None:
        """Plan for a recorded step, or see that it kept to the budget where none of it can be planned."""
        if self._settling and self._plan is not None:
            # A pass that comes again keeps more than a plan counts, which no other plan would mend.
            final = self._planning is None and recorded.runs_as(self._plan.recorded) and not recorded.repeats
            if final and not self._settle(recorded) and self._records < MAX_RECORDS:
                self._records += 1
                self._plan_for(recorded)
            return
        if recorded.planned:
            self._measured_bytes = None
            self._plan_for(recorded)
            return
        if self._plan is not None or (not recorded.in_order and self._records < MAX_RECORDS):
            self._wanted = self._plan is None
            return
        peak_bytes = recorded.peak_bytes
        budget_bytes = max(parse_budget(self._budget, peak_bytes), self._before_bytes)
        if recorded.in_order:
            said = "None of it can be planned, so it trains as it is"
        else:
            said = (
                "Its pieces can't be planned together, as their backward parts don't run once each after the "
                "forward pass, so each stores as little as it can"
            )
        said = f"{said}, and a step takes {format_bytes(peak_bytes)} of the budget of {format_bytes(budget_bytes)}"
        if is_percentage(self._budget) and budget_bytes > self._before_bytes:
            said += f" ({self._budget} of that)"
        if peak_bytes > budget_bytes:
            raise TraceError(
                f"{type(self._model).__name__} can't be captured whole. {said}: raise the budget, or change what "
                f"can't be captured:{self._breaks.listed}"
            ) from self._breaks.reason
        if self._measured_bytes is None:
            warn(f"{type(self._model).__name__} can't be captured whole. {said}:{self._breaks.listed}")
        self._measured_bytes = recorded.given.size_bytes

    def _settle(self, recorded: RecordedStep) -> bool:
        """Take the peak of the final plan from a step that ran by it; False if it exceeds the budget.

        What code between pieces takes may depend on the plan, as where it asks for gradients of a piece.
        """
        assert self._plan is not None
        self._priced, self._settled, self._unexplained_bytes = self._joined(recorded, self._profiles), True, 0
        peak_bytes = self._peak_bytes(self._plan.schedule)
        if recorded.peak_bytes > peak_bytes + max(UNEXPLAINED * peak_bytes, UNEXPLAINED_BYTES):
            self._unexplained_bytes = recorded.peak_bytes - peak_bytes
            peak_bytes = recorded.peak_bytes
        if peak_bytes <= self._budget_bytes:
            self._use(replace(self._plan, schedule=replace(self._plan.schedule, peak_bytes=peak_bytes)))
        return peak_bytes <= self._budget_bytes

    def _use(self, plan: PlannedPieces) -> None:
        """Have a plan in the place of the one for the same kind of steps, or else of the shortest."""
        others = [known for known in self._plans if not plan.recorded.is_like(known.recorded)]
        longest = sorted(others, key=lambda known: len(known.recorded.runs))[1 - MAX_KINDS :]
        self._plans, self.schedule = [plan, *longest], plan.schedule

    def _plan_for(self, recorded: RecordedStep) -> None:
        """Plan for a recorded step: with room where inputs grow, for the sizes of the planned one, too, or its own.

        Raises:
            InfeasibleBudget, ModelError, ProfileError: no plan was found, and there is no other, or the step
                exceeded the budget.
        """
        alike = next((plan.recorded for plan in self._plans if recorded.is_like(plan.recorded)), None)
        choices = [recorded] if alike is None else [recorded.covering(alike), recorded]
        if self._outgrown and self._grown >= GROWING:
            choices.insert(0, choices[0].enlarged(HEADROOM))
        before = self._priced, self._profiles, self._budget_bytes
        for wanted in choices:
            try:
                self._begin_plan(wanted)
                return
            except (InfeasibleBudget, ModelError, ProfileError, TraceError) as error:
                self._priced, self._profiles, self._budget_bytes = before
                problem: MonetliteError = error
                # Sizes that add up to a fixed one, as experts' tokens do, can't all grow.
                if isinstance(error, ProfileError):
                    self._grown = MAX_GROWN
        # A share of plain training's peak is another budget for each size.
        budget_bytes = problem.budget_bytes if isinstance(problem, InfeasibleBudget) else self._budget_bytes
        exceeded = recorded.peak_bytes > budget_bytes
        if not isinstance(problem, TraceError) and (self._plan is None or exceeded):
            raise problem
        tell(f"no plan was made for this step: {problem}")  # such steps store little of what the plan leaves out
        self._wanted = self._plan is None and self._records < MAX_RECORDS

    def _begin_plan(self, recorded: RecordedStep, budget: str | int | float | None = None) -> None:
        self._settled, self._settles = False, 0
        pieces = list(dict.fromkeys(recorded.runs[number].piece for number in recorded.planned))
        graphs = [piece.traced.graph for piece in pieces]

        def joined(profiles: Sequence[Profile]) -> JoinedStep:
            return self._joined(recorded, dict(zip(pieces, profiles, strict=True)))

        def step(profiles: list[Profile]) -> list[Profile]:
            ours = [profile.restricted(_is_ours) for profile in profiles]
            self._profiles = dict(zip(pieces, ours, strict=True))
            self._priced = joined(ours)
            return [self._priced.profile]

        first = self.schedule is None
        planning = PlanningBesideTraining(graphs, budget or self._budget, self._pricing, self._solving, step)
        try:
            schedule = planning.best() if self._wait else planning.first()
        except InfeasibleBudget as error:
            if self._before_bytes <= error.budget_bytes:
                raise
            return self._begin_plan(recorded, self._before_bytes)
        self._budget_bytes = schedule.budget_bytes
        self._before_bytes = max(self._before_bytes, self._budget_bytes)
        for _ in range(MAX_RETRIES):
            excess_bytes = self._peak_bytes(schedule) - self._budget_bytes
            if excess_bytes <= 0:
                break
            planning.take_off(excess_bytes)
            schedule = planning.best() if self._wait else planning.first()
        if not self._take(recorded, joined([without_costs(graph) for graph in graphs]), schedule):
            raise ModelError(
                "no plan of the pieces keeps to the budget in the order in which they run; raise the budget by "
                "some percent, and please report this with the model"
            )
        self._planning = None if planning.finished else planning
        if first:
            of_whole_models = self._pricing.compile or self._pricing.layout not in (None, AS_TRACED)
            ignored = " Layouts and compile=True are of whole models only." if of_whole_models else ""
            self._breaks.warn_of_pieces(recorded, ignored)
        tell(f"plan of {len(recorded.planned)} pieces: {planned(schedule)}")

    def _joined(self, recorded: RecordedStep, profiles: Mapping[Any, Profile]) -> JoinedStep:
        """The recorded step, by any plan of its pieces."""
        pieces = []
        for run in (recorded.runs[number] for number in recorded.planned):
            values = run.piece.gradient_values([*run.takers, *run.parameters])
            added = frozenset(values[at] for at in run.added if at in values)
            taken = [
                (values[at], taker) for at, taker in run.takers.items() if at in values and at not in run.added
            ]
            handed_back = {value: min(taker for of, taker in taken if of == value) for value, _ in taken}
            once = run.piece.readers(run.changed, run.outputs_changed)
            avoided = run.piece.readers_of_outputs() if run.outputs_changed else frozenset()
            profile = profiles[run.piece]
            held = run.as_recorded.held_outputs(run.held_bytes)
            gone = {
                value: run.gone[size]
                for value, size in run.as_recorded.output_bytes.items()
                if size in run.gone and value not in held
            }
            pieces.append(
                Piece(
                    profile=profile,
                    handed_back=handed_back,
                    added=added - handed_back.keys(),
                    held=held,
                    gone=gone,
                    once=once,
                    avoided=avoided,
                )
            )
        return join(
            type(self._model).__name__,
            pieces,
            recorded.outside,
            resident=recorded.given.resident,
            inputs=recorded.given.specs,
            keeps_gradients=keeps_gradients(),
        )

    def _take(self, recorded: RecordedStep, joined: JoinedStep, schedule: Schedule) -> bool:
        """Run the steps to come by a schedule of a recorded step; False if its steps can't be run in pieces."""
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
        schedule = replace(schedule, peak_bytes=peak_bytes, budget_bytes=self._budget_bytes)
        self._use(PlannedPieces(recorded, joined, steps, schedule))
        return True

    def _peak_bytes(self, schedule: Schedule) -> int:
        """The peak of a schedule as the pieces run it."""
        assert self._priced is not None
        profile = with_additions(self._priced.profile, self._pricing)
        steps = self._priced.in_order(schedule.choices.steps(profile.graph))
        return simulate(profile, steps).peak_bytes + self._unexplained_bytes


def _is_ours(item: Any) -> bool:
    """True for implementations that pieces can run: without a guard on weights, and not one of cuDNN's plans."""
    return item.guard is None and not cudnn.is_plan(item.name)
