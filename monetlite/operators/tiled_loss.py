"""Head and loss of a language model in tiles of rows, so that the logits are never whole.

The logits of N tokens and V words, their log-probabilities and their gradient are often the largest tensors of a
step. The gradient of the loss is linear in the gradient that comes in, so loss and gradients can be made in one
pass over tiles of tokens, and scaled when the backward pass begins: as many products as plain training has, and
memory for the logits of one tile (Liger Kernel, Hsu et al., arXiv:2410.10989). Products of a tile with the hidden
states add up to the weight's gradient in another order than one product does.

Plain training in float16 scales the loss, so that gradients don't vanish (Micikevicius et al., arXiv:1710.03740,
section 3.2). The gradients of a head in float16 are made before that scale is known, so they have one of their own:
the largest power of two with which none can overflow. It is taken back with the gradient that comes in.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from monetlite.core.graph import Argument, Call, Implementation
from monetlite.operators.cross_entropy import CHUNK_ELEMENTS, cross_entropy_backward_
from monetlite.operators.implementations import (
    MIN_TILE_ROWS,
    KernelRuns,
    TracedKernel,
    alternatives_for,
    elements,
    function,
    function_pair,
    slices,
    tensor_at,
)
from monetlite.operators.strides import item_bytes
from monetlite.operators.tile_parts import added_product, made_up, runs, summed_product, turned

NONE, MEAN, SUM = 0, 1, 2
"""Reductions of a loss, by torch's numbers."""
TILES = (2, 4, 8, 16, 32, 64)
BY_CLASS, BY_FEATURE = "by_class", "by_feature"
"""Orders of a weight's gradient: (classes, features), or (features, classes)."""
_LARGEST_SUM = 2.0**15
"""Bound of sums in float16, whose largest number is almost twice as large."""
_ELEMENTS = 2**22
"""Numbers of a gradient in float16 that are in float32 at once."""


class LogitsProduct(NamedTuple):
    """A product that makes logits, and the gradients that are wanted of its operands.

    Attributes:
        rows: hidden states, of shape (rows, features); an adapter's have features of their own (its rank).
        matrix: of shape (features, classes).
        factor: what the product is multiplied by.
        of_rows: a gradient is wanted for the rows.
        order: of the matrix's gradient; None if it isn't wanted.
    """

    rows: Any
    matrix: Any
    factor: float
    of_rows: bool
    order: str | None


def _products(call: Call) -> list[LogitsProduct]:
    """The products of a call, of `TensorRef`s."""
    products: Any = call.args[0]
    return [LogitsProduct(*item) for item in products]


def _classes(call: Call) -> int:
    classes: int = _products(call)[0].matrix.spec.shape[1]
    return classes


