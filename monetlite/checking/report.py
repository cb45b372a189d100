"""The report of `verify`, and the judgement whether a schedule keeps its promises."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from monetlite.checking.operator_differences import OperatorComparison, OperatorDifference
from monetlite.checking.step_differences import CAPTURE_DIFFERENCE, SLACK, StepDifferences
from monetlite.core.units import format_bytes, format_ms


@dataclass(frozen=True, kw_only=True)
class VerificationLimits:
    """Limits that a step has to keep to.

    Attributes:
        difference: largest relative one of any gradient, buffer or loss; None for the one that `verify` computes.
        budget: True if the measured peak has to be within it; for a budget of reserved memory, also what the
            allocator reserved.
        peak_error, latency_error: largest distance of the measured peak and step time from the predicted ones, as
            fractions of those; None for any.
    """

    difference: float | None = None
    budget: bool = True
    peak_error: float | None = None
    latency_error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A check that a schedule did not pass, in words and in numbers (None where there are none)."""

    check: str
    message: str
    measured: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Report(StepDifferences):
    """Results of `verify`, beside the differences from plain training.

    Attributes:
        peak_bytes, plain_peak_bytes: measured peak of the step, resident memory (and an optimizer's state, if the
            schedule counts one) included.
        reserved_bytes, plain_reserved_bytes: memory that torch's CUDA allocator took from the GPU for those peaks,
            with freed blocks that it keeps and gaps between blocks; None on a CPU.
        budget_bytes: the schedule's budget.
        of_reserved: True if that is of memory that the allocator reserves, and not of tensors.
        step_ms, plain_step_ms: median measured step times, taken in turn.
        predicted_peak_bytes, predicted_plain_peak_bytes, predicted_step_ms, predicted_plain_step_ms: the same, as
            the schedule predicts it on the device and for the inputs that it was solved for.
        kind, device: source of those predictions (`measured` on, or `estimated` for, a device).
        same_shapes: True if the inputs are those the schedule was solved for.
        incomparable: reasons why the predictions are not of this step here.
        unrepeated: difference between two plain steps from one seed, where some kernel adds up in no fixed order
            (on CUDA); 0 where none does.
        allowed_difference: limit of the largest difference: rounding; `SLACK` times `unrepeated` where that is
            more; or, for a schedule with a tolerance, `SLACK` times what plain training's gradients move by when
            every weight is off by that much, up to `MAX_ALLOWED`.
        operators: the comparison operator by operator; None where there was none.
        limits: what else is judged.
    """

    peak_bytes: int
    plain_peak_bytes: int
    budget_bytes: int
    step_ms: float
    plain_step_ms: float
    predicted_peak_bytes: int
    predicted_plain_peak_bytes: int
    predicted_step_ms: float
    predicted_plain_step_ms: float
    kind: str
    device: str
    same_shapes: bool
    reserved_bytes: int | None = None
    plain_reserved_bytes: int | None = None
    of_reserved: bool = False
    incomparable: tuple[str, ...] = ()
    unrepeated: float = 0.0
    allowed_difference: float = CAPTURE_DIFFERENCE
    operators: OperatorComparison | None = None
    limits: VerificationLimits = field(default_factory=VerificationLimits)

    @property
    def exact(self) -> bool:
        """True if everything is bit for bit as plain training's."""
        return self.random_state and self.largest_difference == 0.0

    @property
    def within_budget(self) -> bool:
        """True if the peak is; what was reserved for it is judged apart."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def reserves_more(self) -> bool:
        """True if the allocator reserved more than the budget on CUDA."""
        return self.reserved_bytes is not None and self.reserved_bytes > self.budget_bytes

    @property
    def overhead(self) -> float:
        """Measured step time over plain training's, less one."""
        return self.step_ms / self.plain_step_ms - 1

    @property
    def predicted_overhead(self) -> float:
        return _error(self.predicted_step_ms, self.predicted_plain_step_ms)

    @property
    def overhead_error(self) -> float | None:
        """The step time's ratio to plain training's, over the predicted ratio, less one."""
        return None if self.incomparable else _error(1 + self.overhead, 1 + self.predicted_overhead)

    @property
    def peak_error(self) -> float | None:
        """(measured − predicted) / predicted; None where the prediction is of something else."""
        return None if self.incomparable else _error(self.peak_bytes, self.predicted_peak_bytes)

    @property
    def plain_peak_error(self) -> float | None:
        return None if self.incomparable else _error(self.plain_peak_bytes, self.predicted_plain_peak_bytes)

    @property
    def latency_error(self) -> float | None:
        return None if self.incomparable else _error(self.step_ms, self.predicted_step_ms)

    @property
    def plain_latency_error(self) -> float | None:
        return None if self.incomparable else _error(self.plain_step_ms, self.predicted_plain_step_ms)

    @property
    def passed(self) -> bool:
        """True for the same training, up to `allowed_difference`, within the budget and the `limits`."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Checks that it did not pass, the worst kind first."""
        return (*self._of_training(), *self._of_memory(), *self._of_predictions())

    def _of_training(self) -> Iterator[Reason]:
        over = [name for name, difference in self.differences.items() if difference > self.allowed_difference]
        if over:
            yield Reason(
                check="difference",
                message=f"{_and_more(over[0], over)} differs from plain training's by "
                f"{self.largest_difference:.1e}, {self.allowed_difference:.1e} allowed{self._origin()}",
                measured=self.largest_difference,
                allowed=self.allowed_difference,
            )
        if not self.random_state:
            message = "the random number generator is not left as plain training leaves it"
            yield Reason(check="random_state", message=message)
        introducing = self.operators.introducing if self.operators else ()
        broken = [item for item in introducing if item.broken and item.introduced > SLACK * self.unrepeated]
        if broken:
            yield Reason(
                check="operator",
                message=f"{_and_more(describe(broken[0]), broken)} should make the same bits as plain training and "
                f"is off by {broken[0].introduced:.1e}",
                measured=broken[0].introduced,
                allowed=0.0,
            )

    def _origin(self) -> str:
        """The origin of the largest difference, in words."""
        if self.operators is None:
            return ""
        introducing = self.operators.introducing
        if introducing and not introducing[0].broken:
            return f"; {describe(introducing[0])} introduces the largest share, {introducing[0].introduced:.1e}"
        if not introducing and self.operators.captured > self.allowed_difference:
            return f"; capturing the model alone makes {self.operators.captured:.1e} of it"
        return ""

    def _of_memory(self) -> Iterator[Reason]:
        if not self.limits.budget:
            return
        peak, budget = format_bytes(self.peak_bytes), format_bytes(self.budget_bytes)
        if not self.within_budget:
            excess = format_bytes(self.peak_bytes - self.budget_bytes)
            message = f"the peak, {peak}, is over the budget of {budget} by {excess}"
            yield Reason(check="budget", message=message, measured=self.peak_bytes, allowed=self.budget_bytes)
        elif self.of_reserved and self.reserves_more:
            assert self.reserved_bytes is not None
            excess = format_bytes(self.reserved_bytes - self.budget_bytes)
            message = (
                f"for a peak of {peak} torch's allocator reserved {format_bytes(self.reserved_bytes)}, over the "
                f"budget of {budget} by {excess}, though it was limited to that"
            )
            yield Reason(check="reserved", message=message, measured=self.reserved_bytes, allowed=self.budget_bytes)

    def _of_predictions(self) -> Iterator[Reason]:
        peaks = [format_bytes(size) for size in (self.peak_bytes, self.predicted_peak_bytes)]
        times = [format_ms(latency) for latency in (self.step_ms, self.predicted_step_ms)]
        for check, name, error, allowed, (measured, predicted) in (
            ("peak_error", "the peak", self.peak_error, self.limits.peak_error, peaks),
            ("latency_error", "the step time", self.latency_error, self.limits.latency_error, times),
        ):
            if allowed is None or (error is not None and abs(error) <= allowed):
                continue
            message = f"{name} can't be held against the prediction, which is {' and '.join(self.incomparable)}"
            if error is not None:
                message = (
                    f"{name}, {measured}, is {error:+.1%} off the predicted {predicted}, {allowed:.1%} allowed"
                )
            yield Reason(check=check, message=message, measured=error, allowed=allowed)


def _and_more(first: str, items: Sequence[object]) -> str:
    return f"{first} (and {len(items) - 1} more)" if len(items) > 1 else first


def describe(item: OperatorDifference) -> str:
    """A run of an operator in words: `layer1.0.relu1 (inplace, run 2)`."""
    again = f", run {item.number + 1}" if item.number else ""
    return f"{item.operator} ({item.implementation}{again})"


def _error(measured: float, predicted: float) -> float:
    return measured / predicted - 1 if predicted > 0 else 0.0
