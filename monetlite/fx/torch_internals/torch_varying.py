"""Numbers and sizes that vary from call to call of a captured function, as symbols in its graph.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `wrap_symfloat`, `wrap_symint` | symbols in place of numbers that vary; each would be compiled by itself |
| `_automatic_dynamic` | decides which sizes of an input are symbols; each size would be captured by itself |
| `TensorifyScalarRestartAnalysis` | a backend's error that TorchDynamo passes on; captures would end in errors |
| `UnspecializeRestartAnalysis` | has it begin again, with other breaks, too; the same |
| `TensorifyState` | tells which numbers can't be tensors; they would be tried at each new number |
| `SymNodeVariable.create` | makes comparisons of such numbers; one that a variable holds would fix the number |
| `TorchInGraphFunctionVariable._get_handlers` | functions that take symbols; `torch.as_tensor` would fix a size |
| `LazySymNodeFormatString` | makes text of such a number; a number read from that text again would be wrong |
| `SymNode.mod`, `.guard_float`, `.wrap_float` | remainders; branches on those of fractions would be wrong |
"""

import types
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch._dynamo import config as _config
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis, Unsupported
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.variables import builder as _builder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazySymNodeFormatString
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.experimental.sym_node import SymNode

from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_symbols import marked_as_varying, unmarked

_Number: TypeAlias = tuple[types.CodeType, str, type]
"""A number of a function: its code, where it reads the number, and the number's type."""
_MANY_SPECIALIZED = 16
"""Captures after which a number is taken to be needed by an operator. Branches on it need one for each side."""
_wrap_float, _wrap_int = VariableBuilder.wrap_symfloat, VariableBuilder.wrap_symint
_dynamic_sizes = _builder._automatic_dynamic
_text = LazySymNodeFormatString.__init__
_create = SymNodeVariable.create
_remainder = SymNode.mod
_Fraction: Any = torch.SymFloat


class VaryingNumbers:
    """The numbers that captured functions are called with, or read of a module, and that have been seen to vary.

    A number of type `float` is a constant at first. From its second value on, it is a tensor of float64 that the
    program takes, without dimensions. So arithmetic with it gives the same bits. Where whole numbers count, one of
    type `int` is a symbol from its second value on, until a program needs one (`monetlite.fx.whole_numbers`).

    Args:
        fixed: whether each value of a `float` is captured by itself, and each of an `int` that tensors take.
        counting: whether whole numbers count.

    Attributes:
        fixed: the same.
    """

    def __init__(self, *, fixed: bool = False, counting: bool = False) -> None:
        self.fixed, self._counting = fixed, counting
        self._seen: dict[_Number, float] = {}
        self._varying: set[_Number] = set()
        self._specialized: Counter[_Number] = Counter()
        """Captures in which no tensor could stand for a number: an operator needs to know it, or a branch does."""

    def captured(self) -> AbstractContextManager[None]:
        """Capture numbers as they vary, for the time of a block."""
        counting = (
            mock.patch.object(VariableBuilder, "wrap_symint", lambda *args, **kwargs: self._whole(*args, **kwargs)),
            _config.patch(allow_unspec_int_on_nn_module=True),
        )
        return patched(
            mock.patch.object(
                VariableBuilder, "wrap_symfloat", lambda builder, value: self._wrapped(builder, value)
            ),
            mock.patch.object(LazySymNodeFormatString, "__init__", _text_of_others),
            mock.patch.object(SymNodeVariable, "create", _on_its_side),
            _as_tensor_of_symbols(),
            *(counting if self._counting else ()),
        )

    @property
    def served_types(self) -> frozenset[type]:
        """Types of numbers of which no value has to be captured by itself."""
        floats = not self.fixed and not any(map(self._is_constant, self._specialized))
        return frozenset([float] * floats + [int] * self._counting)

    def fix(self) -> bool:
        """Have each value captured by itself from here on; tells whether that changes anything."""
        if self._counting and any(kind is int for _, _, kind in self._varying):
            self._counting = False
            return True
        changes = bool(self._varying) and not self.fixed
        self.fixed = self.fixed or changes
        return changes

    def _seen_before(self, builder: VariableBuilder, value: float) -> _Number:
        """Note a value of a number. One that is whole at times (`momentum = 0`) is another number then."""
        key = builder.tx.output.root_tx.f_code, builder.source.name, type(value)
        if self._seen.setdefault(key, value) != value:
            self._varying.add(key)
        return key

    def _whole(self, builder: VariableBuilder, value: int, *args: Any, **kwargs: Any) -> Any:
        key = self._seen_before(builder, value)
        with _config.patch(assume_static_by_default=key not in self._varying, automatic_dynamic_shapes=False):
            return _wrap_int(builder, value, *args, **kwargs)

    def _wrapped(self, builder: VariableBuilder, value: float) -> Any:
        key = self._seen_before(builder, value)
        if self.fixed or key not in self._varying or self._is_constant(key):
            return _wrap_float(builder, value)
        with _config.patch(assume_static_by_default=False):
            wrapped = _wrap_float(builder, value)
        symbol = getattr(wrapped, "sym_num", None)  # it is a constant if it isn't finite
        if symbol is not None and TensorifyState.should_specialize(str(symbol.node._expr)):
            self._specialized[key] += 1
        return wrapped

    def _is_constant(self, key: _Number) -> bool:
        return self._specialized[key] >= _MANY_SPECIALIZED


class _CaptureAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
    """An error of a backend that has TorchDynamo capture the function again."""


