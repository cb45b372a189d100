"""Elementwise operators in place: the result takes the memory of an operand that dies there.

Each element of the result depends on the same element of the operands alone, so writing over an operand
changes no bit of the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monetlite.core.graph import Implementation, TensorRef, TensorSpec
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.storages import base
from monetlite.operators.implementations import TracedKernel, alternatives_for
from monetlite.operators.strides import same_layout
from monetlite.operators.traits import TRAITS, traits_of

_OTHERWISE_NAMED = {"aten.pow.Tensor_Scalar": "aten.pow_.Scalar", "aten.mul.Scalar": "aten.mul_.Tensor"}
"""In-place variants that are not found by name.

`mul_.Scalar` rounds the number to the tensor's dtype first and `mul.Scalar` doesn't; `mul_.Tensor`, which
takes a number too, doesn't either.
"""

_TO_THE_END = 2**62
"""The end of a slice that has none is the largest integer, or about that."""


def remove_copies(graph: fx.Graph) -> None:
    """Read the original wherever a captured graph has a copy of the same layout.

    Autograd copies what an in-place operator is about to overwrite and its gradient needs (the input of an
    in-place ReLU6). In a captured graph nothing is overwritten. What is returned, or a view of it, stays a copy,
    as its reader may overwrite it; and a copy of a conjugate is the conjugate itself, which is only marked before.
    """
    (output,) = graph.find_nodes(op="output")
    returned = {base(node) for node in output.all_input_nodes}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        marked = source.meta["val"].is_conj() or source.meta["val"].is_neg()
        if node in returned or base(source).op != "call_function" or marked:
            continue
        if same_layout(spec_of(node.meta["val"]), spec_of(source.meta["val"])):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice_backward.default):
        source = node.args[0]
        if node not in returned and base(source).op == "call_function" and _is_of_all(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_of_all(gradient: fx.Node) -> bool:
    """True for the gradient of a slice that takes all of a dimension, which is the gradient that comes in.

    A capture of fixed sizes leaves it out; one of sizes that vary has it.
    """
    arguments: Any = gradient.args
    source, shape, dimension, start, end, step = arguments
    one, other = spec_of(source.meta["val"]), spec_of(gradient.meta["val"])
    size = shape[dimension]
    return start == 0 and step == 1 and (end == size or end >= _TO_THE_END) and same_layout(one, other)


@alternatives_for(*(f"aten.{name}.{overload}" for name, traits in TRAITS.items() for overload in traits.in_place))
def in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The in-place variants of an elementwise kernel: over the first operand, and over the second where it may."""
    target = kernel.call.target
    tensors = [item.spec for item in kernel.args if isinstance(item, TensorRef)]
    if _rounds_otherwise(target, tensors):
        return
    operands = kernel.args[:2] if traits_of(target).commutative and target.endswith(".Tensor") else kernel.args[:1]
    for position, (name, operand) in enumerate(zip(("inplace", "inplace_second"), operands, strict=False)):
        if overwrites := kernel.over(operand):
            run, keyword = over_operand(target, position)
            kwargs = (*kernel.call.kwargs, *([(keyword, operand)] if keyword else []))
            yield kernel.implement(name, run, kwargs=kwargs, overwrites=overwrites)


def _rounds_otherwise(target: str, tensors: Sequence[TensorSpec]) -> bool:
    """True for quotients of complex tensors, and for other operators on complex tensors of several layouts.

    Torch computes with numbers one by one or with vectors, which round otherwise, by the layouts of operands and
    result. Of quotients, the last few are computed otherwise in place.
    """
    layouts = [item for item in tensors if item.dtype.startswith("complex")]
    if not layouts:
        return False
    return target.startswith("aten.div.") or any(not same_layout(item, layouts[0]) for item in tensors)


def over_operand(target: str, position: int) -> tuple[str, str]:
    """The variant of an elementwise operator that writes over an operand, and the keyword for that; empty if none.

    >>> over_operand("aten.mul.Tensor", 1)
    ('aten.mul.out', 'out')
    """
    _, name, overload = target.split(".")
    if name.endswith("_backward"):
        return f"aten.{name}.grad_input", "grad_input"
    if position == 0:
        return _OTHERWISE_NAMED.get(target, f"aten.{name}_.{overload}"), ""
    return f"aten.{name}.out", "out"


def with_in_place(kernel: TracedKernel, implementation: Implementation) -> Iterator[Implementation]:
    """An implementation that calls an elementwise gradient, and the same over the gradient that comes in."""
    yield implementation
    assert implementation.call is not None
    for item in in_place(replace(kernel, call=implementation.call)):
        yield replace(item, name=f"{implementation.name}_inplace")
