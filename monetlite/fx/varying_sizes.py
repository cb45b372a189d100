"""Captured steps whose inputs vary in size: one graph for all lengths, planned at one and run at others.

TorchDynamo captures a size that varies as a symbol, and every size that follows from it as an expression. A
schedule is solved for numbers. `joint_at` makes the graph at given values of the symbols. Its sizes are numbers
there that remember their expressions (`Size`). Programs compute them from the inputs' sizes (`lowering`), so they
run at other values, too.

A number that has forgotten its expression would be wrong at other sizes. `agreeing` compares the graphs of a step
at two sizes, and leaves out implementations that differ beyond what expressions say.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.core.graph import Call, Implementation, Operator, OperatorGraph, TensorRef
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import FakeTensor, FakeTensorMode, storage_key, without_modes
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_symbols import SYMBOLIC, expression

SIZES = "monetlite_sizes"
"""Attribute of a fake tensor: its shape and strides, where sizes among them vary."""


class Size(int):
    """A number that varies with the sizes of a step's inputs: its value where the step is planned.

    Two are equal if they are for all inputs. Beside a plain number, the value counts.

    Attributes:
        expression: in the symbols of the capture.
    """

    expression: sympy.Expr

    def __new__(cls, value: int, of: sympy.Expr) -> "Size":
        made = super().__new__(cls, value)
        made.expression = of
        return made

    def __getnewargs__(self) -> Any:
        return int(self), self.expression

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return bool(self.expression == other.expression)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def _keeping(name: str, of: Callable[[Any, Any], Any], swapped: bool = False) -> None:
    """Have an operation of two numbers keep its expression."""
    plain = getattr(int, name)

    def method(self: Size, other: object) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return plain(self, other)
        mine, its = self.expression, other.expression if isinstance(other, Size) else sympy.Integer(other)
        made = of(its, mine) if swapped else of(mine, its)
        value = plain(int(self), int(other))
        return value if made.is_Integer else Size(value, made)

    setattr(Size, name, method)


for _name, _of in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul)):
    _keeping(f"__{_name}__", _of)
    _keeping(f"__r{_name}__", _of, swapped=True)


def sizes_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tensor's shape and strides, with the expressions of those that vary. A sparse one has no strides."""
    known: tuple[tuple[int, ...], tuple[int, ...]] | None = getattr(tensor, SIZES, None)
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return known or (tuple(map(int, tensor.shape)), tuple(map(int, strides)))


