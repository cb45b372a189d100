"""Sizes that vary from step to step, as TorchDynamo captures them.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `_dynamo.maybe_mark_dynamic` | asks for a symbol in place of a size; each length would be captured again |
| `_dynamo_weak_dynamic_indices`, `_has_dynamo_dim_marking` | its marks at a person's tensors, taken away again |
| `_dynamo_propagated_dynamic_indices` | that an earlier graph's output varied in size, which decides no later one |
| `SymInt.node.expr`, `.hint`, `.shape_env` | what a captured size is, and what is known of its symbols |
| `bound_sympy` | the largest size that the capture holds for |
| `sympy_interp`, `PythonReferenceAnalysis` | calls that compute a size; programs could not be made |
| `_refs.tensor` | stands for `torch.tensor` of a number in a capture; each number would be captured by itself |
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import _refs, fx
from torch._dynamo import maybe_mark_dynamic
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

tensor_of_number: Callable[..., torch.Tensor] = _refs.tensor
"""Function that a capture has in place of `torch.tensor` of a number that varies."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Classes of captured numbers that vary."""
_PASSED_ON = "_dynamo_propagated_dynamic_indices"
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")


@contextlib.contextmanager
def marked_as_varying(tensors: Collection[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Have these dimensions of tensors captured as symbols, where the model allows it, for the time of a block."""
    new = [tensor for tensor, _ in tensors if not any(hasattr(tensor, mark) for mark in _MARKS)]
    for tensor, dimension in tensors:
        maybe_mark_dynamic(tensor, dimension)
    try:
        yield
    finally:
        for tensor in new:
            for mark in _MARKS:
                tensor.__dict__.pop(mark, None)


@contextlib.contextmanager
def unmarked(tensor: torch.Tensor) -> Iterator[None]:
    """Hide, for the time of a block, that an earlier graph's output had sizes that varied."""
    known = tensor.__dict__.pop(_PASSED_ON, None)
    try:
        yield
    finally:
        if known is not None:
            setattr(tensor, _PASSED_ON, known)


def expression(size: torch.SymInt) -> sympy.Expr:
    """The expression of a captured size in symbols."""
    found: sympy.Expr = size.node.expr
    return found


def same_sizes(one: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    """True if sizes are the same at all values of their symbols; asking does not limit what a capture holds for."""
    mine, its = (
        [expression(item) if isinstance(item, torch.SymInt) else item for item in of] for of in [one, other]
    )
    return mine == its


def captured_number(number: Any) -> Any:
    """The value of a number or size in the step that was captured; None if it depends on the data."""
    return number.node.hint


def largest(size: torch.SymInt) -> int | None:
    """The largest value for which a capture holds, as far as that is known; None without a limit."""
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if upper.is_Integer and upper < 2**31 else None


def computed(expr: sympy.Expr, symbols: Mapping[sympy.Symbol, fx.Node]) -> fx.Node:
    """Append the calls that compute an expression to the graph of the nodes of its symbols."""
    proxies = {symbol: fx.Proxy(node) for symbol, node in symbols.items()}
    made: Any = sympy_interp(_Calls, proxies, expr)
    node: fx.Node = made.node
    return node


def _called(function: Callable[..., Any], *numbers: Any) -> Any:
    """The result of a function, or a call in the graph of a proxy among the numbers."""
    numbers = tuple(item for item in numbers if not isinstance(item, torch.dtype))  # that of an index is no number
    for number in numbers:
        if isinstance(number, fx.Proxy):
            return number.tracer.create_proxy("call_function", function, numbers, {})
    return function(*numbers)


class _Calls(PythonReferenceAnalysis):
    """Operations of sizes as calls of a graph, those by functions that don't know proxies included."""


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "int_truediv": operator.truediv,
    "trunc_to_int": math.trunc,
    "floor_to_int": math.floor,
    "ceil_to_int": math.ceil,
    "round_to_int": round,
    "minimum": min,
    "maximum": max,
}
for _name, _function in _OPERATIONS.items():
    setattr(_Calls, _name, staticmethod(functools.partial(_called, _function)))
