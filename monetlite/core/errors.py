"""The errors monetlite raises on purpose. Each message names the thing, gives numbers and says what to do."""

from typing import Any


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the period at its end; its class where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ")


class MonetliteError(Exception):
    """Base of every error that monetlite raises for a person to read."""


class TraceError(MonetliteError):
    """The model can't be captured as one graph; the message names the line of the model."""


class ModelRaises(TraceError):
    """The model itself seems to raise an exception on the inputs, so that there is nothing to capture."""


class ProfileError(MonetliteError):
    """An operator can't be measured or estimated on the device that was asked for."""


class BudgetError(MonetliteError, ValueError):
    """A memory budget that can't be read, or is zero or negative."""


class InfeasibleBudget(MonetliteError):
    """No schedule fits the budget, or none was found; carries what is known about the smallest one that does.

    Attributes:
        budget_bytes: what was asked for.
        proven_bytes: a budget below which it is proven that nothing fits, in bytes.
        reached_bytes: the smallest peak for which a schedule is known, in bytes; None if there is none.
    """

    def __init__(self, message: str, *, budget_bytes: int, proven_bytes: int, reached_bytes: int | None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.proven_bytes = proven_bytes
        self.reached_bytes = reached_bytes

    def with_line(self, text: str) -> "InfeasibleBudget":
        """The same error with another line at its end."""
        return InfeasibleBudget(
            f"{self}\n{text}",
            budget_bytes=self.budget_bytes,
            proven_bytes=self.proven_bytes,
            reached_bytes=self.reached_bytes,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """The parts that a copy is made of. An exception's own are its positional arguments alone."""
        return type(self).__new__, (type(self), *self.args), vars(self)


class IllegalSchedule(MonetliteError):
    """A schedule breaks a rule of legality, or exceeds the budget it is held to."""


class ScheduleFileError(MonetliteError):
    """A schedule or profile file that can't be read: truncated, malformed, of another version, hostile."""


class ScheduleMismatch(MonetliteError):
    """A schedule that was solved for another graph than the one it is applied to."""


class DeviceError(MonetliteError, ValueError):
    """An unknown device, or one that this machine does not have."""


class CompileError(MonetliteError, RuntimeError):
    """Inductor can't compile a region of operators."""


class ModelError(MonetliteError):
    """A model name that can't be resolved, or a model or input that the schedule can't serve."""


class SolverError(MonetliteError):
    """A solver that is not installed, or that failed."""


class CudnnMissing(MonetliteError):
    """cuDNN's frontend, or a library that it needs, is not installed or does not load."""


class CudnnError(MonetliteError):
    """cuDNN refused something that monetlite expected it to accept."""


class ConvolutionError(MonetliteError, ValueError):
    """A convolution whose description contradicts itself, or tensors that are not what was described."""
