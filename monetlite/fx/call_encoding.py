"""Arguments of captured calls as data, and back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.core.graph import Argument, TensorRef, TensorSpec, TorchConstant
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import FakeTensor, FakeTensorMode
from monetlite.fx.torch_internals.torch_dynamo import GuardOnDataDependentSymNode
from monetlite.fx.varying_sizes import sizes_of

_CONSTANTS: dict[str, type] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
    "device": torch.device,
}
_COMPLEX = "complex"


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The layout of a tensor, real or fake.

    Raises:
        TraceError: its shape depends on data.
    """
    try:
        shape, stride = sizes_of(tensor)
    except GuardOnDataDependentSymNode as error:
        raise TraceError(f"a tensor's shape depends on the data ({tuple(tensor.shape)})") from error
    return TensorSpec(
        shape=shape,
        stride=stride,
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )


def fake_mode(node: fx.Node) -> FakeTensorMode:
    """The mode that makes tensors like those which a captured node has (its first, if it has several)."""
    fakes = [item for item in pytree.tree_leaves(node.meta["val"]) if isinstance(item, FakeTensor)]
    return fakes[0].fake_mode


def encode_arguments(argument: Any, value_of: Callable[[fx.Node], int | None]) -> Any:
    """Encode (a structure of) arguments of a captured call; nodes become `TensorRef`s.

    Raises:
        TraceError: an argument that is not a tensor or a constant.
    """
    if isinstance(argument, fx.Node):
        tensor = argument.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            if argument.op != "get_attr":
                raise TraceError(f"{argument.name} is {type(tensor).__name__}, not a tensor: shapes must be static")
            owner = argument.graph.owning_module
            assert owner is not None
            tensor = getattr(owner, str(argument.target))
        return TensorRef(node=argument.name, value=value_of(argument), spec=spec_of(tensor))
    if isinstance(argument, (tuple, list)):
        return tuple(encode_arguments(item, value_of) for item in argument)
    for kind, constants in _CONSTANTS.items():
        if isinstance(argument, constants):
            return TorchConstant(kind=kind, name=str(argument).removeprefix("torch."))
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    if isinstance(argument, complex):
        return TorchConstant(kind=_COMPLEX, name=repr(argument))
    raise TraceError(f"an operator takes {argument!r} ({type(argument).__name__}), which can't be written down")


def each_dimension(sizes: Argument, dimensions: int) -> tuple[int, ...]:
    """An integer for each dimension of space, of which a call may give one for all."""
    items = sizes if isinstance(sizes, tuple) else (sizes,)
    found = tuple(size for size in items if isinstance(size, int))
    return found * dimensions if len(found) == 1 else found


def decode_argument(argument: Argument, tensor: Callable[[TensorRef], Any]) -> Any:
    """The reverse of `encode_arguments`: `tensor` says what stands for each tensor.

    Tuples become lists, but for tuples of tuples without a tensor: those stay the same object in every call.
    """
    if isinstance(argument, TensorRef):
        return tensor(argument)
    if isinstance(argument, tuple):
        return [
            item if _is_table(item) and _is_constant(item) else decode_argument(item, tensor) for item in argument
        ]
    if isinstance(argument, TorchConstant):
        if argument.kind == _COMPLEX:
            return complex(argument.name)
        constant = torch.device(argument.name) if argument.kind == "device" else getattr(torch, argument.name)
        assert isinstance(constant, _CONSTANTS[argument.kind])
        return constant
    return argument


def _is_table(argument: Argument) -> bool:
    return isinstance(argument, tuple) and any(isinstance(item, tuple) for item in argument)


def _is_constant(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return all(map(_is_constant, argument))
    return argument is None or isinstance(argument, bool | int | float | str)
