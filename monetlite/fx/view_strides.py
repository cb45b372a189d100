"""Strides of views as kernels make them, where a dimension is one."""

from collections.abc import Sequence

import torch


def strides_of_view(shape: Sequence[int], strides: Sequence[int], source: torch.Tensor) -> list[int]:
    """The strides that `source.view(shape)` has on a device, as of ATen's `computeStride`.

    Dimensions of one go on from those after them. Any stride leads to the same elements there, and torch's fake
    tensors have others; but kernels choose by strides.

    Args:
        shape: of the view.
        strides: of the view, right but for dimensions of one.
        source: what is viewed.
    """
    found, following = list(strides), source.stride()[-1] if source.dim() else 1
    for at in reversed(range(len(shape))):
        if isinstance(shape[at], int) and shape[at] == 1:
            found[at] = following
        following = shape[at] * found[at]
    return found
