"""Errors of a capture, for the person whose model it is."""

import re
from pathlib import Path

import torch

from monetlite.core.errors import MonetliteError, TraceError
from monetlite.tracing.reasons import raised, reason

_CAPTURE = str(Path(__file__).with_name("capture.py"))
"""Where the function is that calls the model."""
_EAGER_FAILURE = re.compile(r"got \w+Error\((['\"])(?P<said>.*?)\1\)|TypeError \w+: (?P<call>\w+\(\) received .*)")
"""How Dynamo quotes what an operator itself said."""


def explain(error: Exception) -> TraceError:
    """Turn Dynamo's exception into one that names the line of the person's model and what to do."""
    stack = getattr(error, "real_stack", None)
    frames = [frame for frame in stack or () if not frame.filename.startswith(torch.__path__[0])]
    frames = [frame for frame in frames if frame.filename != _CAPTURE]
    where = (
        f"{frames[-1].filename}:{frames[-1].lineno} ({(frames[-1].line or '').strip()})" if frames else "the model"
    )
    if failure := _EAGER_FAILURE.search(str(error)):
        said = failure["said"] or failure["call"]
        return TraceError(f"{where} fails on these inputs: {said}; check that the model runs on them as it is")
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Exception):
        return TraceError(
            f"{where} was captured, but PyTorch or monetlite failed to compile it: {_first_line(inner)}. "
            "Try another schedule, or run without compile=True, if it is set; and please report this with the model"
        )
    if exception := raised(str(error)):
        return TraceError(
            f"{where} raises {exception} on these inputs; check that the model runs on them as it is. If it does, "
            "TorchDynamo misreads that line: wrap only submodules without it, MONeTWrapper(model.backbone, ...)"
        )
    return TraceError(f"{where} can't be captured in one graph: {reason(str(error), _first_line(error))}")


def own_error(error: BaseException | None) -> MonetliteError | None:
    """The error of ours that Dynamo wrapped, if it did."""
    while error is not None:
        if isinstance(error, MonetliteError):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


__all__ = ["explain", "own_error"]