def _kernels(call: Call) -> Iterator[KernelRuns]:
    """The kernels of all tiles, forward and backward."""
    products, arguments = _products(call), cast(Any, call.args)
    steps, of_bias, tiles = arguments[6:9]
    count = -(-products[0].rows.spec.shape[0] // tiles)
    dtype, classes = products[0].rows.spec.dtype, _classes(call)
    rows = [made_up(dtype, count, product.matrix.spec.shape[0]) for product in products]
    logits = made_up(dtype, count, classes)
    for own, product in zip(rows, products, strict=True):
        yield runs(tiles, "aten.mm.default", own, product.matrix, made=logits)
    for _ in products[1:]:
        yield runs(tiles, "aten.add.Tensor", logits, made_up(dtype, count, classes), made=logits)
    before = [logits]
    for name, value in steps:
        before.append(made_up(value if name == "to" else logits.spec.dtype, count, classes))
        yield runs(tiles, "aten.clone.default", before[-2], made=before[-1])
        if name == "tanh":
            yield runs(tiles, "aten.clone.default", before[-1], made=before[-1])
    slope = before.pop()
    yield runs(tiles, "aten._log_softmax.default", slope, made=slope)
    yield runs(tiles, "monetlite.cross_entropy_backward_", slope, slope, made=slope)
    for name, _ in reversed(steps):
        others = [made_up(slope.spec.dtype, count, classes)] if name == "tanh" else []
        yield runs(tiles, "aten.clone.default", slope, *others, made=before[-1])
        slope = before.pop()
    if of_bias:
        yield runs(tiles, "aten.sum.dim_IntList", slope, made=made_up(dtype, 1, classes))
    for own, product in zip(rows, products, strict=True):
        if product.of_rows:
            yield runs(tiles, "aten.mm.default", slope, turned(product.matrix), made=own)
        if product.order is not None:
            yield from summed_product(turned(slope), own, tiles)


def _tile_bytes(call: Call) -> int:
    """Memory for a tile: its logits, in two dtypes where one is converted, their gradient, and sums in float32."""
    products, arguments = _products(call), cast(Any, call.args)
    steps, tiles, smoothed = arguments[6], arguments[8], any(arguments[10:])
    count, classes = products[0].rows.spec.shape[0], _classes(call)
    of_products = [item_bytes(product.rows.spec.dtype) for product in products]
    sums: int = sum(
        4 * classes * product.rows.spec.shape[1]
        for product, size in zip(products, of_products, strict=True)
        if size < 4 and tiles > 1 and product.order is not None
    )
    sizes, most, saved = [max(of_products)], sum(of_products), 0
    for name, value in steps:
        if name == "to":
            sizes.append(item_bytes(value))
            most = max(most, sum(sizes[-2:]))
        elif name == "tanh":
            saved += sizes[-1]
    of_tile: int = -(-count // tiles) * classes
    made = of_tile if smoothed else min(of_tile, CHUNK_ELEMENTS["cuda"])
    return max(most * of_tile, sizes[-1] * (of_tile + made)) + saved * of_tile + sums


@function(
    "linear_cross_entropy",
    workspace_bytes=_tile_bytes,
    kernels=_kernels,
    integers=_classes,
)
def linear_cross_entropy(
    products: Sequence[Sequence[Any]],
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    steps: Iterable[tuple[str, Any]],
    of_bias: bool,
    tiles: int,
    slope: Tensor | None = None,
    spread: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Cross-entropy of logits, and its gradients, some rows at a time.

    Args:
        products: the fields of each `LogitsProduct`. Logits are their sum: the head's, and those of adapters.
        bias: of the head, of shape (classes,).
        target: of shape (rows,), int64.
        weight, reduction, ignore_index: as `nll_loss_forward` takes them.
        steps: what is done with the logits before the loss: (`mul`, number), (`div`, number), (`tanh`, None),
            (`to`, dtype).
        of_bias: whether a gradient is wanted for the bias.
        tiles: number of tiles.
        slope: gradient of the loss, of its shape; by default one.
        spread: gradient of the log-probabilities' sums over classes, of shape (rows,), as label smoothing has it.

    Returns:
        The loss, of shape (rows,) without reduction; gradients for rows and matrix of the head, and for its bias,
        of shape (1, classes); gradients for rows and matrix of adapters; with `spread`, the sums, of shape (rows,);
        for rows in float16, the number to multiply the gradients by, in float32.
    """
    head, *adapters = terms = [_ProductInTiles(LogitsProduct(*item), tiles) for item in products]
    count, device = head.rows.shape[0], head.rows.device
    loss = torch.zeros((), dtype=torch.float32, device=device)
    losses: list[Tensor] = []
    sums: list[Tensor] = []
    kept = target != ignore_index
    if weight is None:
        total = kept.sum().to(torch.float32)
    else:
        total = (weight[target.where(kept, 0)] * kept).sum()
    for_bias = None
    if slope is None:
        slope = torch.ones((count,) if reduction == NONE else (), dtype=torch.float32, device=device)
    scale = None
    if any(term.rows.dtype == torch.float16 for term in terms):
        scale = _scale(terms, weight, steps, slope / total if reduction == MEAN else slope, spread)
        slope, spread = slope * scale, None if spread is None else spread * scale
    for some in slices(count, -(-count // tiles)):
        targets, logits = target[some], head.of(some, bias)
        for adapter in adapters:
            logits = _sum(logits, adapter.of(some))
        undo: list[Callable[[Tensor], Tensor]] = []
        for name, value in steps:
            logits, step_back = _apply(name, value, logits)
            undo.append(step_back)
        dtype = logits.dtype
        log_probabilities = torch.ops.aten._log_softmax.out(logits, 1, False, out=logits)
        del logits
        form = NONE if reduction == NONE else SUM
        of_tile = torch.ops.aten.nll_loss_forward.default(log_probabilities, targets, weight, form, ignore_index)[0]
        if reduction == NONE:
            losses.append(of_tile)
        else:
            loss += of_tile
        of_loss = (slope[some] if slope.dim() else slope).to(dtype)
        rest = (targets, weight, reduction, ignore_index, total.to(dtype))
        if spread is None:
            back = cross_entropy_backward_(of_loss, log_probabilities, *rest, 1, dtype)
        else:
            sums.append(log_probabilities.sum(1))
            made = torch.ops.aten.nll_loss_backward.default(of_loss, log_probabilities, *rest)
            made += spread[some].unsqueeze(1)
            back = torch.ops.aten._log_softmax_backward_data.out(
                made, log_probabilities, 1, dtype, out=log_probabilities
            )
            del made
        del log_probabilities
        while undo:
            back = undo.pop()(back)
        if of_bias:
            summed = back.to(head.rows.dtype).sum(0, keepdim=True)
            for_bias = summed if for_bias is None else for_bias.add_(summed)
        for term in terms:
            term.take(some, back.to(term.rows.dtype))
        del back
    if reduction == MEAN:
        loss /= total
    made_of_loss = torch.cat(losses) if reduction == NONE else loss.to(dtype)
    of_adapters = [gradient for adapter in adapters for gradient in adapter.gradients()]
    others = ([torch.cat(sums)] if sums else []) + ([] if scale is None else [1 / scale])
    return made_of_loss, *head.gradients(), for_bias, *of_adapters, *others


class _ProductInTiles:
    """A product that makes logits, and the gradients of its operands, tile by tile."""

    def __init__(self, product: LogitsProduct, tiles: int) -> None:
        self.rows, self.matrix, self.factor, of_rows, self.order = product
        self.tiles = tiles
        rows = self.rows
        self.of_rows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if of_rows else None
        self.of_matrix: Tensor | None = None

    def of(self, some: slice, bias: Tensor | None = None) -> Tensor:
        """The product of some rows."""
        if bias is not None:
            return torch.addmm(bias, self.rows[some], self.matrix)
        made: Tensor = self.rows[some] @ self.matrix
        return made if self.factor == 1 else made.mul_(self.factor)

    def take(self, some: slice, slope: Tensor) -> None:
        """Take the gradient of the logits of some rows, in the product's dtype."""
        if self.of_rows is not None:
            torch.mm(slope, self.matrix.t(), out=self.of_rows[some])
        if self.order is not None:
            rows = self.rows[some]
            left, right = (slope.t(), rows) if self.order == BY_CLASS else (rows.t(), slope)
            self.of_matrix = added_product(self.of_matrix, left, right, self.tiles)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of rows and matrix, once all tiles are taken."""
        if self.factor != 1:
            for made in (self.of_rows, self.of_matrix):
                _ = made is None or made.mul_(self.factor)
        return self.of_rows, None if self.of_matrix is None else self.of_matrix.to(self.rows.dtype)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """A sum, over an operand of its dtype."""
    if one.dtype != torch.promote_types(one.dtype, other.dtype):
        one, other = other, one
    return one.add_(other)


def _scale(
    products: Sequence[_ProductInTiles],
    weight: Tensor | None,
    steps: Iterable[tuple[str, Any]],
    slope: Tensor,
    spread: Tensor | None,
) -> Tensor:
    """The largest power of two with which no gradient in float16 overflows."""
    largest = slope.abs().amax().to(torch.float32)
    if weight is not None:
        largest = largest * weight.abs().amax()
    if spread is not None:
        largest = largest + products[0].matrix.shape[1] * spread.abs().amax()
    for name, value in steps:
        largest = largest * (abs(value) if name == "mul" else 1 / abs(value) if name == "div" else 1)
    bound = torch.ones((), device=slope.device)
    for product in products:
        rows, matrix = (
            torch.linalg.vector_norm(item, torch.inf).to(torch.float32) for item in (product.rows, product.matrix)
        )
        of_matrix, of_rows = product.rows.shape[0] * rows.clamp(min=1), 2 * matrix
        bound = bound.minimum(_LARGEST_SUM / (max(1, abs(product.factor)) * of_matrix.maximum(of_rows)))
    scale = torch.exp2(torch.log2(bound / largest).floor())
    return scale.where(scale.isfinite() & (scale > 0), 1.0)  # there is no loss, or it is not finite


def _apply(name: str, value: Any, logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A step between logits and loss, over its operand, and the function that takes its gradient back."""
    if name == "mul":
        return logits.mul_(value), lambda slope: slope.mul_(value)
    if name == "div":
        return logits.div_(value), lambda slope: slope.div_(value)
    if name == "tanh":
        made = logits.tanh_().clone()
        return logits, lambda slope: torch.ops.aten.tanh_backward.grad_input(slope, made, grad_input=slope)
    before = logits.dtype
    return logits.to(getattr(torch, value)), lambda slope: slope.to(before)


def _multiply_scaled(made: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """A gradient in float16 times a number in float32, which float16 may not hold."""
    for some in slices(gradient.shape[0], _ELEMENTS // gradient.shape[1]):
        made[some] = gradient[some].to(torch.float32) * factor
    return made


multiply_scaled, multiply_scaled_ = function_pair(
    _multiply_scaled,
    "multiply_scaled",
    passes=5.0,
    workspace_bytes=lambda call: 8 * min(_ELEMENTS, elements(tensor_at(call, 0))),
    launches=lambda call: 3 * -(-elements(tensor_at(call, 0)) // _ELEMENTS),
)


@alternatives_for("monetlite.multiply_scaled")
def scaled_in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The same over the gradient."""
    if overwrites := kernel.over(kernel.args[0]):
        yield kernel.implement("inplace", multiply_scaled_, overwrites=overwrites)


@alternatives_for("monetlite.linear_cross_entropy")
def in_tiles(kernel: TracedKernel) -> Iterator[Implementation]:
    """The same in several tiles."""
    count = _products(kernel.call)[0].rows.spec.shape[0]
    for tiles in TILES:
        if count // tiles >= MIN_TILE_ROWS:
            args: tuple[Argument, ...] = (*kernel.args[:8], tiles, *kernel.args[9:])
            yield kernel.implement(f"tiles_{tiles}", linear_cross_entropy, args=args)