class VaryingSizes:
    """The sizes of tensors, and whole numbers, that captured functions are called with, and that have varied.

    In the first step, each is a constant: layers of several widths have functions in common. From then on, one that
    differs from what the function was called with before is a symbol. Of shapes, the most similar one counts.

    Attributes:
        active: False while TorchDynamo decides by itself.
        first_step: True until the first step has ended.
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active, self.first_step = active, True
        self._shapes: dict[tuple[Any, ...], dict[tuple[int, ...], None]] = {}
        self._values: dict[tuple[Any, ...], int] = {}
        self._varying: set[tuple[Any, ...]] = set()
        self._fixed: set[types.CodeType] = set()
        self._captured: types.CodeType | None = None

    def captured(self) -> AbstractContextManager[None]:
        """Capture sizes as they vary, for the time of a block."""
        return patched(
            mock.patch.object(_builder, "_automatic_dynamic", self._sizes_of),
            mock.patch.object(
                VariableBuilder, "wrap_symint", lambda *args, **kwargs: self._wrapped(*args, **kwargs)
            ),
            *([_config.patch(allow_unspec_int_on_nn_module=True)] if self.active else ()),
        )

    def capture_again(self) -> Exception:
        """An error that has TorchDynamo capture the present function again, each size by itself."""
        assert self._captured is not None
        self._fixed.add(self._captured)
        return _CaptureAgain(restart_reason="a graph whose sizes vary can't be planned")

    def _sizes_of(self, tensor: Any, translator: Any, source: Any, static: bool, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return _dynamic_sizes(tensor, translator, source, static, *args, **kwargs)
        varying: list[tuple[torch.Tensor, int]] = []
        if not static and not tensor.is_nested:
            key, shape = self._key(translator, source.name), tuple(tensor.shape)
            known = self._shapes.setdefault((*key, len(shape)), {})
            if not self.first_step and known and shape not in known:
                nearest = min(known, key=lambda other: len(_different(shape, other)))
                self._varying.update((*key, len(shape), at) for at in _different(shape, nearest))
            known[shape] = None
            varying = [(tensor, at) for at in range(len(shape)) if self._varies(*key, len(shape), at)]
        with unmarked(tensor), marked_as_varying(varying), _config.patch(automatic_dynamic_shapes=False):
            return _dynamic_sizes(tensor, translator, source, static, *args, **kwargs)

    def _wrapped(self, builder: VariableBuilder, value: int, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return _wrap_int(builder, value, *args, **kwargs)
        key = self._key(builder.tx, builder.source.name)
        if self._values.setdefault(key, value) != value and not self.first_step:
            self._varying.add(key)
        static = not self._varies(*key)
        with _config.patch(assume_static_by_default=static, automatic_dynamic_shapes=False):
            return _wrap_int(builder, value, *args, **kwargs)

    def _key(self, translator: Any, name: str) -> tuple[types.CodeType, str]:
        self._captured = translator.output.root_tx.f_code
        return self._captured, name

    def _varies(self, code: types.CodeType, *key: Any) -> bool:
        return (code, *key) in self._varying and code not in self._fixed


def _different(shape: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    """The dimensions in which two shapes differ."""
    return [at for at, (mine, its) in enumerate(zip(shape, other, strict=True)) if mine != its]


def _as_tensor_of_symbols() -> AbstractContextManager[Any]:
    """Have `torch.as_tensor` take symbols as `torch.tensor` does, which are made constants otherwise."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    return mock.patch.dict(handlers, {torch.as_tensor: handlers[torch.tensor]})


def fractions_by_value() -> AbstractContextManager[None]:
    """Have remainders and whole quotients of fractions computed as Python does, for the time of a block.

    Torch takes remainders of symbols for whole numbers, so `n / 2 % 1` is 0 for each n, and rounds a quotient
    before it takes its whole part (1.0 // 0.1). Here both are of the capture's values, and it is for these alone.
    """
    return patched(
        mock.patch.object(SymNode, "mod", _remainder_of_values),
        *(
            mock.patch.object(number, name, _quotient_of_values(getattr(number, name), swapped))
            for number in (torch.SymInt, torch.SymFloat)
            for name, swapped in (("__floordiv__", False), ("__rfloordiv__", True))
        ),
    )


def _remainder_of_values(one: SymNode, other: SymNode) -> SymNode:
    if one.is_int() and other.is_int():
        return _remainder(one, other)
    return one.wrap_float(one.guard_float("", 0) % other.guard_float("", 0))


def _quotient_of_values(of_symbols: Callable[..., Any], swapped: bool) -> Callable[..., Any]:
    def quotient(one: torch.SymInt | torch.SymFloat, other: Any) -> Any:
        numbers = (other, one) if swapped else (one, other)
        if not any(isinstance(item, float | torch.SymFloat) for item in numbers):
            return of_symbols(one, other)
        dividend, divisor = map(float, numbers)
        return _Fraction(one.node.wrap_float(dividend // divisor))

    return quotient


def _on_its_side(*args: Any, **options: Any) -> Any:
    """A number that a graph computes; for a comparison of one that varies, the side that it is on in this capture.

    No tensor stands for such a comparison. The graph returns it where code behind a break may look at it.
    """
    made: Any = _create(*args, **options)
    compared = made.sym_num if isinstance(made, SymNodeVariable) else None
    if not isinstance(compared, torch.SymBool) or not compared.node.has_hint():
        return made
    varies = any(not symbol.is_integer for symbol in compared.node.expr.free_symbols)
    return ConstantVariable.create(made.evaluate_expr()) if varies else made


def _text_of_others(text: Any, number: Any, form: Any) -> None:
    """Make text of a number, unless it is one that varies; what a graph computes may be printed."""
    if isinstance(number.sym_num, torch.SymFloat) and number.sym_num.node.has_hint():
        raise Unsupported("text is made of a number that varies", gb_type="text of a number that varies")
    _text(text, number, form)
