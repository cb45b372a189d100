"""Inputs of a training step: their order, the device they are on, and what is resident with them."""

import contextlib
import inspect
import itertools
from collections import UserDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from monetlite.core.errors import DeviceError, ModelError
from monetlite.core.graph import Resident
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_ddp import ddp_around, reduced_by
from monetlite.fx.torch_internals.torch_dispatch import storage_key, stored
from monetlite.fx.torch_internals.torch_modules import uncompiled
from monetlite.fx.torch_internals.torch_pytree import tensors_among


class Arguments(NamedTuple):
    """Example inputs of a call with both positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Inputs: TypeAlias = (
    torch.Tensor | tuple[object, ...] | list[object] | dict[str, Any] | UserDict[str, Any] | Arguments
)
"""Example inputs of a call: positional ones, or those of keywords. What a tokenizer returns is a `UserDict`."""


def require_module(model: object) -> None:
    """Refuse what is no module.

    Raises:
        ModelError: says what it is.
    """
    if not isinstance(model, nn.Module):
        advice = f"; call the class to make a model: {model.__name__}(...)" if isinstance(model, type) else ""
        raise ModelError(f"give a torch.nn.Module as the model, not {model!r:.80}{advice}")


def split_inputs(example_inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """Example inputs as (positional, keyword) arguments."""
    if isinstance(example_inputs, Arguments):
        return example_inputs.args, dict(example_inputs.kwargs)
    if isinstance(example_inputs, (dict, UserDict)):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def tensors_in_order(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[torch.Tensor]:
    """Tensors of a call's arguments in the order of the forward pass's parameters; those of `**kwargs` by name.

    A forward pass that takes only `*args, **kwargs` doesn't say which of its positional arguments has which name.
    Arguments that don't fit the signature come as they are: the model itself refuses them.
    """
    bound = _by_parameter(model, args, kwargs) if kwargs else None
    return tensors_among((args, dict(kwargs)) if bound is None else list(bound.values()))


def _by_parameter(
    model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object] | None:
    """Arguments by the forward pass's parameters, in its order; None if they don't fit it."""
    try:
        signature = inspect.signature(uncompiled(model).forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    for name, item in signature.parameters.items():
        if item.kind is inspect.Parameter.VAR_KEYWORD:
            bound[name] = dict(sorted(bound.get(name, {}).items()))
    return bound


def tensor_arguments(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[str]:
    """Names of a call's arguments that are, or hold, tensors; empty if they don't fit the forward pass."""
    named: dict[str, object] = {}
    for name, value in (_by_parameter(model, args, kwargs) or {}).items():
        # Arguments of `**kwargs` have names of their own.
        named |= value if isinstance(value, dict) and not value.keys().isdisjoint(kwargs) else {name: value}
    return [name for name, value in named.items() if tensors_among(value)]


def resident_bytes(model: nn.Module, inputs: Iterable[object]) -> Resident:
    """Bytes of a step's parameters, buffers and other inputs, each storage counted once, and of buckets.

    Parameters may be among the inputs, too.
    """
    inputs = list(inputs)
    given = [item for item in inputs if isinstance(item, nn.Parameter)]
    seen: set[int] = set()

    def total(tensors: Iterable[object]) -> int:
        new = {
            storage_key(part): part for item in tensors if isinstance(item, torch.Tensor) for part in stored(item)
        }
        size = sum(item.untyped_storage().nbytes() for key, item in new.items() if key not in seen)
        seen.update(new)
        return size

    parameters = total([*model.parameters(), *given])
    return Resident(
        parameters=parameters,
        buffers=total(model.buffers()),
        inputs=total(inputs),
        gradients=bucket_bytes([*model.parameters(), *given]),
    )


def bucket_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of these parameters' places in the buckets of the DistributedDataParallel whose forward pass runs.

    They are there from its making on, beside the gradients. With `gradient_as_bucket_view` the gradients are in
    them, from their delivery on.
    """
    ddp = ddp_around()
    if ddp is None:
        return 0
    given = set(parameters)
    return sum(item.nbytes for item in reduced_by(ddp) if item in given)


def device_of(model: nn.Module, inputs: object, meta_device: str = "cpu") -> str:
    """The type of the device that a step runs on: that of its inputs, or of the parameters.

    Raises:
        DeviceError: neither a CPU nor a GPU by CUDA.
    """
    first = _first_tensor(model, inputs)
    if first is None or first.is_meta:
        return meta_device
    if first.device.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"the step runs on {first.device}, and steps are planned on 'cpu' and 'cuda' alone. Move the model and "
            "its inputs there, or train it as it is, without monetlite"
        )
    return first.device.type


def gpu_of(model: nn.Module, inputs: object) -> torch.device | None:
    """The GPU that a step runs on, that of its inputs or of the parameters; None if it runs on none."""
    first = _first_tensor(model, inputs)
    return first.device if first is not None and first.is_cuda else None


def on_its_gpu(model: nn.Module, inputs: object) -> contextlib.AbstractContextManager[Any]:
    """Make the GPU of a step torch's current one, whose generator and statistics are read."""
    gpu = gpu_of(model, inputs)
    return contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu)


def refuse_several_devices(model: nn.Module, inputs: object) -> None:
    """Refuse parameters on several devices: a plan is of the memory and the random numbers of one.

    Numbers without dimensions may be on the CPU.

    Raises:
        DeviceError: names a parameter on each.
    """
    given = (("a parameter", item) for item in pytree.tree_leaves(inputs) if isinstance(item, nn.Parameter))
    on_gpu = ((name, item) for name, item in model.named_buffers() if item.is_cuda)
    named = [*model.named_parameters(), *given, *on_gpu]
    held = {str(item.device): name for name, item in reversed(named) if item.is_cuda or item.dim()}
    if len(held) > 1 and any(item.is_cuda for _, item in named):
        places = ", ".join(f"{name} on {device}" for device, name in sorted(held.items()))
        raise DeviceError(
            f"the model is on {len(held)} devices ({places}), and a step is planned on one. Put all of it on one "
            "GPU, or train it as it is, without monetlite"
        )


def autocast_dtype(device: str) -> str:
    """Name of the dtype that `torch.autocast` converts to on a device at present; empty if it is off."""
    on = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else ""


def autocast_to(device: str, dtype: str | None) -> torch.autocast:
    """`torch.autocast` on a device to a dtype of that name; switched off without one."""
    return torch.autocast(device, getattr(torch, dtype or "bfloat16"), enabled=bool(dtype))


def _first_tensor(model: nn.Module, inputs: object) -> torch.Tensor | None:
    """The first tensor of the inputs and the first parameter that is on a GPU or the like, or else on any device.

    A number on the CPU may stand before the inputs on the GPU.
    """
    tensors = itertools.chain(tensors_among(inputs), itertools.islice(model.parameters(), 1))
    return max(tensors, key=lambda item: item.device.type not in ("cpu", "meta"), default=None)
