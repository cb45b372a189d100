"""Errors of a capture, put in words for the person whose model it is."""

import os
import re
import sysconfig
from collections.abc import Iterable
from typing import Any

import torch

from monetlite.core.errors import ModelRaises, MonetliteError, TraceError, first_line
from monetlite.fx.torch_internals.torch_dynamo import skipped_function
from monetlite.tracing.names import is_own_file

NO_LINE = "the model"
"""A place of which no line is known."""
NUMPY_DRAWS = (
    "it draws random numbers from numpy, which captured would be torch's. Draw them with torch, or before the "
    "forward pass and hand them in as an input"
)
_REFUSALS = (
    (
        r"^Module-level backwards hooks",
        "a module has backward hooks, which autograd would call in the midst of the backward pass. Remove them "
        "before it is wrapped; hooks of parameters, of tensors in the forward pass, and of the wrapper that "
        "MONeTWrapper returns do work",
    ),
    (
        r"^Attempted to wrap RNN, GRU, or LSTM",
        "nn.RNN, nn.GRU and nn.LSTM run other kernels captured than in plain training, without their dropout. Loop "
        "over nn.RNNCell, nn.GRUCell or nn.LSTMCell, or wrap the submodules beside them: "
        "MONeTWrapper(model.backbone, ...)",
    ),
    (
        r"(?s)^attempted to trace (numpy|torch\._numpy).*(RandomState|default_rng)|of class `RandomState`",
        NUMPY_DRAWS,
    ),
    (
        r"FloatTrueDiv\(1\.0, ToFloat\(u\d+\)\)",
        "batch norm with momentum=None divides by the number of batches so far, which it looks at on the host. "
        "Give it a momentum, as nn.BatchNorm2d(channels) has",
    ),
    (
        r"(?is)\brandom\.random\b|function marked as skipped.*\brandom\b",
        "random.random() can't be captured. random.uniform(0, 1) can, and draws the same number",
    ),
    (
        r"_ctc_loss|ctc_loss",
        "how much memory F.ctc_loss takes depends on its targets. Have the model return log-probabilities, and "
        "compute the loss outside of it",
    ),
    (
        r"^failed to bind arguments",
        "a function is called with other arguments than it takes. Check that the model runs on these inputs as it "
        "is",
    ),
    (
        r"(?s)^Failed to convert args/kwargs to proxy.*\(Generator\)",
        "it draws random numbers from a torch.Generator of its own. Leave out generator=, or draw them before the "
        "forward pass and hand them in as an input",
    ),
)
"""(pattern of TorchDynamo's text, what it means and what to do), the first that fits counting."""
_COMPILE_FAILURES = (
    (
        r"Encountered a set_ on a graph input",
        "the forward pass assigns to .data of a parameter or buffer. Change it in place: "
        "k.data.mul_(m).add_(q.data, alpha=1 - m)",
    ),
    (
        r"^aten\.nonzero\.",
        "how many places a mask selects depends on the data, as in x[mask] = values. "
        "x.masked_scatter(mask[:, :, None], values) is captured whole",
    ),
)
"""(pattern of an error's text of PyTorch's compiler, what it means and what to do)."""
_ON_DATA = (
    "Move what depends on the data (an if on a tensor's value, .item(), .numpy()) out of the forward pass, "
    "or wrap only the submodule that doesn't need it: MONeTWrapper(model.backbone, ...)"
)
PIECES = 'With a budget in place of a schedule, it trains in pieces: monetlite.within(model, budget="6GB")'
_RAISED = re.compile(r"^ *Developer debug context: raised exception (.+)$", re.MULTILINE)
_WRITTEN_OUT = re.compile(r"(\w+)\([\[(]ConstantVariable\(\w+: (.*)\),?[\])]\)")
"""Form in which some versions write an exception of one argument."""
_FAILED_ASSERTION = re.compile(r"^Data-dependent assertion failed.*context: value: ConstantVariable\(", re.DOTALL)
_MISSING_NAME = re.compile(r"Failed to find name `(\w+)` in frame's builtins")
_OPERATOR_FAILURE = re.compile(
    r"got \w+Error\((['\"])(?P<said>.*?)\1\)|TypeError \w+: (?P<call>\w+\(\) received .*)"
)
"""Form in which TorchDynamo quotes the error of an operator."""
_TORCH, _STANDARD = os.path.join(torch.__path__[0], ""), os.path.join(sysconfig.get_path("stdlib"), "")


def explain(error: Exception, advice: str = PIECES) -> TraceError:
    """Turn TorchDynamo's exception into one that names the line of the person's model and says what to do.

    `advice` ends the message of what can't be captured.
    """
    where = line_of(getattr(error, "real_stack", None) or ())
    text = str(error)
    if failure := _OPERATOR_FAILURE.search(text):
        said = (failure["said"] or failure["call"]).rstrip(".")
        return ModelRaises(f"{where} fails on these inputs: {said}; check that the model runs on them as it is")
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Exception):
        said = _meaning(inner)
        if said is None:
            return TraceError(
                f"{where} was captured, but PyTorch or monetlite failed to compile it: {first_line(inner)}. Try "
                "another schedule, or run without compile=True, if it is set; and please report this with the model"
            )
    elif exception := _raised(text):
        return ModelRaises(
            f"{where} raises {exception} on these inputs; check that the model runs on them as it is. If it does, "
            "TorchDynamo misreads that line: wrap only submodules without it, MONeTWrapper(model.backbone, ...)"
        )
    else:
        reason = next((reason for pattern, reason in _REFUSALS if re.search(pattern, text)), None)
        skipped = skipped_function(text)
        said = (reason or skipped or f"{first_line(error)}. {_ON_DATA}").rstrip(".")
    return TraceError(". ".join(filter(None, (f"{where} can't be captured in one graph: {said}", advice))))


def line_of(stack: Iterable[Any]) -> str:
    """The innermost line of a stack that is the person's: `model.py:12 (x = y.item())`."""
    frames = [item for item in stack if _is_persons(item.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({(frames[-1].line or '').strip()})" if frames else NO_LINE


def _is_persons(path: str) -> bool:
    """True for a file that is not monetlite's, torch's or of Python's standard library."""
    standard = path.startswith(_STANDARD) and "-packages" not in path
    return not (standard or path.startswith(_TORCH) or is_own_file(path))


def own_error(error: BaseException | None, handled: BaseException | None) -> MonetliteError | Warning | None:
    """Monetlite's own error, or a warning that is an error (`python -W error`), if TorchDynamo wrapped one.

    Args:
        error: of a step.
        handled: the one that was being handled when the step began. A person may try again there.
    """
    while error is not None and error is not handled:
        if isinstance(error, MonetliteError | Warning):
            return error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _raised(text: str) -> str | None:
    """The exception that the model itself raises, if TorchDynamo says so."""
    if _FAILED_ASSERTION.search(text):
        return "AssertionError"
    if missing := _MISSING_NAME.search(text):
        return f'NameError("name {missing[1]!r} is not defined")'
    found = _RAISED.search(text)
    if found is None:
        return None
    written_out = _WRITTEN_OUT.fullmatch(found[1])
    return f"{written_out[1]}({written_out[2]})" if written_out else found[1].replace("([])", "()")


def compile_failure(error: Exception) -> str:
    """The meaning of an error of PyTorch's compiler, or its first line."""
    return _meaning(error) or first_line(error)


def _meaning(error: Exception) -> str | None:
    return next((reason for pattern, reason in _COMPILE_FAILURES if re.search(pattern, str(error))), None)
