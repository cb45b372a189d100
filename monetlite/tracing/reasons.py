"""What TorchDynamo's refusals mean for the person whose model it is, and what to do about them."""

import re
from dataclasses import dataclass

_RAISED = re.compile(r"^ *Developer debug context: raised exception (.+)$", re.MULTILINE)
_WRITTEN_OUT = re.compile(r"(\w+)\([\[(]ConstantVariable\(\w+: (.*)\),?[\])]\)")
"""How some versions write an exception of one argument."""
_FAILED_ASSERTION = re.compile(r"^Data-dependent assertion failed.*context: value: ConstantVariable\(", re.DOTALL)
_ON_DATA = (
    "Move what depends on the data (an if on a tensor's value, .item(), .numpy()) out of the forward pass, "
    "or wrap only the submodule that doesn't need it: MONeTWrapper(model.backbone, ...)"
)
NUMPY_DRAWS = "it draws random numbers from numpy, which captured would be torch's"
DRAW_OTHERWISE = "Draw them with torch, or before the forward pass and hand them in as an input"


@dataclass(frozen=True, kw_only=True)
class _Refusal:
    """What TorchDynamo's text says, and what to say in its place."""

    said: re.Pattern[str]
    what: str
    advice: str


_REFUSALS = (
    _Refusal(
        said=re.compile(r"^Module-level backwards hooks"),
        what="a module has backward hooks, which autograd would call in the midst of the backward pass",
        advice="Remove them before it is wrapped; hooks of parameters, of tensors in the forward pass, and of the "
        "wrapper that MONeTWrapper returns do work",
    ),
    _Refusal(
        said=re.compile(r"^Attempted to wrap RNN, GRU, or LSTM"),
        what="nn.RNN, nn.GRU and nn.LSTM run other kernels captured than in plain training, without their dropout",
        advice="Loop over nn.RNNCell, nn.GRUCell or nn.LSTMCell, or wrap the submodules beside them: "
        "MONeTWrapper(model.backbone, ...)",
    ),
    _Refusal(
        said=re.compile(
            r"^attempted to trace (numpy|torch\._numpy).*(RandomState|default_rng)|of class `RandomState`",
            re.DOTALL,
        ),
        what=NUMPY_DRAWS,
        advice=DRAW_OTHERWISE,
    ),
    _Refusal(
        said=re.compile(r"FloatTrueDiv\(1\.0, ToFloat\(u\d+\)\)"),
        what="batch norm with momentum=None divides by the number of batches so far, which it looks at on the host",
        advice="Give it a momentum, as nn.BatchNorm2d(channels) has",
    ),
    _Refusal(
        said=re.compile(r"\brandom\.random\b|function marked as skipped.*\brandom\b", re.IGNORECASE | re.DOTALL),
        what="random.random() can't be captured",
        advice="random.uniform(0, 1) can, and draws the same number",
    ),
    _Refusal(
        said=re.compile(r"_ctc_loss|ctc_loss"),
        what="how much memory F.ctc_loss takes depends on its targets",
        advice="Have the model return log-probabilities, and compute the loss outside of it",
    ),
    _Refusal(
        said=re.compile(r"^failed to bind arguments"),
        what="a function is called with other arguments than it takes",
        advice="Check that the model runs on these inputs as it is",
    ),
    _Refusal(
        said=re.compile(r"^Failed to convert args/kwargs to proxy.*\(Generator\)", re.DOTALL),
        what="it draws random numbers from a torch.Generator of its own",
        advice="Leave out generator=, or draw them before the forward pass and hand them in as an input",
    ),
)


def raised(text: str) -> str | None:
    """The exception that a model itself raises while it is captured, if that is what a text of Dynamo's says."""
    if _FAILED_ASSERTION.search(text):
        return "AssertionError"
    found = _RAISED.search(text)
    if found is None:
        return None
    written_out = _WRITTEN_OUT.fullmatch(found[1])
    return f"{written_out[1]}({written_out[2]})" if written_out else found[1].replace("([])", "()")


def reason(text: str, first_line: str) -> str:
    """Why a model can't be captured, and what to do, from the text in which Dynamo says so."""
    for refusal in _REFUSALS:
        if refusal.said.search(text):
            return f"{refusal.what}. {refusal.advice}"
    return f"{first_line}. {_ON_DATA}"
