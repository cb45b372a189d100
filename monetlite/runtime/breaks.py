"""Lines that end the pieces of a model that TorchDynamo takes apart, and what a person is told of them."""

from torch import fx

from monetlite.core.announcing import warn
from monetlite.core.errors import TraceError
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals.torch_dynamo import break_reason, reason_text
from monetlite.runtime.recorded_step import RecordedStep
from monetlite.tracing.names import source_of
from monetlite.tracing.refusals import NO_LINE, compile_failure, line_of

MANY_CAPTURING = 8
"""Steps after the plan that captured something, before a person is told that this goes on."""
MAX_LISTED = 5
"""Lines that a warning names."""


class Breaks:
    """Reasons why a model is not captured whole. Each warning comes once.

    Args:
        name: of the model.
        reason: why it can't be captured whole.

    Attributes:
        reason: the same, without the frames of the error, which hold the step's tensors.
    """

    def __init__(self, name: str, reason: TraceError) -> None:
        self.reason = TraceError(str(reason))
        self._name = name
        self._lines: dict[str, None] = {}
        self._unplanned: dict[str, None] = {}
        self._last_line = ""
        self._told_of_pieces = self._told_of_runs = False
        self._capturing = 0

    def note(self, graph: fx.GraphModule) -> None:
        """Note a captured graph, and why it ends."""
        self._last_line = next(filter(None, map(source_of, graph.graph.nodes)), "")
        reason = break_reason(graph)
        if reason is not None and (line := line_of(reason.user_stack)) != NO_LINE:
            self._lines[f"{line}: {reason_text(reason)}"] = None

    def note_unplanned(self, error: Exception) -> None:
        """Note why a captured graph runs as in plain training."""
        self._unplanned[compile_failure(error)] = None

    @property
    def listed(self) -> str:
        """The reasons, a line each."""
        # TorchDynamo tells no reason with a graph that ends where a function is left out as a whole.
        reasons = [*self._lines, *self._unplanned] or [str(self.reason).partition(". ")[0]]
        lines = [f"\n  {line}" for line in reasons[:MAX_LISTED]]
        if len(reasons) > MAX_LISTED:
            lines.append(f"\n  and {len(reasons) - MAX_LISTED} more")
        return "".join(lines)

    def warn_of_pieces(self, recorded: RecordedStep, ignored: str) -> None:
        """Say what the pieces are, how much of the step is planned, and what options are ignored."""
        if self._told_of_pieces:
            return
        self._told_of_pieces = True
        outside = sum(item.forward_ms + item.backward_ms for item in recorded.outside) / 1e3
        share = max(0.0, 1 - outside / recorded.seconds) if recorded.seconds else None
        told = "" if share is None else f", with {share:.0%} of the step's time planned"
        kept_bytes = sum(item.kept_bytes for item in recorded.outside)
        pieces = "1 piece" if len(recorded.planned) == 1 else f"{len(recorded.planned)} pieces"
        warn(
            f"{self._name} can't be captured whole. It trains in {pieces}{told}; code between them runs as in plain"
            f" training, and keeps {format_bytes(kept_bytes)}.{ignored} whole=True refuses that. What ends pieces:"
            f"{self.listed}"
        )

    def warn_of_runs(self) -> None:
        """Say that the budget is of one run of several before a backward pass."""
        if not self._told_of_runs:
            self._told_of_runs = True
            warn(
                f"{self._name} runs several times before a backward pass. It trains in pieces, and the budget is of"
                " one run: run its inputs as one batch"
            )

    def warn_of_captures(self) -> None:
        """Say that steps after the plan still capture something, once many have."""
        self._capturing += 1
        if self._capturing == MANY_CAPTURING:
            place = f", the last time at {self._last_line}" if self._last_line else ""
            warn(
                f"{self._name} was captured again in {MANY_CAPTURING} steps since it was planned{place}, for other "
                "sizes or values. Such a step takes seconds. Pad to a few sizes, make a value that changes a "
                "tensor, or plan a part that doesn't change (model.backbone = MONeTWrapper(model.backbone, ...))"
            )
