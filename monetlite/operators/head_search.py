"""The search for the head of a language model with its loss in a captured graph.

A head is a matrix product, or the sum of one and of an adapter's (LoRA), and element-wise operators with numbers (a
soft cap, a scale, a conversion). Its loss is the cross-entropy of the result. Some of the logits may be left out on
the way (the last of each sequence).
What is done with the loss afterwards is looked for in `loss_gradient.py`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monetlite.fx import storages
from monetlite.operators.loss_gradient import LossGradient, NodeOrder, find_loss_gradient, linear_in
from monetlite.operators.tiled_loss import BY_CLASS, BY_FEATURE

_VIEWS = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.detach.default",
        "aten.alias.default",
        "aten.clone.default",
    }
)
"""Views, and copies, which have the same rows."""
_SLICE, SLICE_BACK = "aten.slice.Tensor", "aten.slice_backward.default"
_PRODUCTS = {"aten.mm.default": (0, 1, None), "aten.addmm.default": (1, 2, 0)}
"""Positions of rows, matrix and bias."""
_TRANSPOSE = "aten.t.default"
_BY_NUMBER = {"aten.mul.Tensor": "mul", "aten.div.Tensor": "div"}
_SUM, _SUM_OF_CLASSES = "aten.add.Tensor", "aten.sum.dim_IntList"


@dataclass
class Product:
    """A matrix product that makes logits.

    Attributes:
        node: the product.
        numbers: what it is multiplied by.
        rows, matrix, bias: nodes that make the gradients.
        order: of the matrix's gradient.
    """

    node: fx.Node
    numbers: list[float]
    rows: fx.Node | None = None
    matrix: fx.Node | None = None
    order: str | None = None
    bias: fx.Node | None = None

    @property
    def operands(self) -> tuple[Any, Any, Any]:
        """Rows, matrix and bias, if there is one."""
        rows, matrix, bias = _PRODUCTS[str(self.node.target)]
        return self.node.args[rows], self.node.args[matrix], None if bias is None else self.node.args[bias]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the product."""
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype


@dataclass
class HeadAndLoss:
    """The kernels of a head and its loss, and what they read and make.

    Attributes:
        products: their sum is the logits; one, or that of the head and that of an adapter.
        dtype: of their sum.
        steps: between the logits and the loss; `slice` is one of them.
        gradient: of the loss.
        sums: of log-probabilities over classes, in the forward pass.
        incoming: the gradient of a single number that becomes of the loss.
        linear: the nodes that make the gradients of loss and sums of it, in order; moved: what they read that has
            to be made earlier.
        before: the node that all of this has to stand before.
        inside: all nodes that go.
    """

    products: list[Product]
    dtype: torch.dtype
    steps: list[tuple[str, Any]]
    gradient: LossGradient
    sums: list[fx.Node]
    incoming: fx.Node
    linear: list[fx.Node]
    moved: list[fx.Node]
    before: fx.Node
    inside: set[fx.Node] = field(default_factory=set)


def heads_and_losses(graph: fx.Graph) -> Iterator[HeadAndLoss]:
    """The heads with their losses in a graph that `operators.merge` has been through.

    Each is found when the one before it may have been replaced.
    """
    for node in list(graph.nodes):
        gradient = find_loss_gradient(node)
        if gradient is not None and (found := _find(gradient, NodeOrder(graph))) is not None:
            yield found


