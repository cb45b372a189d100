"""Building and tracing the model that a schedule file names."""

from typing import TYPE_CHECKING

from monetlite.core.errors import ModelError
from monetlite.core.source import ModelSource, is_shareable

if TYPE_CHECKING:
    from monetlite.core.costs import Profile
    from monetlite.core.graph import OperatorGraph
    from monetlite.models import BuiltModel

DTYPES = ("float32", "float64", "bfloat16", "float16")


def build(source: ModelSource, meta: bool = True) -> "BuiltModel":
    """The model and its inputs, on the meta device unless said otherwise.

    Raises:
        ModelError: the name is not one of a built-in or a library's model, or the model can't be built.
    """
    import torch

    from monetlite.models import build_model

    if not is_shareable(source.model):
        raise ModelError(f"{source.model!r:.80} is not the name of a built-in, hf:, timm: or torchvision: model")
    if source.dtype is not None and source.dtype not in DTYPES:
        raise ModelError(f"dtype {source.dtype!r:.80} is none of {', '.join(DTYPES)}")
    return build_model(
        source.model,
        batch=source.batch,
        input_size=source.input_size,
        sequence_length=source.sequence_length,
        dtype=None if source.dtype is None else getattr(torch, source.dtype),
        meta=meta,
    )


def traced(
    source: ModelSource, autocast: str = "", layout: str = "as_traced", device: str | None = None
) -> "OperatorGraph":
    """The operator graph of the model's training step, on a named device if one is given.

    Raises:
        ModelError, TraceError, DeviceError: the model can't be built, or not be traced.
    """
    from dataclasses import replace

    import torch

    from monetlite.tracing import trace

    built = build(source)
    if autocast and autocast not in DTYPES:
        raise ModelError(f"autocast {autocast!r:.80} is none of {', '.join(DTYPES)}")
    with torch.autocast("cpu", getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
        graph = trace(built.model, built.example_inputs, device=device, layout=layout)
    return replace(graph, name=built.name)


def estimated(graph: "OperatorGraph", device: str, optimizer: str | None, accumulate: bool) -> "Profile":
    """The graph with costs estimated for a device.

    Raises:
        DeviceError: an unknown device.
        ModelError: an unknown optimizer.
    """
    from monetlite.core.devices import find_device
    from monetlite.planning.pricing import profile

    return profile(graph, find_device(device).name, optimizer=optimizer, accumulate=accumulate)


__all__ = ["build", "estimated", "traced"]
