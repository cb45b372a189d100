"""The plans of a model in pieces: schedules of recorded steps, of all pieces under one budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from monetlite.core.announcing import bettered, tell
from monetlite.core.costs import Profile, without_costs
from monetlite.core.errors import (
    IllegalSchedule,
    InfeasibleBudget,
    ModelError,
    MonetliteError,
    ProfileError,
    TraceError,
)
from monetlite.core.joining import JoinedStep, Piece, join
from monetlite.core.options import PricingOptions, SolvingOptions
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import check_legal
from monetlite.core.units import format_bytes, is_percentage, parse_budget
from monetlite.fx.torch_internals.torch_aot import keeps_gradients
from monetlite.operators import cudnn
from monetlite.planning.beside_training import PlanningBesideTraining
from monetlite.profiling.step_additions import with_additions
from monetlite.runtime.planned_pieces import PlannedPieces
from monetlite.runtime.recorded_step import PieceRun, RecordedStep

MAX_KINDS = 4
"""Kinds of steps that have plans."""
UNEXPLAINED, UNEXPLAINED_BYTES = 1e-3, 4096
"""Part of a planned peak, or bytes, by which a step by it may take more, for numbers that nobody plans."""
MAX_RETRIES = 3
"""Plans that are made, each for less memory, until one keeps to the budget in the order in which pieces run it."""


class PiecesPlanning:
    """The plans of a model in pieces within a budget, and the search for a better one beside training.

    Args:
        model: its name.
        budget, wait: as for `MONeTWrapper`.
        pricing, solving: options.
        before_bytes: of an earlier plan's budget, for steps that no share of their own is enough for.

    Attributes:
        plans: one for each kind of steps, the last that was made first.
        fixed: True once a step couldn't be planned for larger inputs.
    """

    def __init__(
        self,
        model: str,
        budget: str | int | float,
        pricing: PricingOptions,
        solving: SolvingOptions,
        wait: bool,
        before_bytes: int,
    ) -> None:
        self.plans: list[PlannedPieces] = []
        self.fixed = False
        self._model, self._budget, self._wait = model, budget, wait
        self._pricing, self._solving = pricing, solving
        self._before_bytes = before_bytes  # the most of all plans' so far
        self._search: PlanningBesideTraining | None = None
        self._budget_bytes = 0
        self._priced: JoinedStep | None = None
        """The planned step with the costs that it was planned by."""
        self._profiles: Mapping[Any, Profile] = {}
        """The priced profiles of its pieces."""
        self._unexplained_bytes = 0
        """Bytes that a step by the last plan took beyond the peak that follows from these."""

    @property
    def last(self) -> PlannedPieces | None:
        """The last plan that was made."""
        return self.plans[0] if self.plans else None

    @property
    def searching(self) -> bool:
        """True while a better plan than the last is looked for."""
        return self._search is not None

    def budget_of(self, peak_bytes: int) -> tuple[int, str]:
        """The budget, in bytes and in words, of a step that takes so much as it is."""
        own_bytes = parse_budget(self._budget, peak_bytes)
        share = (
            f" ({self._budget} of that)" if is_percentage(self._budget) and own_bytes > self._before_bytes else ""
        )
        size_bytes = max(own_bytes, self._before_bytes)
        return size_bytes, f"{format_bytes(size_bytes)}{share}"

    def advance(self, step_seconds: float) -> None:
        """Go on looking for a better plan, for a share of the last step's seconds."""
        assert self._search is not None
        better, plan = self._search.advance(step_seconds), self.last
        if better is not None and plan is not None and self._take(plan.recorded, plan.joined, better):
            self._search.told.append(bettered(plan.schedule, better))
        while self._search.told:
            tell(self._search.told.pop(0))
        if self._search.finished:
            self._search = None

    def plan_for(self, recorded: RecordedStep, headroom: float) -> bool:
        """Plan for a recorded step at the largest of these sizes that a plan is found for.

        Those of larger inputs, where inputs grow; its own and those of the plan for the same kind of step; its own.

        Args:
            recorded: the step.
            headroom: how many times as large inputs are to be planned for, if they can be; 1 for no larger ones.

        Returns:
            False if no plan was found, and the step keeps to the budget by the ones there are.

        Raises:
            InfeasibleBudget, ModelError, ProfileError: no plan was found, and there is no other, or the step
                exceeded the budget.
        """
        alike = next((plan.recorded for plan in self.plans if recorded.is_like(plan.recorded)), None)
        choices = [recorded] if alike is None else [recorded.covering(alike), recorded]
        if headroom > 1:
            choices.insert(0, choices[0].enlarged(headroom))
        before = self._priced, self._profiles, self._budget_bytes
        for wanted in choices:
            try:
                self._begin(wanted, self._budget)
                return True
            except (InfeasibleBudget, ModelError, ProfileError, TraceError) as error:
                self._priced, self._profiles, self._budget_bytes = before
                problem: MonetliteError = error
                # Sizes that add up to a fixed one, as experts' tokens do, can't all grow.
                self.fixed |= isinstance(error, ProfileError)
        # A share of plain training's peak is another budget for each size.
        budget_bytes = problem.budget_bytes if isinstance(problem, InfeasibleBudget) else self._budget_bytes
        exceeded = recorded.peak_bytes > budget_bytes
        if not isinstance(problem, TraceError) and (self.last is None or exceeded):
            raise problem
        tell(f"no plan was made for this step: {problem}")  # such steps store little of what the plan leaves out
        return False

    def _begin(self, recorded: RecordedStep, budget: str | int | float) -> None:
        """Take the first plan for a recorded step, and begin to look for a better one.

        Raises:
            InfeasibleBudget, ModelError, ProfileError, TraceError: no plan was found.
        """
        pieces = list(dict.fromkeys(recorded.runs[number].piece for number in recorded.planned))
        graphs = [piece.traced.graph for piece in pieces]

        def joined(profiles: Sequence[Profile]) -> JoinedStep:
            return self._joined(recorded, dict(zip(pieces, profiles, strict=True)))

        def step(profiles: list[Profile]) -> list[Profile]:
            ours = [profile.restricted(_is_ours) for profile in profiles]
            self._profiles = dict(zip(pieces, ours, strict=True))
            self._priced = joined(ours)
            return [self._priced.profile]

        search = PlanningBesideTraining(graphs, budget, self._pricing, self._solving, step)
        found: Callable[[], Schedule] = search.best if self._wait else search.first
        try:
            schedule = found()
        except InfeasibleBudget as error:
            if self._before_bytes <= error.budget_bytes:
                raise
            return self._begin(recorded, self._before_bytes)
        self._budget_bytes = schedule.budget_bytes
        self._before_bytes = max(self._before_bytes, self._budget_bytes)
        more_bytes = 0  # that plans take in pieces, beyond what they are solved for
        for _ in range(MAX_RETRIES):
            peak_bytes = self._peak_bytes(schedule)
            if peak_bytes <= self._budget_bytes:
                break
            search.take_off(peak_bytes - schedule.peak_bytes - more_bytes)
            more_bytes = peak_bytes - schedule.peak_bytes
            try:
                schedule = found()
            except InfeasibleBudget as error:
                raise self._of_all(error, more_bytes) from None
        if not self._take(recorded, joined([without_costs(graph) for graph in graphs]), schedule):
            raise ModelError(
                "no plan of the pieces keeps to the budget in the order in which they run; raise the budget by "
                "some percent, and please report this with the model"
            )
        self._search = None if search.finished else search

    def _of_all(self, error: InfeasibleBudget, more_bytes: int) -> InfeasibleBudget:
        """The error of a budget that so much was taken off, as one of the whole budget."""
        reached_bytes = None if error.reached_bytes is None else error.reached_bytes + more_bytes
        enough = "" if reached_bytes is None else f" to about {format_bytes(reached_bytes)} ({reached_bytes} bytes)"
        return InfeasibleBudget(
            f"in pieces, plans take up to {format_bytes(more_bytes)} more than they are solved for, and the budget "
            f"is {format_bytes(self._budget_bytes)}. Raise it{enough}. Within what is left: {error}",
            budget_bytes=self._budget_bytes,
            proven_bytes=error.proven_bytes,
            reached_bytes=reached_bytes,
        )

    def settle(self, recorded: RecordedStep) -> bool:
        """Take the peak of the final plan from a step that ran by it; False if it exceeds the budget.

        What code between pieces takes may depend on the plan, as where it asks for gradients of a piece.
        """
        plan = self.plans[0]
        self._priced, self._unexplained_bytes = self._joined(recorded, self._profiles), 0
        peak_bytes = self._peak_bytes(plan.schedule)
        if recorded.peak_bytes > peak_bytes + max(UNEXPLAINED * peak_bytes, UNEXPLAINED_BYTES):
            self._unexplained_bytes = recorded.peak_bytes - peak_bytes
            peak_bytes = recorded.peak_bytes
        if peak_bytes <= self._budget_bytes:
            self._use(replace(plan, schedule=replace(plan.schedule, peak_bytes=peak_bytes)))
        return peak_bytes <= self._budget_bytes

    def _use(self, plan: PlannedPieces) -> None:
        """Have a plan in the place of the one for the same kind of steps, or else of the shortest."""
        others = [known for known in self.plans if not plan.recorded.is_like(known.recorded)]
        longest = sorted(others, key=lambda known: len(known.recorded.runs))[1 - MAX_KINDS :]
        self.plans = [plan, *longest]

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

    def _joined(self, recorded: RecordedStep, profiles: Mapping[Any, Profile]) -> JoinedStep:
        """The recorded step, by any plan of its pieces."""
        runs = [recorded.runs[number] for number in recorded.planned]
        return join(
            self._model,
            [_as_piece(run, profiles[run.piece]) for run in runs],
            recorded.outside,
            resident=recorded.given.resident,
            inputs=recorded.given.specs,
            keeps_gradients=keeps_gradients(),
        )


def _as_piece(run: PieceRun, profile: Profile) -> Piece:
    """A run of a piece, as a part of the step that it is joined to."""
    values = run.piece.gradient_values([*run.takers, *run.parameters])
    added = frozenset(values[at] for at in run.added if at in values)
    taken = [(values[at], taker) for at, taker in run.takers.items() if at in values and at not in run.added]
    handed_back = {value: min(taker for of, taker in taken if of == value) for value, _ in taken}
    held = run.as_recorded.held_outputs(run.held_bytes)
    gone = {
        value: run.gone[size]
        for value, size in run.as_recorded.output_bytes.items()
        if size in run.gone and value not in held
    }
    return Piece(
        profile=profile,
        handed_back=handed_back,
        added=added - handed_back.keys(),
        held=held,
        gone=gone,
        once=run.piece.readers(run.changed, run.outputs_changed),
        avoided=run.piece.readers_of_outputs() if run.outputs_changed else frozenset(),
    )


def _is_ours(item: Any) -> bool:
    """True for implementations that pieces can run: without a guard on weights, and not one of cuDNN's plans."""
    return item.guard is None and not cudnn.is_plan(item.name)
