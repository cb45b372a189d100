"""The convolutions of an operator graph as work for cuDNN, and the functions that run them by a plan."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from monetlite.core.graph import Argument, Call, Implementation, Operator, OperatorGraph, TensorRef, TensorSpec
from monetlite.operators.convolution import TF32_TOLERANCE
from monetlite.operators.convolution_kernels import BACKWARD, FORWARD, ConvolutionCall
from monetlite.operators.cudnn.execution_plans import run_plan
from monetlite.operators.cudnn.work import DTYPES, MADE, OPERANDS, ConvolutionWork, Layout, Role
from monetlite.operators.implementations import function, name_of, reads_of
from monetlite.operators.strides import is_whole, suggests_channels_last

PLAN_NAME = re.compile(r"cudnn\.engine[0-9]{1,6}(\.k[0-9]{1,6}=-?[0-9]{1,10}){0,64}")

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Tolerances of plans by dtype. float32: sums in another order. Half precision: the sums are in float32 and
rounded once, so they differ by one step of the dtype, which is 2⁻¹⁰ or 2⁻⁷ of a number at most."""

_ROLES: dict[tuple[bool, ...], Role] = {
    (): "forward",
    (True, False, False): "input_gradient",
    (False, True, False): "weight_gradient",
    (False, True, True): "weight_gradient",
}
"""Roles by the gradients that are wanted."""


def is_plan(name: str) -> bool:
    """True for the name of an implementation that runs one of cuDNN's execution plans."""
    return name.startswith("cudnn.")


@dataclass(frozen=True, kw_only=True)
class ConvolutionPart:
    """A convolution, or one part of a convolution's backward pass, as cuDNN does it.

    `first`, `second` and `third` are as for `cudnn_convolution`.
    """

    default: Implementation
    first: TensorRef
    second: TensorRef
    third: Argument
    work: ConvolutionWork

    def implementation(self, plan_name: str) -> Implementation:
        """The implementation that runs a plan. It may read less than the default does."""
        assert self.default.call is not None
        call = Call(
            target=name_of(cudnn_convolution),
            args=(plan_name, self.first, self.second, self.third, self.work),
            outputs=self.default.call.outputs,
        )
        rounded = self.work.tf32 and self.work.dtype == "float32"
        return replace(
            self.default,
            name=plan_name,
            reads=reads_of(call),
            tolerance=TF32_TOLERANCE if rounded else TOLERANCES[self.work.dtype],
            devices=("cuda",),
            call=call,
            again=None,
        )

    def stand_in(self) -> Implementation:
        """The default call with only the layouts of the tensors that it does not need: the same bits."""
        call = self.default.call
        assert call is not None
        needed = (self.first, self.second)
        args = tuple(
            (item.spec.shape, item.spec.stride) if isinstance(item, TensorRef) and item not in needed else item
            for item in call.args
        )
        call = replace(call, target=name_of(convolution_backward_unread), args=args)
        return replace(self.default, name="unread", reads=reads_of(call), call=call)