def _find(gradient: LossGradient, order: NodeOrder) -> HeadAndLoss | None:
    """The head and the loss that a gradient is of; None if they have another form, or something else reads them."""
    probabilities, target, *_, total = gradient.of_loss
    softmax, loss = storages.base(probabilities), total.args[0]
    if str(softmax.target) != "aten._log_softmax.default" or softmax.args[2]:
        return None
    if target.meta["val"].dim() != 1 or storages.base(loss.args[0]) is not softmax:
        return None
    steps: list[tuple[str, Any]] = []
    node: Any = softmax.args[0]
    sums = [user for user in softmax.users if _sums_classes(user)] if gradient.spread is not None else []
    if gradient.spread is not None and not sums:
        return None
    forward = {softmax, loss, *sums}
    while (products := _products(node, forward)) is None:
        step = _step(node)
        if step is None:
            return None
        if step[0] == "slice" and any(name == "slice" for name, _ in steps):
            return None
        forward.add(node)
        steps += [step] if step[0] else []
        node = node.args[0]
    if any(name == "slice" for name, _ in steps) and (sums or gradient.slope.meta["val"].dim()):
        return None  # their rows are those that are left, and the kernel's are all
    narrow, wide = {product.dtype for product in products}, gradient.last.meta["val"].dtype
    if torch.float16 in narrow and wide != torch.float32:  # nor has plain training a loss that is accurate
        return None
    losses = [item for item in loss.users if item.args[1] == 0]
    readers = [user for item in (*losses, *sums) for user in item.users]
    before = min((*gradient.kernels, *readers), key=order.position.__getitem__)
    linear = linear_in(gradient, before, [product.node for product in products], order)
    if linear is None:
        return None
    incoming, between, moved = linear
    found = HeadAndLoss(
        products=products,
        dtype=node.meta["val"].dtype,
        steps=steps[::-1],
        gradient=gradient,
        sums=sums,
        incoming=incoming,
        linear=between,
        moved=moved,
        before=before,
    )
    return found if _encloses(found, forward) else None


def _products(node: Any, forward: set[fx.Node]) -> list[Product] | None:
    """The products that logits are the sum of; None if they are something else. Notes the nodes on the way."""
    if str(node.target) in _PRODUCTS:
        return [Product(node, [])] if _is_product(node) else None
    if str(node.target) != _SUM or node.kwargs or not all(isinstance(item, fx.Node) for item in node.args):
        return None
    if any(item.meta["val"].shape != node.meta["val"].shape for item in node.args):
        return None
    terms = [_term(item) for item in node.args]
    if None in terms:
        return None
    products, nodes = zip(*terms, strict=True)
    head, adapter = sorted(products, key=lambda product: bool(product.numbers))
    if head.numbers or adapter.operands[2] is not None or len(adapter.numbers) > 1:
        return None
    forward.update({node}, *nodes)
    return [head, adapter]


def _term(node: Any) -> tuple[Product, set[fx.Node]] | None:
    """A product, what it is multiplied by, and the nodes on the way; None if there is something else."""
    numbers: list[float] = []
    nodes: set[fx.Node] = set()
    while str(node.target) not in _PRODUCTS:
        step = _step(node)
        if step is None or step[0] not in ("", "mul"):
            return None
        nodes.add(node)
        numbers += [step[1]] if step[0] else []
        node = node.args[0]
    return (Product(node, numbers), nodes) if _is_product(node) else None


def _is_product(node: Any) -> bool:
    """True for a product of rows and a matrix, with a bias of a number for each class or without."""
    bias = _PRODUCTS[str(node.target)][2]
    return not node.kwargs and (bias is None or node.args[bias].meta["val"].dim() == 1)


def _sums_classes(node: Any) -> bool:
    return (
        str(node.target) == _SUM_OF_CLASSES
        and len(node.args) == 2
        and not node.kwargs
        and list(node.args[1]) in ([1], [-1])
    )


def _step(node: Any) -> tuple[str, Any] | None:
    """The step that a node between logits and loss is: ("", None) for a view of rows; None if it isn't known."""
    name = str(node.target)
    if node.op != "call_function":
        return None
    if name in _VIEWS and node.kwargs.get("memory_format", torch.contiguous_format) is torch.contiguous_format:
        same = node.meta["val"].shape[-1:] == node.args[0].meta["val"].shape[-1:]
        return ("", None) if same else None
    if name == _SLICE:
        return _slice(node, node.args[0].meta["val"].shape, *node.args[1:])
    if name == SLICE_BACK:
        return _slice(node, node.meta["val"].shape, *node.args[2:])
    if name in _BY_NUMBER and isinstance(node.args[1], (int, float)):
        return _BY_NUMBER[name], float(node.args[1])
    if name == "aten.tanh.default":
        return "tanh", None
    if name == "aten._to_copy.default" and not {"memory_format", "non_blocking"} & set(node.kwargs):
        here, before = node.meta["val"], node.args[0].meta["val"]
        if here.device == before.device and here.is_floating_point():
            return "to", str(here.dtype).removeprefix("torch.")
    return None


