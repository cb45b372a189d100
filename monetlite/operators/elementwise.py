"""Elementwise operators in place: the result takes the memory of an operand that dies there.

Each element of the result depends on the same element of the operands alone, so writing over an operand
changes no bit of the result.
"""

from collections.abc import Iterator

import torch
from torch import fx

from monetlite.core.graph import Implementation
from monetlite.fx.calls import spec_of
from monetlite.fx.storages import base
from monetlite.operators.kernel import Kernel, same_layout
from monetlite.operators.registry import alternatives_for

_IN_PLACE = {
    f"aten.{name}.{overload}": f"aten.{name}_.{overload}"
    for name, overload in (
        *((unary, "default") for unary in ("relu", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "leaky_relu")),
        *(
            (unary, "default")
            for unary in ("elu", "hardswish", "hardsigmoid", "neg", "exp", "sqrt", "rsqrt", "cos")
        ),
        *((unary, "default") for unary in ("sin", "log", "abs", "reciprocal", "mish", "clamp")),
        *((binary, "Tensor") for binary in ("add", "sub", "mul", "div")),
        *((binary, "Scalar") for binary in ("add", "sub", "div")),
        ("masked_fill", "Scalar"),
    )
} | {
    "aten.pow.Tensor_Scalar": "aten.pow_.Scalar",
    "aten.mul.Scalar": "aten.mul_.Tensor",
}
"""Operators with a variant that overwrites the first operand.

`mul_.Scalar` rounds the number to the tensor's dtype first and `mul.Scalar` doesn't; `mul_.Tensor`, which
takes a number too, doesn't either.
"""

_COMMUTATIVE = {"aten.add.Tensor": "aten.add.out", "aten.mul.Tensor": "aten.mul.out"}
"""Operators whose result may as well take the memory of the second operand."""

_GRADIENTS = {
    f"aten.{name}.default": f"aten.{name}.grad_input"
    for name in (
        "threshold_backward",
        "gelu_backward",
        "silu_backward",
        "hardtanh_backward",
        "tanh_backward",
        "sigmoid_backward",
        "leaky_relu_backward",
        "elu_backward",
    )
}
"""Gradients of elementwise operators, which overwrite the gradient that comes in."""


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
        if node in returned or base(source).op != "call_function" or _is_marked(source.meta["val"]):
            continue
        if same_layout(spec_of(node.meta["val"]), spec_of(source.meta["val"])):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor is another one's conjugate or negative, of which only a bit says so."""
    return tensor.is_conj() or tensor.is_neg()


@alternatives_for(*_IN_PLACE, *(set(_COMMUTATIVE) - set(_IN_PLACE)), *_GRADIENTS)
def in_place(kernel: Kernel) -> Iterator[Implementation]:
    """The in-place variants of an elementwise kernel."""
    target, args = kernel.call.target, kernel.call.args
    over_first = kernel.over(args[0])
    if target in _IN_PLACE and over_first:
        yield kernel.implement("inplace", target=_IN_PLACE[target], overwrites=over_first)
    if target in _COMMUTATIVE and len(args) > 1 and (over_second := kernel.over(args[1])):
        yield kernel.implement(
            "inplace_second",
            target=_COMMUTATIVE[target],
            kwargs=(*kernel.call.kwargs, ("out", args[1])),
            overwrites=over_second,
        )
    if target in _GRADIENTS and over_first:
        yield kernel.implement(
            "inplace",
            target=_GRADIENTS[target],
            kwargs=(*kernel.call.kwargs, ("grad_input", args[0])),
            overwrites=over_first,
        )
