"""Layer norm: its gradient over the gradient that comes in, and from the output.

The normalisation is y = x̂·w + b with x̂ = (x − μ)/σ for each row (Ba et al., arXiv:1607.06450). From the output,
x̂ = (y − b)/w; as with batch norm, that is sound while |b/w| is moderate, which a guard checks.
"""

import math
from collections.abc import Iterator

import torch

from monetlite.core.graph import Argument, Call, Implementation, TensorRef
from monetlite.operators.batch_norm_backward import FROM_OUTPUT_TOLERANCE, is_invertible, is_resident
from monetlite.operators.kernel import Kernel, is_contiguous
from monetlite.operators.registry import alternatives_for, function, name_of

_FORWARD = "aten.native_layer_norm.default"
_BACKWARD = "aten.native_layer_norm_backward.default"
_LEAST_BYTES, _FEWEST_CHUNKS = 2**16, 8
_MOST_BYTES = {"cpu": 2**20, "cuda": 2**24}
"""Of the input at a time: an eighth of it, in pieces that are worth a call: that stay in a CPU's cache, or keep
a GPU busy.
"""


@alternatives_for(_BACKWARD)
def backward(kernel: Kernel) -> Iterator[Implementation]:
    """The gradient over the one that comes in, from the input or from the output."""
    gradient, source, shape, _mean, deviation, weight, bias, mask = kernel.call.args
    if not isinstance(gradient, TensorRef) or not isinstance(source, TensorRef) or not isinstance(mask, tuple):
        return
    if not mask[0] or not is_contiguous(gradient.spec) or not is_contiguous(source.spec):
        return
    overwrites = kernel.over(gradient)
    if overwrites:
        yield kernel.implement("inplace", target=name_of(backward_), overwrites=overwrites, devices=("cpu",))
    forward = kernel.reader(source, _FORWARD)
    output = None if forward is None else kernel.reference(forward.outputs[0])
    if output is None or not is_resident(weight) or source.spec.dtype != "float32":
        return
    if not (bias is None or is_resident(bias)):
        return
    if not is_contiguous(output.spec) or 0 in output.spec.shape:
        return
    guard = Call(target=name_of(is_invertible), args=(weight, bias), outputs=(None,))
    args: tuple[Argument, ...] = (gradient, output, shape, deviation, weight, bias, mask)
    yield kernel.implement(
        "from_output",
        target=name_of(backward_from_output),
        args=args,
        tolerance=FROM_OUTPUT_TOLERANCE,
        guard=guard,
    )
    if overwrites:
        yield kernel.implement(
            "from_output_inplace",
            target=name_of(backward_from_output_),
            args=args,
            overwrites=overwrites,
            tolerance=FROM_OUTPUT_TOLERANCE,
            guard=guard,
        )


def _chunks_bytes(call: Call) -> int:
    """What a GPU holds of a float32 input: a piece normalised, on the way there, and its gradient."""
    return 3 * _piece_bytes(_whole_bytes(call), "cuda")


def _launches(call: Call) -> int:
    return 10 * -(-_whole_bytes(call) // _piece_bytes(_whole_bytes(call), "cuda"))


def _whole_bytes(call: Call) -> int:
    source = call.args[1]
    assert isinstance(source, TensorRef)
    return 4 * math.prod(source.spec.shape)


def _piece_bytes(whole: int, device: str) -> int:
    return max(_LEAST_BYTES, min(_MOST_BYTES.get(device, _MOST_BYTES["cpu"]), whole // _FEWEST_CHUNKS))


@function("layer_norm_backward_")
def backward_(
    gradient: torch.Tensor,
    source: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of layer norm for (input, weight, bias); the input's over the gradient that comes in.

    Those for weight and bias are sums over all rows and come first; then each row's own.
    """
    run = torch.ops.aten.native_layer_norm_backward.default
    for_weight = for_bias = None
    if mask[1] or mask[2]:
        wanted = [False, mask[1], mask[2]]
        _, for_weight, for_bias = run(gradient, source, shape, mean, deviation, weight, bias, wanted)
    rows = _Rows(gradient, shape)
    into, incoming = rows.of(gradient), rows.of(source)
    means, deviations = mean.reshape(-1, 1), deviation.reshape(-1, 1)
    for some in rows.chunks():
        made, _, _ = run(
            into[some],
            incoming[some],
            [rows.length],
            means[some],
            deviations[some],
            None if weight is None else weight.reshape(-1),
            None if bias is None else bias.reshape(-1),
            [True, False, False],
        )
        into[some].copy_(made)
        del made  # before the next one is
    return gradient, for_weight if mask[1] else None, for_bias if mask[2] else None


@function(
    "layer_norm_backward_from_output",
    limit="normalization",
    passes=2.0,
    workspace_bytes=_chunks_bytes,
    launches=_launches,
)
def backward_from_output(
    gradient: torch.Tensor,
    output: torch.Tensor,
    shape: list[int],
    deviation: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of layer norm for (input, weight, bias) from its output. Sound where `is_invertible`."""
    return _from_output(torch.empty_like(gradient), gradient, output, shape, deviation, weight, bias, mask)


@function(
    "layer_norm_backward_from_output_",
    limit="normalization",
    passes=2.0,
    workspace_bytes=_chunks_bytes,
    launches=_launches,
)
def backward_from_output_(
    gradient: torch.Tensor,
    output: torch.Tensor,
    shape: list[int],
    deviation: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The same, over the gradient that comes in."""
    return _from_output(gradient, gradient, output, shape, deviation, weight, bias, mask)


def _from_output(
    result: torch.Tensor,
    gradient: torch.Tensor,
    output: torch.Tensor,
    shape: list[int],
    deviation: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    rows = _Rows(gradient, shape)
    into, incoming, outgoing = rows.of(result), rows.of(gradient), rows.of(output)
    deviations = deviation.reshape(-1, 1)
    sums: list[torch.Tensor | None] = [None, None]
    flat_weight, flat_bias = weight.reshape(-1), None if bias is None else bias.reshape(-1)
    for some in rows.chunks():
        normalized = (
            outgoing[some] / flat_weight if flat_bias is None else (outgoing[some] - flat_bias) / flat_weight
        )
        zero, one = torch.zeros_like(deviations[some]), torch.ones_like(deviations[some])
        made, *parts = torch.ops.aten.native_layer_norm_backward.default(
            incoming[some], normalized, [rows.length], zero, one, flat_weight, flat_bias, mask
        )
        torch.mul(made, deviations[some], out=into[some])
        del normalized, made  # before the next ones are
        sums = [part if total is None else total.add_(part) for total, part in zip(sums, parts, strict=True)]
    of_weight, of_bias = sums
    return (
        result,
        of_weight.view_as(weight) if mask[1] and of_weight is not None else None,
        of_bias.view_as(weight) if mask[2] and of_bias is not None else None,
    )


class _Rows:
    """A tensor whose last dimensions are normalised together, as rows of that length."""

    def __init__(self, like: torch.Tensor, shape: list[int]) -> None:
        self.length = math.prod(shape)
        self.count = like.numel() // max(1, self.length)
        piece = _piece_bytes(like.nbytes, like.device.type)
        self.step = max(1, piece // max(1, self.length * like.element_size()))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.count, self.length)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.count, self.step):
            yield slice(start, start + self.step)