def _slice(
    node: Any, shape: Sequence[int], dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[str, Any] | None:
    """The step that leaves out some logits, by the dimension and the numbers left out before and after."""
    dim, start, end = dim % len(shape), start or 0, sys.maxsize if end is None else end
    if node.kwargs or dim == len(shape) - 1 or step != 1 or {type(start), type(end)} != {int}:
        return None  # numbers that vary with the sizes among them
    if start < 0 or 0 <= end < shape[dim]:
        return None
    return "slice", (tuple(shape[:-1]), dim, start, -end if end < 0 else 0)


def _encloses(found: HeadAndLoss, forward: set[fx.Node]) -> bool:
    """Find all that depends on the logits; False if that is more than the loss and gradients for the head."""
    waiting = [product.node for product in found.products]
    seen = set(waiting)
    ends: list[fx.Node] = []
    while waiting:
        node = waiting.pop()
        found.inside.add(node)
        for user in () if node in found.sums else node.users:
            if any(user is product.node for product in found.products):
                return False  # one product is made of the other
            if user in seen:
                continue
            seen.add(user)
            name = str(user.target)
            if user in forward or user in found.gradient.kernels or user is found.gradient.total:
                waiting.append(user)
            elif storages.is_item(user) and user.args[1] == 0 and user.args[0] in forward:
                continue  # the loss
            elif name in ("aten.mm.default", "aten.sum.dim_IntList"):
                ends.append(user)
            elif name == "aten.tanh_backward.default" or name == _TRANSPOSE or _step(user) is not None:
                waiting.append(user)
            else:
                return False
    return all(any(_is_gradient(found, product, end) for product in found.products) for end in ends) and any(
        product.rows or product.matrix for product in found.products
    )


def _is_gradient(found: HeadAndLoss, product: Product, end: Any) -> bool:
    """Note the gradient of a product's operand that a kernel makes; False if it is something else."""
    rows, matrix, bias = product.operands
    logits = product.node.meta["val"].shape
    slope, other = end.args[:2]
    if str(end.target) == "aten.sum.dim_IntList":
        fits = list(other) == [0] and end.meta["val"].shape == (1, logits[1]) and bias is not None
        kind = "bias"
    elif slope in found.inside and slope.meta["val"].shape == logits:
        fits, kind = _is_transpose(other, matrix), "rows"
    elif other is rows:
        fits, kind = slope.meta["val"].shape == logits[::-1], BY_CLASS
    else:
        fits, kind, slope = other.meta["val"].shape == logits and _is_transpose(slope, rows), BY_FEATURE, other
    name = "matrix" if kind in (BY_CLASS, BY_FEATURE) else kind
    if not fits or getattr(product, name) is not None:
        return False
    if _taken_back(slope, found.gradient.last) != _expected(found, product):
        return False
    setattr(product, name, end)
    product.order = kind if name == "matrix" else product.order
    return True


def _expected(found: HeadAndLoss, product: Product) -> list[tuple[str, Any]]:
    """The steps that take the gradient of the loss back to a product."""
    own: list[tuple[str, Any]] = [("mul", number) for number in product.numbers]
    if product.dtype != found.dtype:
        own.append(("to", str(found.dtype).removeprefix("torch.")))
    steps, dtype = [], str(product.dtype).removeprefix("torch.")
    for name, value in (*own, *found.steps):
        steps.append((name, dtype if name == "to" else value))
        dtype = value if name == "to" else dtype
    return steps[::-1]


def _taken_back(node: Any, backward: fx.Node) -> list[tuple[str, Any]] | None:
    """The steps from the gradient of a loss to a node; None if there are others, such as a hook's."""
    steps: list[tuple[str, Any]] = []
    while node is not backward:
        if str(node.target) == "aten.tanh_backward.default":
            steps.append(("tanh", None))
        elif str(node.target) != _TRANSPOSE:
            step = _step(node)
            if step is None:
                return None
            steps += [step] if step[0] else []
        node = node.args[0]
    return steps[::-1]


def _is_transpose(node: Any, other: Any) -> bool:
    """True if two nodes are a matrix and its transpose."""
    here, there = node.meta["val"], other.meta["val"]
    return (
        storages.base(node) is storages.base(other)
        and (here.shape, here.stride()) == (there.shape[::-1], there.stride()[::-1])
        and here.storage_offset() == there.storage_offset()
    )