def shape_with(values: Mapping[sympy.Symbol, int], tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape at values of the symbols."""
    return tuple(
        int(size.expression.xreplace(values)) if isinstance(size, Size) else size for size in sizes_of(tensor)[0]
    )


def input_sizes(graph: fx.Graph) -> dict[sympy.Symbol, fx.Node]:
    """The inputs of a joint graph that are sizes, by their symbols; empty for a graph whose sizes are fixed."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        size = node.meta.get("val")
        if isinstance(size, (torch.SymInt, Size)):
            expr = size.expression if isinstance(size, Size) else expression(size)
            if expr.is_Symbol:
                found[expr] = node
    return found


def graph_at(module: fx.GraphModule, values: Mapping[sympy.Symbol, int]) -> fx.GraphModule:
    """A joint graph at given values of its symbols: sizes are `Size`s, and no node computes them.

    Raises:
        TraceError: a size depends on something else, or is not a number that can be at these values.
    """
    at = _Values(values)
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()

    def argument(node: fx.Node) -> Any:
        size = node.meta.get("val")
        return at.number(size) if isinstance(size, SYMBOLIC) else copied[node]

    for node in module.graph.nodes:
        captured = node.meta.get("val")
        if node.op == "call_function" and isinstance(captured, SYMBOLIC):
            continue
        copied[node] = graph.node_copy(node, argument)
        if captured is not None:
            one = isinstance(captured, torch.Tensor)
            copied[node].meta["val"] = at.item(captured) if one else pytree.tree_map(at.item, captured)
    return graph_module(module, graph)


class _Values:
    """Numbers in place of symbols, and tensors of such sizes in place of symbolic ones."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[sympy.Expr, int] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        # The captured tensor is kept with its storage's stand-in: the key is only its own while it lives.
        self._storages: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}

    def number(self, size: Any) -> Any:
        """A number for a size."""
        if not isinstance(size, torch.SymInt):
            if isinstance(size, SYMBOLIC):
                raise TraceError(f"{size} is computed from sizes that vary, and is no size itself")
            return size
        expr = expression(size)
        if expr not in self._known:
            value = expr.xreplace(self._values)
            if value.free_symbols:
                raise TraceError(f"the size {size} depends on the data")
            if not value.is_Integer:
                raise TraceError(f"{size} is {value} where sizes are {self._values}")
            self._known[expr] = int(value) if expr.is_Integer else Size(int(value), expr)
        return self._known[expr]

    def item(self, item: Any) -> Any:
        """The tensor or number of a node at these values."""
        if isinstance(item, FakeTensor):
            if id(item) not in self._tensors:
                self._tensors[id(item)] = self._tensor(item)
            return self._tensors[id(item)]
        return self.number(item)

    def _known_number(self, size: Any) -> int | None:
        """A size as a number; None if something else than the graph's inputs decides it."""
        known = not isinstance(size, torch.SymInt) or expression(size).free_symbols <= self._values.keys()
        return int(self.number(size)) if known else None

    def _tensor(self, fake: torch.Tensor) -> torch.Tensor:
        shape, stride = (tuple(map(self.number, sizes)) for sizes in (fake.shape, fake.stride()))
        # Where a view begins in a tensor that the graph doesn't get is not known; the view alone counts then.
        offset = self._known_number(fake.storage_offset()) or 0
        sizes, strides = list(map(int, shape)), list(map(int, stride))
        if any(size < 0 for size in sizes):
            raise TraceError(f"a tensor of shape {sizes} where sizes are {self._values}")
        key, dtype = storage_key(fake), fake.dtype
        with without_modes(), torch.no_grad():
            if key not in self._storages:
                count = self._known_number(fake.untyped_storage().nbytes())
                if count is None:  # the input is a view of a tensor that the graph doesn't get
                    spanned = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
                    count = 0 if 0 in sizes else (offset + spanned + 1) * dtype.itemsize
                self._storages[key] = fake, torch.empty(count, dtype=torch.uint8, device="meta").untyped_storage()
            whole = self._storages[key][1]
            meta = torch.empty(0, dtype=dtype, device="meta").set_(whole, offset, sizes, strides)
            made = FakeTensor(self._mode, meta, fake.device).requires_grad_(fake.requires_grad)
        if any(isinstance(size, Size) for size in (*shape, *stride)):
            setattr(made, SIZES, (shape, stride))
        return made


def agreeing(graph: OperatorGraph, other: OperatorGraph) -> OperatorGraph:
    """A step's graph with the implementations that its graph at other sizes has, too, with the same calls.

    Raises:
        TraceError: the step itself is another at the other sizes.
    """
    if graph.structure != other.structure or len(graph.operators) != len(other.operators):
        raise TraceError("the step has other operators at other sizes")
    return replace(graph, operators=tuple(map(_agreeing, graph.operators, other.operators)))


def _agreeing(one: Operator, other: Operator) -> Operator:
    by_name = {item.name: item for item in other.implementations}
    kept = [
        item
        for item in one.implementations
        if item.name in by_name and _same_implementation(item, by_name[item.name])
    ]
    if one.family != other.family or not kept or kept[0] is not one.implementations[0]:
        raise TraceError(f"{one.name} is another operator at other sizes")
    return replace(one, implementations=tuple(kept))


def _same_implementation(one: Implementation, other: Implementation) -> bool:
    fields = ("reads", "writes", "overwrites", "call", "again", "guard")
    return all(_at_any_size(getattr(one, name)) == _at_any_size(getattr(other, name)) for name in fields)


def _at_any_size(item: Any) -> Any:
    """A call or argument without the numbers that vary: expressions in their place, and names for tensors."""
    if isinstance(item, Call):
        return item.target, item.outputs, _at_any_size(item.args), _at_any_size(item.kwargs)
    if isinstance(item, TensorRef):
        return item.node
    if isinstance(item, tuple):
        return tuple(map(_at_any_size, item))
    return item.expression if isinstance(item, Size) else repr(item)
