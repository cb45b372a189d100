"""The work of a convolution: shapes, layouts, dtype and the arithmetic that is allowed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from monetlite.core.errors import ConvolutionError
from monetlite.core.graph import Argument
from monetlite.operators.convolution_kernels import output_padding, result_size

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


@dataclass(frozen=True, kw_only=True)
class ConvolutionWork:
    """A convolution, or one of its gradients, as cuDNN has to know it. Transposed convolutions are not covered.

    Shapes and strides count elements: `image` is (batch, channels, *space), `weight` is (features, channels /
    groups, *kernel), and `result` is the forward convolution's, (batch, features, *space), or its
    gradient. Which two of the three are read and which one is made depends on `role`. There are one, two
    or three dimensions of space, and `stride`, `padding` and `dilation` have an entry for each.

    `tf32` allows float32 inputs to be rounded to TF32 (19 bits), as `torch.backends.cudnn.allow_tf32` does; it
    means nothing to other dtypes. `deterministic` leaves out plans that may sum in another order from run to
    run. A bias is not part of the work.

    Raises:
        ConvolutionError: the fields contradict one another.
    """

    role: Role
    image_shape: tuple[int, ...]
    image_stride: tuple[int, ...]
    weight_shape: tuple[int, ...]
    weight_stride: tuple[int, ...]
    result_shape: tuple[int, ...]
    result_stride: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    tf32: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ConvolutionError(f"a convolution's role is one of {', '.join(get_args(Role))}, not {self.role!r}")
        if self.dtype not in DTYPES:
            raise ConvolutionError(f"cuDNN plans are for {', '.join(DTYPES)}, and this convolution is {self.dtype}")
        space = len(self.image_shape) - 2
        if not 1 <= space <= 3:
            raise ConvolutionError(f"an image has 3 to 5 dimensions, and this one is {self.image_shape}")
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, tuple):
                continue
            expected = space + 2 if "_" in item.name else space
            least = 1 if item.name.endswith("_shape") or item.name in ("stride", "dilation") else 0
            if len(value) != expected or min(value) < least:
                raise ConvolutionError(
                    f"{item.name} of a convolution over {space} dimensions is {expected} integers "
                    f"of at least {least}, not {value}"
                )
        self._check_shapes()

    def _check_shapes(self) -> None:
        batch, channels, *image = self.image_shape
        features, group_channels, *kernel = self.weight_shape
        if self.groups < 1 or channels != group_channels * self.groups or features % self.groups:
            raise ConvolutionError(
                f"{self.groups} groups don't fit an image of {channels} channels "
                f"and a weight of {features} × {group_channels}"
            )
        made = result_size(image, kernel, self.stride, self.padding, self.dilation)
        if self.result_shape != (batch, features, *made):
            raise ConvolutionError(
                f"a convolution of {self.image_shape} with {self.weight_shape} (stride {self.stride}, padding "
                f"{self.padding}, dilation {self.dilation}) gives {(batch, features, *made)}, "
                f"not {self.result_shape}"
            )

    @property
    def image(self) -> Layout:
        return self.image_shape, self.image_stride

    @property
    def weight(self) -> Layout:
        return self.weight_shape, self.weight_stride

    @property
    def result(self) -> Layout:
        return self.result_shape, self.result_stride

    @property
    def operands(self) -> tuple[Layout, Layout]:
        """The layouts that are read, in the order of `run`'s arguments."""
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
        sizes = self.image_shape[2:], self.weight_shape[2:], self.stride, self.padding, self.dilation
        return output_padding(*sizes, self.result_shape[2:])

    @property
    def plannable(self) -> bool:
        """Tell whether cuDNN may be asked: no tensor overlaps itself, or needs an index of more than 32 bits."""
        return all(
            math.prod(shape) < 2**31
            and all(step > 0 or size == 1 for size, step in zip(shape, stride, strict=True))
            for shape, stride in (self.image, self.weight, self.result)
        )

    def encoded(self) -> tuple[Argument, ...]:
        """The fields in order, as arguments of a call."""
        return tuple(getattr(self, item.name) for item in fields(self))

    @classmethod
    def decoded(cls, arguments: Sequence[Any]) -> "ConvolutionWork":
        """The reverse of `encoded`, also of arguments that have become lists on the way."""
        values: dict[str, Any] = {
            item.name: tuple(value) if isinstance(value, list) else value
            for item, value in zip(fields(cls), arguments, strict=True)
        }
        return cls(**values)
