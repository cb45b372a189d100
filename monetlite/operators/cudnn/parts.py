"""The convolutions of an operator graph as work for cuDNN, and a plan for one as an implementation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from monetlite.core.errors import ConvolutionError
from monetlite.core.graph import Argument, Call, Implementation, Operator, OperatorGraph, TensorRef, TensorSpec
from monetlite.fx.calls import each_dimension
from monetlite.operators.cudnn.calls import convolution_backward_unread, cudnn_convolution, described
from monetlite.operators.cudnn.work import DTYPES, ConvolutionWork, Layout, Role
from monetlite.operators.implementations import name_of
from monetlite.operators.strides import is_whole, suggests_channels_last

PREFIX = "cudnn."
PLAN_NAME = re.compile(r"cudnn\.engine[0-9]{1,6}(\.k[0-9]{1,6}=-?[0-9]{1,10}){0,64}")

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""What a plan may differ by from the default. float32: sums in another order. Half precision: the sums are in
float32 and rounded once, so by one step of the dtype, which is 2⁻¹⁰ or 2⁻⁷ of a number at most."""
TF32_TOLERANCE = 2e-3
"""Where TF32 is allowed: either of the default and the plan may round both factors of every product to 10 bits."""

_FORWARD, _BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A convolution, or one part of a convolution's backward pass, as cuDNN does it.

    `first`, `second` and `third` are as for `cudnn_convolution`.
    """

    default: Implementation
    first: TensorRef
    second: TensorRef
    third: Argument
    work: ConvolutionWork

    def implementation(self, plan_name: str) -> Implementation:
        """The implementation that runs a plan: it reads what the plan reads, which can be less than the default."""
        assert self.default.call is not None
        call = Call(
            target=name_of(cudnn_convolution),
            args=(plan_name, self.first, self.second, self.third, *described(self.work)),
            outputs=self.default.call.outputs,
        )
        rounded = self.work.tf32 and self.work.dtype == "float32"
        return replace(
            self.default,
            name=plan_name,
            reads=_reads(call),
            tolerance=TF32_TOLERANCE if rounded else TOLERANCES[self.work.dtype],
            devices=("cuda",),
            call=call,
            again=None,
        )

    def stand_in(self) -> Implementation:
        """The default call, told only the layout of what it is given and does not need: the same bits."""
        call = self.default.call
        assert call is not None
        needed = (self.first, self.second)
        args = tuple(
            (item.spec.shape, item.spec.stride) if isinstance(item, TensorRef) and item not in needed else item
            for item in call.args
        )
        call = replace(call, target=name_of(convolution_backward_unread), args=args)
        return replace(self.default, name="unread", reads=_reads(call), call=call)


def part_of(graph: OperatorGraph, operator: Operator, layouts: Mapping[str, TensorSpec]) -> Part | None:
    """An operator as work for cuDNN; None for what is not a convolution, or not one that plans are offered for.

    The work allows the arithmetic that torch is set to now. `layouts` are `layouts_of(graph)`.
    """
    default = operator.implementations[0]
    found = None if default.call is None else _convolution(default.call)
    if found is None:
        return None
    role, third, image, weight, gradient, geometry = found
    pairs = {"forward": (image, weight), "input_gradient": (gradient, weight), "weight_gradient": (image, gradient)}
    first, second = pairs[role]
    assert first is not None
    assert second is not None
    if not (is_whole(graph.values, first) and is_whole(graph.values, second)):
        return None
    layout = {"image": _layout(image.spec), "weight": _layout(weight.spec)}
    made = _made(graph, default, layout, layouts)
    layout["result"] = made if gradient is None else _layout(gradient.spec)
    layout[{"forward": "result", "input_gradient": "image", "weight_gradient": "weight"}[role]] = made
    stride, padding, dilation = (each_dimension(item, len(image.spec.shape) - 2) for item in geometry[:3])
    assert isinstance(geometry[3], int)
    try:
        work = ConvolutionWork(
            role=role,
            **{f"{name}_{what}": item for name in layout for what, item in zip(("shape", "stride"), layout[name])},
            dtype=image.spec.dtype,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=geometry[3],
            tf32=image.spec.dtype == "float32" and _tf32_allowed(),
            deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        )
    except ConvolutionError:
        return None
    return Part(default=default, first=first, second=second, third=third, work=work) if work.plannable else None


_Convolution: TypeAlias = tuple[Role, Argument, TensorRef, TensorRef, TensorRef | None, tuple[Argument, ...]]


def _convolution(call: Call) -> _Convolution | None:
    """A call's role, third argument, image, weight, gradient (if any) and (stride, padding, dilation, groups).

    None for what is not a convolution, or a transposed one, or of tensors of several dtypes or one without plans.
    """
    role: Role
    if call.target == _FORWARD:
        image, weight, third, stride, padding, dilation, transposed, _, groups = call.args
        role, gradient = "forward", None
    elif call.target == _BACKWARD:
        gradient, image, weight, _, stride, padding, dilation, transposed, _, groups, mask = call.args
        if mask == (True, False, False):
            role, third = "input_gradient", None
        elif mask in ((False, True, False), (False, True, True)):
            role, third = "weight_gradient", mask == (False, True, True)
        else:
            return None
    else:
        return None
    dtypes = {ref.spec.dtype for ref in call.tensors()}
    if transposed is not False or len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        return None
    assert isinstance(image, TensorRef)
    assert isinstance(weight, TensorRef)
    assert gradient is None or isinstance(gradient, TensorRef)
    return role, third, image, weight, gradient, (stride, padding, dilation, groups)


def _tf32_allowed() -> bool:
    # Where it was set by this name, reading it by the older one, allow_tf32, is an error.
    precision: str = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]  # made at import
    return precision == "tf32"


def layouts_of(graph: OperatorGraph) -> dict[str, TensorSpec]:
    """The layout of every tensor that a default call of a graph reads, by name."""
    calls = (operator.implementations[0].call for operator in graph.operators)
    return {ref.node: ref.spec for call in calls if call is not None for ref in call.tensors()}


def _made(
    graph: OperatorGraph, default: Implementation, layout: Mapping[str, Layout], layouts: Mapping[str, TensorSpec]
) -> Layout:
    """The layout of what the default call makes: as its readers have it, or else by PyTorch's rule for cuDNN."""
    assert default.call is not None
    name = next(name for name in default.call.outputs if name is not None)
    if name in layouts:
        return _layout(layouts[name])
    shape = graph.values[default.writes[0]].shape
    # cudnn_conv_suggest_memory_format, in aten/src/ATen/native/ConvUtils.h.
    channels_last = any(suggests_channels_last(*layout[item]) for item in ("image", "weight"))
    order = (1, *reversed(range(2, len(shape))), 0) if channels_last else tuple(reversed(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for dimension in order:
        stride[dimension] = step
        step *= shape[dimension]
    return shape, tuple(stride)


def _layout(spec: TensorSpec) -> Layout:
    return spec.shape, spec.stride


def _reads(call: Call) -> tuple[int, ...]:
    return tuple(sorted({ref.value for ref in call.tensors() if ref.value is not None}))
