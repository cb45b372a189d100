"""Models as commands name them: built, traced and priced."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monetlite.cli.options import DEFAULT_ESTIMATE
from monetlite.cli.running import Measuring
from monetlite.core.errors import DeviceError

if TYPE_CHECKING:
    from monetlite.core.costs import Profile
    from monetlite.models import BuiltModel


def price(
    spec: str,
    device: str | None,
    optimizer: str | None,
    accumulate: bool,
    autocast: str | None,
    quiet: bool,
    shape: dict[str, Any],
    tolerance: float | None = None,
) -> "tuple[BuiltModel, Profile]":
    """Build, trace and price a model as plain training runs it, without allocating its activations."""
    built, (profile,) = price_layouts(
        spec, device, optimizer, accumulate, autocast, quiet, shape, ["as_traced"], tolerance
    )
    return built, profile


def price_layouts(
    spec: str,
    device: str | None,
    optimizer: str | None,
    accumulate: bool,
    autocast: str | None,
    quiet: bool,
    shape: dict[str, Any],
    layouts: list[str],
    tolerance: float | None = None,
) -> "tuple[BuiltModel, list[Profile]]":
    """Build a model, and trace and price it in some layouts."""
    import torch

    from monetlite.models import build_model
    from monetlite.planning.pricing import profile
    from monetlite.tracing import trace

    chosen = device
    if chosen is None:
        chosen = "cuda" if torch.cuda.is_available() else DEFAULT_ESTIMATE
    if chosen == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device 'cuda': this machine has no GPU that torch can use; name a device to estimate")
    if chosen not in ("cpu", "cuda"):
        from monetlite.core.devices import find_device

        find_device(chosen)
    built = build_model(spec, meta=True, **shape_of(shape))
    profiles = []
    for layout in layouts:
        device_type = "cuda" if chosen == "cuda" else "cpu"
        with torch.autocast(device_type, getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
            graph = trace(built.model, built.example_inputs, device=chosen, meta_device=device_type, layout=layout)
        with Measuring(quiet) as progress:
            named = replace(graph, name=built.name)
            made = profile(
                named, chosen, optimizer=optimizer, accumulate=accumulate, tolerance=tolerance, progress=progress
            )
        profiles.append(replace(made, source=built.source))
    return built, profiles


def shape_of(options: dict[str, Any]) -> dict[str, Any]:
    """A command's options on shapes, as `build_model` takes them."""
    import torch

    dtype = options.get("dtype")
    return {
        "batch": options.get("batch"),
        "input_size": options.get("input_size"),
        "sequence_length": options.get("sequence_length"),
        "dtype": getattr(torch, dtype) if dtype else None,
    }


def to_cuda(inputs: Any) -> Any:
    """The same inputs on the GPU."""
    import torch
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), inputs)
