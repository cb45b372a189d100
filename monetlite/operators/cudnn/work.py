"""The work of a convolution: shapes, layouts, dtype and the arithmetic that is allowed."""

import math
from typing import Literal, NamedTuple, TypeAlias

from monetlite.operators.convolution_kernels import output_padding

Role: TypeAlias = Literal["forward", "input_gradient", "weight_gradient"]
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and stride, in elements."""

DTYPES = ("float32", "float16", "bfloat16")
MADE = {"forward": "result", "input_gradient": "image", "weight_gradient": "weight"}
"""The layout that each role writes."""
OPERANDS = {
    "forward": ("image", "weight"),
    "input_gradient": ("result", "weight"),
    "weight_gradient": ("image", "result"),
}
"""The layouts that each role reads."""


class ConvolutionWork(NamedTuple):
    """A convolution, or one of its gradients, as cuDNN has to know it; an argument of calls.

    Transposed convolutions are not covered.

    `image` is (batch, channels, *space), `weight` is (features, channels / groups, *kernel), and `result` is the
    forward convolution's, (batch, features, *space), or its gradient. Which two of the three are read and which one
    is made depends on `role`. There are one, two or three dimensions of space, and `stride`, `padding` and
    `dilation` have an entry for each. `dtype` is one of `DTYPES`.

    `tf32` allows float32 inputs to be rounded to TF32 (19 bits), as `torch.backends.cudnn.allow_tf32` does; it
    means nothing to other dtypes. `deterministic` leaves out plans that may sum in another order from run to
    run. A bias is not part of the work.
    """

    role: Role
    image: Layout
    weight: Layout
    result: Layout
    dtype: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    tf32: bool = False
    deterministic: bool = False

    @property
    def operands(self) -> tuple[Layout, Layout]:
        """The layouts that are read, in the order of `run_plan`'s arguments."""
        first, second = OPERANDS[self.role]
        return getattr(self, first), getattr(self, second)

    @property
    def made(self) -> Layout:
        """The layout that is written."""
        layout: Layout = getattr(self, MADE[self.role])
        return layout

    @property
    def beyond(self) -> tuple[int, ...]:
        """Points by which the image reaches past a transposed convolution of the result."""
        sizes = self.image[0][2:], self.weight[0][2:], self.stride, self.padding, self.dilation
        return output_padding(*sizes, self.result[0][2:])

    @property
    def plannable(self) -> bool:
        """Tell whether cuDNN may be asked: no tensor is empty, overlaps itself or needs indices beyond 32 bits."""
        return all(
            3 <= len(shape) <= 5
            and 0 < math.prod(shape) < 2**31
            and all(step > 0 or size == 1 for size, step in zip(shape, stride, strict=True))
            for shape, stride in (self.image, self.weight, self.result)
        )
