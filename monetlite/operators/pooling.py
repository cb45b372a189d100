"""Max pooling: its gradient needs the indices of the maxima alone, not the input they were found in."""

from collections.abc import Iterator

import torch

from monetlite.graph import Implementation, TensorRef
from monetlite.operators.kernel import Kernel

_TARGET = "aten.max_pool2d_with_indices_backward.default"


def backward_without_input(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient from the indices and the input's shape."""
    if kernel.call.target != _TARGET:
        return
    gradient, source, *rest = kernel.call.args
    if not isinstance(source, TensorRef) or source.value is None or not is_contiguous(source):
        return
    yield kernel.implement(
        "from_indices",
        target="monetlite.max_pool2d_backward_from_indices",
        args=(gradient, source.spec.shape, *rest),
    )


def is_contiguous(ref: TensorRef) -> bool:
    """Whether a tensor is laid out row by row."""
    expected = 1
    for size, stride in zip(reversed(ref.spec.shape), reversed(ref.spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def max_pool2d_backward_from_indices(gradient: torch.Tensor, input_shape: list[int], *rest: object) -> torch.Tensor:
    """Gradient of `max_pool2d` with respect to its input, of shape `input_shape`.

    ATen's kernel takes the input for its shape and layout only, so one element stands for all of it.
    """
    stand_in = gradient.new_empty(1).expand(input_shape)
    result: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward.default(gradient, stand_in, *rest)
    return result
