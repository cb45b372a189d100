"""Kernels of a captured graph that treat each row by itself, as steps of a row chain.

Rows are those of a contiguous tensor of shape (..., width), in order, whatever its leading dimensions: a view that
keeps the last one has the same rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monetlite.fx.torch_internals.torch_dispatch import OpOverload
from monetlite.operators import is_random
from monetlite.operators.row_chain import DTYPE, OUTER, ROW, SUM, WHOLE, WIDENED

_RESHAPES = frozenset(
    {"aten.view.default", "aten._unsafe_view.default", "aten.detach.default", "aten.alias.default"}
)
_TRANSPOSES = frozenset({"aten.t.default", "aten.transpose.int", "aten.permute.default"})
REDUCTIONS = ("aten.sum.dim_IntList", "aten.mean.dim")
"""Sums and means, of a row's elements if over the last dimension."""


@dataclass(frozen=True)
class RowKernel:
    """A row-wise kernel, in the form of a step: rows are ("row", node), and what all share ("whole", node)."""

    node: fx.Node
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def _named(self, *kinds: str) -> list[fx.Node]:
        items = [*self.args, *(value for _, value in self.kwargs)]
        return [item[1] for item in items if isinstance(item, tuple) and item and item[0] in kinds]

    @property
    def rows(self) -> list[fx.Node]:
        return self._named(ROW, WIDENED)

    @property
    def wholes(self) -> list[fx.Node]:
        return self._named(WHOLE)

    @property
    def width(self) -> int:
        return int(self.node.meta["val"].shape[-1])


def parse(node: fx.Node) -> RowKernel | None:
    """A kernel as a step on rows; None if it isn't row-wise, or its layout isn't."""
    target = str(node.target)
    made = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(made, torch.Tensor) or not made.dim():
        return None
    if target == "aten.mm.default" and not node.kwargs:
        return _outer(node) or _product(node)
    if not made.is_contiguous() or is_random(node):
        return None
    if target == "aten.addmm.default":
        return None if node.kwargs else _product(node)
    if target in REDUCTIONS:
        return _reduction(node)
    if torch.Tag.pointwise in node.target.tags or target == "aten._to_copy.default":
        return _pointwise(node)
    return None


def row_count(node: fx.Node) -> int:
    tensor = node.meta["val"]
    return int(tensor.numel() // max(1, tensor.shape[-1])) if tensor.dim() else 1


def _as_rows(item: Any) -> fx.Node | None:
    """The tensor whose rows a tensor has, in its order, without views in between; None if it isn't contiguous."""
    if not isinstance(item, fx.Node) or not isinstance(item.meta.get("val"), torch.Tensor):
        return None
    node: fx.Node = item
    if not node.meta["val"].dim() or not node.meta["val"].is_contiguous():
        return None
    while str(node.target) in _RESHAPES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        there = source.meta["val"]
        if not there.dim() or there.shape[-1] != node.meta["val"].shape[-1] or not there.is_contiguous():
            return node
        node = source
    return node


def _product(node: fx.Node) -> RowKernel | None:
    *bias, left, matrix = node.args
    rows = _as_rows(left)
    if rows is None or not isinstance(matrix, fx.Node) or not node.meta["val"].is_contiguous():
        return None
    args = (*((WHOLE, item) for item in bias), (ROW, rows), (WHOLE, matrix))
    return RowKernel(node=node, target=str(node.target), args=args)


def _outer(node: fx.Node) -> RowKernel | None:
    """A product that sums over rows: of a transposed tensor of rows, and one of rows."""
    left, right = node.args
    if not isinstance(left, fx.Node) or str(left.target) not in _TRANSPOSES or left.meta["val"].dim() != 2:
        return None
    one, other = _as_rows(left.args[0]), _as_rows(right)
    if one is None or other is None or one.op == "placeholder" or other.op == "placeholder":
        return None
    return RowKernel(node=node, target=OUTER, args=((ROW, one), (ROW, other)))


def _reduction(node: fx.Node) -> RowKernel | None:
    arguments: Any = node.args
    source, dims, *rest = arguments
    rows = _as_rows(source)
    if rows is None or node.kwargs or not isinstance(source, fx.Node) or not isinstance(dims, Sequence) or not dims:
        return None
    dimensions = source.meta["val"].dim()
    over = sorted(int(dim) % dimensions for dim in dims)
    target = str(node.target)
    if over == [dimensions - 1] and rest == [True] and dimensions > 1:
        return RowKernel(node=node, target=target, args=((ROW, rows), (-1,), True))
    if over == list(range(dimensions - 1)) and over and target == REDUCTIONS[0]:
        return RowKernel(node=node, target=SUM, args=((ROW, rows),))
    return None


def _pointwise(node: fx.Node) -> RowKernel | None:
    shape = tuple(node.meta["val"].shape)
    if any(name not in ("approximate", "dtype", "alpha") for name in node.kwargs):
        return None
    args = [_operand(item, shape) for item in node.args]
    kwargs = [(name, _operand(item, shape)) for name, item in node.kwargs.items()]
    if any(item is NotImplemented for item in (*args, *(value for _, value in kwargs))):
        return None
    return RowKernel(node=node, target=str(node.target), args=tuple(args), kwargs=tuple(kwargs))


def _operand(item: Any, shape: tuple[int, ...]) -> Any:
    """An operand of a pointwise kernel with a result of this shape.

    NotImplemented if it is neither one of rows nor shared by all.
    """
    if isinstance(item, torch.dtype):
        return (DTYPE, str(item).removeprefix("torch."))
    if not isinstance(item, fx.Node):
        return item if item is None or isinstance(item, (bool, int, float, str)) else NotImplemented
    tensor = item.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return NotImplemented
    here = tuple(tensor.shape)
    if not here or (here[-1] in (1, shape[-1]) and all(size == 1 for size in here[:-1]) and here != shape):
        return (WHOLE, item)
    if here not in (shape, (*shape[:-1], 1)):
        return NotImplemented
    if str(item.target) == "aten.expand.default":
        narrow = item.args[0]
        assert isinstance(narrow, fx.Node)
        rows = _as_rows(narrow)
        if rows is not None and tuple(narrow.meta["val"].shape) == (*here[:-1], 1):
            return (WIDENED, rows, here[-1])
        return NotImplemented
    rows = _as_rows(item)
    return NotImplemented if rows is None else (ROW, rows)
