"""GELU and SiLU: their gradients from the input in half the bytes.

Both need the input itself, not a mask. Kept as bfloat16 it takes half the memory; the relative error of 2⁻⁹ in
the input moves the derivative by at most 2⁻⁹·max|x·f″(x)| < 2⁻⁹, and the gradient by that times its own size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetlite.core.graph import Implementation
from monetlite.fx.call_encoding import spec_of
from monetlite.operators.implementations import (
    Intermediate,
    TracedKernel,
    alternatives_for,
    function,
    function_pair,
    intermediates_for,
    slices,
)
from monetlite.operators.packing import in_order, over_in_order, piece_elements
from monetlite.operators.strides import is_dense, same_layout

_BACKWARD = {"aten.gelu_backward.default": "gelu_backward", "aten.silu_backward.default": "silu_backward"}
TOLERANCE = 2.0**-8


@intermediates_for(*_BACKWARD)
def rounded(gradient: fx.Node, source: fx.Node) -> Iterator[Intermediate]:
    """The input as bfloat16."""
    layout = spec_of(source.meta["val"])
    if layout.dtype == "float32" and is_dense(layout) and same_layout(layout, spec_of(gradient.meta["val"])):
        yield Intermediate(
            name="bfloat16",
            function=to_bfloat16,
            ways=(("default", (source, list(layout.stride))),),
            shape=(source.meta["val"].numel(),),
            dtype="bfloat16",
        )


@alternatives_for(*_BACKWARD)
def backward_from_rounded(kernel: TracedKernel) -> Iterator[Implementation]:
    """The gradient from the rounded input."""
    if rounded_input := kernel.intermediates.get("bfloat16"):
        gradient = kernel.args[0]
        approximate = dict(kernel.call.kwargs).get("approximate", "none")
        args = (gradient, rounded_input, gradient.spec.stride, _BACKWARD[kernel.call.target], approximate)
        yield from kernel.implement_over(
            "from_bfloat16", backward_from_bfloat16, backward_from_bfloat16_, args, tolerance=TOLERANCE
        )


@function("to_bfloat16")
def to_bfloat16(source: Tensor, strides: list[int]) -> Tensor:
    """A tensor's elements in the order of a storage with these strides, rounded: shape (elements,), bfloat16."""
    return in_order(source, strides).to(torch.bfloat16)


def _from_bfloat16(
    result: Tensor, gradient: Tensor, source: Tensor, strides: list[int], kernel: str, approximate: str
) -> Tensor:
    """Gradient of GELU or SiLU from the result of `to_bfloat16`.

    `kernel` is ATen's name for it.
    """
    run = getattr(torch.ops.aten, kernel)
    options: dict[str, Any] = {"approximate": approximate} if kernel == "gelu_backward" else {}
    step = piece_elements(gradient.device)

    def write(flat: Tensor) -> None:
        for some in slices(len(source), step):
            run.grad_input(flat[some], source[some].float(), **options, grad_input=flat[some])

    return over_in_order(result if result is gradient else result.copy_(gradient), strides, write)


backward_from_bfloat16, backward_from_bfloat16_ = function_pair(
    _from_bfloat16,
    "backward_from_bfloat16",
    workspace_bytes=lambda _: 2 * 4 * piece_elements(torch.device("cuda")),
)
