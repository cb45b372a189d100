"""Captured code takes the way that plain training takes, where TorchDynamo would have it take another.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `_get_handlers`, `f_globals` | tell code whether it is compiled; another branch than in plain training would run |
| `_get_handlers` | `torch.addcdiv` would be three operators, which round otherwise than its kernel |
| `method_addcdiv_`, `method_addcmul_` | the same of these methods, in place |
| `TensorVariable.call_method` | asks for a gradient of what is computed (`requires_grad_`); LoRA would break |
| `_call_setattr`, `call_setattr` | the same by an attribute, since torch 2.13 and before; T5 would |
| `GetAttrVariable.call_method` | the name of a class of torch; graphs of peft's DoRA would break |
| `SkipFunctionVariable.call_function` | `torch.jit.isinstance`; graphs of MONAI's U-Nets would break |
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables import builtin as _builtin
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from monetlite.fx.torch_internals.patching import patched

ASKED = "monetlite_asked"
"""Metadata of a captured call of whose result a gradient was asked for."""
_ASKING = ("is_compiling", "is_dynamo_compiling")
"""Names of torch's functions by which code asks whether it is compiled."""
_SCALED_SUMS = ("method_addcdiv_", "method_addcmul_")
"""Methods by which TorchDynamo takes apart those of a tensor. A version without one keeps them whole."""
_SETS: Any = getattr(_builtin, "SetAttrBuiltinVariable", _builtin.BuiltinVariable)
_SETTER = "_call_setattr" if hasattr(_SETS, "_call_setattr") else "call_setattr"
_set_attribute = getattr(_SETS, _SETTER)
_call_tensor_method = TensorVariable.call_method
_call_method = GetAttrVariable.call_method
_call_skipped = SkipFunctionVariable.call_function


def said_to_be_plain(but_in: Collection[str]) -> AbstractContextManager[None]:
    """Have captured code be told that it is not compiled, as in plain training, for the time of a block.

    Args:
        but_in: packages whose code is told the truth.
    """
    handlers = TorchInGraphFunctionVariable._get_handlers()

    def answer(own: Callable[..., Any]) -> Callable[..., Any]:
        def asked(function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
            package = str(translator.f_globals.get("__name__", "")).partition(".")[0]
            if package in but_in:
                return own(function, translator, *args, **kwargs)
            return ConstantVariable.create(False)

        return asked

    answers = {item: answer(own) for item, own in handlers.items() if getattr(item, "__name__", "") in _ASKING}
    return patched(mock.patch.dict(handlers, answers))


def scaled_sums_kept_whole() -> AbstractContextManager[None]:
    """Have `addcdiv`, `addcdiv_` and `addcmul_` with a `value` captured as they are, for the time of a block."""
    handlers = TorchInGraphFunctionVariable._get_handlers()

    def but_with_numbers(taken_apart: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if isinstance(kwargs.get("value"), ConstantVariable):
                return None  # no other handling
            return taken_apart(*args, **kwargs)

        return called

    methods = [name for name in _SCALED_SUMS if hasattr(TensorVariable, name)]
    return patched(
        mock.patch.dict(handlers, {torch.addcdiv: but_with_numbers(handlers[torch.addcdiv])}),
        *(
            mock.patch.object(TensorVariable, name, but_with_numbers(getattr(TensorVariable, name)))
            for name in methods
        ),
    )


def asked_gradients_left_out() -> AbstractContextManager[None]:
    """Have captures skip that a gradient is asked for of tensors that they compute, for the time of a block.

    peft and transformers do so (`requires_grad_()`, `requires_grad = True`), for checkpoints to see an input with a
    gradient. No parameter's gradient depends on it, unless the captured code itself differentiates, and such code
    can't be captured. A caller's may, where the tensor is returned (`ASKED`).
    """

    def by_method(self: Any, translator: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        asked = name == "requires_grad_" and all(item.as_python_constant() for item in (*args, *kwargs.values()))
        if not asked or self.source:
            return _call_tensor_method(self, translator, name, args, kwargs)
        self.as_proxy().node.meta[ASKED] = True
        return self

    def by_attribute(self: Any, translator: Any, owner: Any, name: Any, value: Any) -> Any:
        computed = isinstance(owner, TensorVariable) and not owner.source
        if computed and name.as_python_constant() == "requires_grad" and value.as_python_constant():
            owner.as_proxy().node.meta[ASKED] = True
            return value
        return _set_attribute(self, translator, owner, name, value)

    return patched(
        mock.patch.object(TensorVariable, "call_method", by_method),
        mock.patch.object(_SETS, _SETTER, by_attribute),
    )


def classes_known() -> AbstractContextManager[None]:
    """Have captures know the names of torch's classes, and `torch.jit.isinstance`, for the time of a block."""

    def call_method(self: Any, translator: Any, name: str, *arguments: Any) -> Any:
        owner = getattr(self.obj, "value", None)
        if isinstance(owner, type) and self.name in ("__module__", "__name__", "__qualname__"):
            return ConstantVariable.create(getattr(owner, self.name)).call_method(translator, name, *arguments)
        return _call_method(self, translator, name, *arguments)

    def call_skipped(self: Any, translator: Any, given: Any, options: Any) -> Any:
        if self.value is torch.jit.isinstance and len(given) == 2 and _is_class(given[1]):
            return _builtin.BuiltinVariable(isinstance).call_function(translator, given, options)
        return _call_skipped(self, translator, given, options)

    return patched(
        mock.patch.object(GetAttrVariable, "call_method", call_method),
        mock.patch.object(SkipFunctionVariable, "call_function", call_skipped),
    )


def _is_class(variable: Any) -> bool:
    """True for a class, and not for a type with parameters (`list[int]`), of which elements are looked at."""
    return isinstance(getattr(variable, "value", getattr(variable, "fn", None)), type)
