"""Planned steps of a model in pieces, and the place in one of them that a step has come to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from monetlite.core.joining import JoinedStep
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.runtime.captured_piece import CapturedPiece, SizedPiece
from monetlite.runtime.gradient_delivery import Version
from monetlite.runtime.recorded_step import RecordedStep
from monetlite.tracing.sized_graphs import Limits

NOTEWORTHY = 1.02
"""Inputs that are so many times as large as the planned step's are larger."""


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

    def next_like(self, first: int, piece: SizedPiece) -> int | None:
        """The first run whose steps a piece can run as its own, from one on."""
        runs = self.recorded.runs
        return next((at for at in range(first, len(runs)) if piece.serves_as(runs[at].piece)), None)

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


class StepOfPieces:
    """A step of a model in pieces: which programs run next, by the plan that it follows so far.

    Args:
        plans: one for each kind of steps.
        input_bytes: of its inputs.

    Attributes:
        plan: that it follows: the one of most runs, until the step runs other pieces. None if there is none.
        larger: its inputs are larger than those of the planned steps.
        outgrown: its inputs are, or those of one of its runs.
        ran: the pieces that ran so far, in order.
        unplanned_runs: those of them that no plan was followed in.
    """

    def __init__(self, plans: Sequence[PlannedPieces] = (), input_bytes: int = 0) -> None:
        planned_bytes = max((plan.recorded.given.size_bytes for plan in plans), default=math.inf)
        self.larger = self.outgrown = input_bytes > NOTEWORTHY * planned_bytes
        self.plan = max(plans, key=lambda plan: len(plan.recorded.runs), default=None)
        self.unplanned_runs = 0
        self._plans = plans
        self.ran: list[CapturedPiece] = []
        self._next = 0  # number of the next planned run

    def version(self, piece: CapturedPiece, sizes: Limits) -> Version:
        """The programs that are planned for the next run, which is of a piece; else those that store least.

        Planned runs are taken in order. Some may be left out, as where layers are dropped at random. A piece that
        the plan doesn't have may take the run of one with the same operators. Of a step with larger inputs than the
        planned one's, none are taken: code between the pieces takes more, too.
        """
        self.ran.append(piece)
        if self.plan is None or self.larger:
            self.unplanned_runs += self.larger
            return piece.least
        at = self.plan.next_run(self._next, piece)
        if at is None and (other := next((plan for plan in self._plans if plan.begins(self.ran)), None)):
            self.plan, at = other, len(self.ran) - 1
        if at is not None:
            self._next = at + 1
            planned = self.plan.recorded.runs[at].piece
            if planned.serves(sizes):
                return self.plan.version(at, planned)
            self.outgrown = True
        elif (own := piece.serving(sizes)) and (at := self.plan.next_like(self._next, own)) is not None:
            self._next = at + 1
            return self.plan.version(at, own)
        self.unplanned_runs += 1
        return piece.least
