"""A run of a model's own code that computes nothing large: tensors have addresses, and no memory behind them.

Large results are tensors that nobody writes to, so the system gives them no pages. Small ones without a large
operand are computed: a model that looks at its position numbers or at a mask takes the branch that it takes in
training. Fake tensors would not do: libraries know them, and take other branches for them.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from monetlite.core.errors import TraceError
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode, OpOverload, schema_of, storage_key
from monetlite.fx.torch_internals.torch_pytree import tensors_among

COMPUTED_BYTES = 2**18
"""Results up to this size are computed, where no operand is without contents."""


class Contents:
    """The storages that have contents, and operators on those that have none."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._empty: dict[int, torch.UntypedStorage] = {}
        """Storages without contents, by key; kept alive by nobody else than the model."""

    def without(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """A tensor of the same layout without contents, for a weight or an input."""
        made = _untouched(tensor, device)
        self._empty[storage_key(made)] = made.untyped_storage()
        return made.requires_grad_(tensor.requires_grad)

    def run(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], lacking: set[int]) -> Any:
        """Run an operator, or make its results without computing them.

        Args:
            lacking: keys of storages without contents that operators made; those of this one are added.

        Raises:
            TraceError: the operator looks at contents that there are none of.
        """
        operands = map(storage_key, tensors_among((args, kwargs)))
        unknown = any(key in lacking or key in self._empty for key in operands)
        if torch.Tag.inplace_view in operator.tags:
            return operator(*args, **kwargs)
        fakes, result = self._faked(operator, args, kwargs, unknown)
        schema = schema_of(operator)
        if fakes is None or (not schema.is_mutable and _only_views(result, fakes)):
            return operator(*args, **kwargs)
        made_bytes = sum(item.untyped_storage().nbytes() for item in tensors_among(result))
        if not unknown and made_bytes <= COMPUTED_BYTES:
            return operator(*args, **kwargs)
        changed = changed_arguments(operator, args, kwargs)
        lacking.update(map(storage_key, tensors_among(changed)))
        if not schema.returns:
            return None
        returned = iter(changed)
        found = result if len(schema.returns) > 1 else (result,)
        results = [
            next(returned)
            if of.alias_info is not None and of.alias_info.is_write
            else pytree.tree_map_only(torch.Tensor, lambda item: self._made(item, lacking), item)
            for of, item in zip(schema.returns, found, strict=True)
        ]
        return tuple(results) if len(results) > 1 else results[0]

    def _made(self, fake: torch.Tensor, lacking: set[int]) -> torch.Tensor:
        made = _untouched(fake, str(fake.device))
        lacking.add(storage_key(made))
        return made

    def _faked(self, operator: OpOverload, args: Any, kwargs: Any, unknown: bool) -> tuple[set[int] | None, Any]:
        """Keys of the operands' storages as fake tensors, and the result; no keys if it has to be computed."""
        keys: set[int] = set()

        def faked(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            key = storage_key(tensor)
            if key not in bases:
                size = storage.nbytes() // tensor.element_size()
                bases[key] = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
                keys.add(storage_key(bases[key]))
            base = bases[key] if bases[key].dtype == tensor.dtype else bases[key].view(tensor.dtype)
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        bases: dict[int, torch.Tensor] = {}
        try:
            with self._mode:
                args, kwargs = pytree.tree_map_only(torch.Tensor, faked, (args, kwargs))
                return keys, operator(*args, **kwargs)
        except Exception as error:
            if unknown:
                raise TraceError(
                    f"{operator} looks at what the step computes, so the step can't be recorded without computing "
                    f"it: {str(error).partition(chr(10))[0]}"
                ) from error
            return None, None


def weightless_copy(model: nn.Module, contents: Contents, device: str) -> nn.Module:
    """A copy of a model whose weights have no memory. Small buffers keep their contents."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if id(parameter) not in memo:
            made = contents.without(parameter.detach(), device)
            memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if id(buffer) not in memo and (buffer.is_meta or buffer.untyped_storage().nbytes() > COMPUTED_BYTES):
            memo[id(buffer)] = contents.without(buffer.detach(), device)
    return copy.deepcopy(model, memo)


def _untouched(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the same layout in a storage of the same size that nothing is written to."""
    size = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
    base = torch.empty(size, dtype=tensor.dtype, device=device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _only_views(result: Any, operands: set[int]) -> bool:
    made = tensors_among(result)
    return bool(made) and all(storage_key(item) in operands for item in made)


def changed_arguments(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of a call that the operator changes in place."""
    arguments = schema_of(operator).arguments
    given = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    return [
        value
        for argument, value in zip(arguments, given, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
