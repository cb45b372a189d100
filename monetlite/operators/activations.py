"""GELU and SiLU: their gradients from the input in half the bytes.

Both need the input itself, not a mask. Kept as bfloat16 it takes half the memory; the relative error of 2⁻⁹ in
the input moves the derivative by at most 2⁻⁹·max|x·f″(x)| < 2⁻⁹, and the gradient by that times its own size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetlite.core.graph import Call, Implementation, TensorRef
from monetlite.fx.calls import spec_of
from monetlite.operators.kernel import Kernel, is_dense, same_layout
from monetlite.operators.packing import in_order, over_in_order, piece_elements
from monetlite.operators.registry import Intermediate, alternatives_for, function, intermediates_for, name_of

_BACKWARD = {"aten.gelu_backward.default": "gelu_backward", "aten.silu_backward.default": "silu_backward"}
TOLERANCE = 2.0**-8


@intermediates_for(*_BACKWARD)
def rounded(node: fx.Node) -> Iterator[Intermediate]:
    """The input as bfloat16."""
    gradient, source = node.args[:2]
    assert isinstance(gradient, fx.Node)
    assert isinstance(source, fx.Node)
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
def backward_from_rounded(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient from the rounded input."""
    if "bfloat16" not in kernel.intermediates:
        return
    gradient = kernel.call.args[0]
    assert isinstance(gradient, TensorRef)
    approximate = dict(kernel.call.kwargs).get("approximate", "none")
    rounded_input, aten_name = kernel.intermediates["bfloat16"], _BACKWARD[kernel.call.target]
    args = (gradient, rounded_input, gradient.spec.stride, aten_name, approximate)
    yield kernel.implement(
        "from_bfloat16", target=name_of(backward_from_bfloat16), args=args, kwargs=(), tolerance=TOLERANCE
    )
    if overwrites := kernel.over(gradient):
        yield kernel.implement(
            "from_bfloat16_inplace",
            target=name_of(backward_from_bfloat16_),
            args=args,
            kwargs=(),
            overwrites=overwrites,
            tolerance=TOLERANCE,
        )


@function("to_bfloat16")
def to_bfloat16(source: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A tensor's elements in the order of a storage with these strides, rounded: shape (elements,), bfloat16."""
    return in_order(source, strides).to(torch.bfloat16)


def _piece_bytes(call: Call) -> int:
    return 2 * 4 * piece_elements(torch.device("cuda"))


@function("backward_from_bfloat16", workspace_bytes=_piece_bytes)
def backward_from_bfloat16(
    gradient: torch.Tensor, source: torch.Tensor, strides: list[int], kernel: str, approximate: str
) -> torch.Tensor:
    """Gradient of GELU or SiLU from `to_bfloat16`'s result; `kernel` is ATen's name for it."""
    copy = gradient.clone(memory_format=torch.preserve_format)
    return backward_from_bfloat16_(copy, source, strides, kernel, approximate)


@function("backward_from_bfloat16_", workspace_bytes=_piece_bytes)
def backward_from_bfloat16_(
    gradient: torch.Tensor, source: torch.Tensor, strides: list[int], kernel: str, approximate: str
) -> torch.Tensor:
    """The same, over the gradient."""
    run = {"gelu_backward": torch.ops.aten.gelu_backward, "silu_backward": torch.ops.aten.silu_backward}[kernel]
    options: dict[str, Any] = {"approximate": approximate} if kernel == "gelu_backward" else {}
    step = piece_elements(gradient.device)

    def write(flat: torch.Tensor) -> None:
        for start in range(0, len(source), step):
            some = slice(start, start + step)
            run.grad_input(flat[some], source[some].float(), **options, grad_input=flat[some])

    return over_in_order(gradient, strides, write)
