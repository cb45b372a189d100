"""Which steps of a model in pieces are recorded: to plan them, and to see what memory the final plan takes."""

from monetlite.runtime.planned_pieces import StepOfPieces

MAX_RECORDS = 4
"""Steps that are recorded, of different pieces, before the plan is left as it is; and by one plan, for its peak."""
MAX_GROWN = 16
"""The same, of larger inputs."""
GROWING, HEADROOM = 3, 1.25
"""Steps with larger inputs from which on plans are for sizes that are so many times as large."""
MAX_AWAITED = 8
"""Steps that are recorded until one comes again that runs others than the planned pieces."""


class RecordingPolicy:
    """Which steps are recorded.

    Attributes:
        wanted: the next step is to be recorded.
        settling: the last step ran as planned.
        settled: a step by the final plan has given its peak.
        measured_bytes: of the largest inputs of steps that were measured, where nothing is planned.
    """

    def __init__(self) -> None:
        self.wanted = True
        self.settling = self.settled = False
        self.measured_bytes: int | None = None
        self._steps = 0
        self._settles = self._records = self._grown = 0
        """Records of steps as planned, of other pieces, and of larger inputs."""
        self._awaited = 0
        """Steps to be recorded until one comes again that runs others than the planned pieces."""

    @property
    def may_repeat(self) -> bool:
        """True if steps of other pieces may still be recorded."""
        return self._records < MAX_RECORDS

    def headroom(self, outgrown: bool) -> float:
        """The multiple of a step's sizes to plan for; above 1 where steps often outgrow their plan."""
        return HEADROOM if outgrown and self._grown >= GROWING else 1.0

    def step_begins(self, larger: bool, input_bytes: int) -> bool:
        """True if a step that begins is to be recorded; the first one, which captures most, never is."""
        self._steps += 1
        if larger:
            self.wanted = self._grown < MAX_GROWN
        if self.measured_bytes is not None:
            self.wanted = input_bytes > self.measured_bytes
        return self.wanted and self._steps > 1

    def planned_step_ends(self, step: StepOfPieces, recording: bool, searching: bool) -> None:
        """Decide on the next step, after the forward pass of one that has a plan.

        Args:
            step: that ended.
            recording: it is recorded.
            searching: a better plan is looked for.
        """
        self.settling = step.unplanned_runs == 0
        if recording:
            self._awaited = max(0, self._awaited - 1) if self.settling else 0
            self.wanted = self._awaited > 0
        elif self.settling:
            self.wanted = not searching and not self.settled and self._settles < MAX_RECORDS
        elif not step.larger and self._settles < 2 * MAX_AWAITED:
            self.wanted = self._grown < MAX_GROWN if step.outgrown else self.may_repeat
            self._awaited = MAX_AWAITED if self.wanted else 0

    def note_record(self, outgrown: bool) -> None:
        """Count a record of a step, which may have outgrown its plan."""
        self._settles += self.settling
        self._records += not self.settling and not outgrown
        self._grown += not self.settling and outgrown

    def plan_again(self) -> bool:
        """Count another plan, as the final one exceeds the budget; False if there were too many."""
        again = self.may_repeat
        self._records += again
        return again

    def plan_begins(self) -> None:
        """Note that steps run by another plan from here on."""
        self.settled, self._settles = False, 0

    def fix_sizes(self) -> None:
        """Record no more steps of larger inputs."""
        self._grown = MAX_GROWN