def part_of(graph: OperatorGraph, operator: Operator, layouts: Mapping[str, TensorSpec]) -> ConvolutionPart | None:
    """An operator as work for cuDNN; None for what is not a convolution, or not one that plans are offered for.

    Those are transposed ones, and tensors of several dtypes, of one without plans, or that may be unaligned.
    The work allows the arithmetic that torch is set to now. `layouts` are `layouts_of(graph)`.
    """
    default = operator.implementations[0]
    if default.call is None or default.call.target not in (FORWARD, BACKWARD):
        return None
    call, dtypes = ConvolutionCall.of(default.call), {ref.spec.dtype for ref in default.call.tensors()}
    role = _ROLES.get(call.wanted)
    if role is None or call.transposed or len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        return None
    tensors = {"image": call.image, "weight": call.weight, "result": call.gradient}
    first, second = (ref for name in OPERANDS[role] if (ref := tensors[name]) is not None)
    if not (is_whole(graph.values, first) and is_whole(graph.values, second)):
        return None
    layout = {name: (ref.spec.shape, ref.spec.stride) for name, ref in tensors.items() if ref is not None}
    layout[MADE[role]] = _made(graph, default, layout, layouts)
    work = ConvolutionWork(
        role=role,
        **layout,
        dtype=call.image.spec.dtype,
        stride=call.stride,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
        tf32=call.image.spec.dtype == "float32" and tf32_allowed(),
        deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    third = {"forward": call.bias, "input_gradient": None, "weight_gradient": call.wanted[-1:] == (True,)}[role]
    part = ConvolutionPart(default=default, first=first, second=second, third=third, work=work)
    return part if work.plannable else None


def tf32_allowed() -> bool:
    """Tell whether torch's settings let cuDNN round the factors of float32 convolutions."""
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
    """The layout that the default call writes: as its readers have it, or else by PyTorch's rule for cuDNN."""
    assert default.call is not None
    name = next(name for name in default.call.outputs if name is not None)
    if name in layouts:
        return layouts[name].shape, layouts[name].stride
    shape = graph.values[default.writes[0]].shape
    # cudnn_conv_suggest_memory_format, in aten/src/ATen/native/ConvUtils.h.
    if any(suggests_channels_last(*layout[item]) for item in ("image", "weight")):
        order = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    else:
        order = torch.contiguous_format
    return shape, torch.empty(shape, device="meta", memory_format=order).stride()


def _like(call: Call) -> Call:
    """The convolution of PyTorch's own that does the same."""
    _, first, second, third, work = call.args
    assert isinstance(work, ConvolutionWork)
    geometry = (work.stride, work.padding, work.dilation)
    rest: tuple[Argument, ...] = (False, (0,) * len(work.stride), work.groups)
    if work.role == "forward":
        return Call(target=FORWARD, args=(first, second, third, *geometry, *rest), outputs=call.outputs)
    if work.role == "input_gradient":
        # A transposed convolution, which needs no image.
        args = (first, second, None, *geometry, True, work.beyond, work.groups)
        return Call(target=FORWARD, args=args, outputs=call.outputs[:1])
    shape, stride = work.weight
    weight = TensorRef(node="weight", value=None, spec=TensorSpec(shape=shape, stride=stride, dtype=work.dtype))
    mask = (False, True, bool(third))
    return Call(target=BACKWARD, args=(second, first, weight, None, *geometry, *rest, mask), outputs=call.outputs)


@function("cudnn_convolution", like=_like)
def cudnn_convolution(
    plan_name: str, first: Tensor, second: Tensor, third: Tensor | bool | None, work: ConvolutionWork
) -> tuple[Tensor | None, ...]:
    """Do a convolution, or one of its gradients, by a plan.

    `first` and `second` are as for `run_plan`; `third` is the bias or None (forward), None (input_gradient), or
    whether the bias's gradient is wanted (weight_gradient). The results are those of PyTorch's own operator, by
    position: of `convolution` one, of `convolution_backward` three, with None for those that it doesn't compute.

    Raises:
        ConvolutionError, DeviceError, CudnnMissing, CudnnError: as `run_plan` does.
    """
    made = run_plan(work, plan_name, first, second)
    if work.role == "forward":
        if isinstance(third, Tensor):
            made.add_(third.view(-1, *[1] * len(work.stride)))
        return (made,)
    if work.role == "input_gradient":
        return made, None, None
    return None, made, second.sum((0, *range(2, second.dim()))) if third else None


@function("convolution_backward_unread")
def convolution_backward_unread(
    gradient: Tensor, image: Tensor | Layout, weight: Tensor | Layout, *rest: Any
) -> tuple[Tensor | None, ...]:
    """`convolution_backward` where the image or the weight is given by its shape and strides alone.

    The gradient for one of the two needs no more of it; memory of that size is allocated meanwhile.
    """
    operands = [item if isinstance(item, Tensor) else gradient.new_empty_strided(*item) for item in (image, weight)]
    results: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward.default(gradient, *operands, *rest)
    return results
