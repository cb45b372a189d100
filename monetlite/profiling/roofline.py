"""Cost of a kernel on a named device, without its launch, by what it computes and what it moves.

    latency = launch + max(operations / (peak · efficiency), bytes / (bandwidth · efficiency))

The formulas here know shapes and devices, not graphs. They were fitted on the convolutions that the MONeT
authors measured on a P100 (`docs/estimates.md` says how well).
"""

import math
from dataclasses import dataclass

from monetlite.core.costs import Cost
from monetlite.core.devices import Device

# A matrix product of M×K by K×N approaches the device's rate as K and M·N grow. Fitted on the P100's
# convolutions and their weight gradients: half of it is reached at K = 48, and at M·N = 13000.
_HALF_RATE_DEPTH = 48
_HALF_RATE_AREA = 13_000
_TILE = 32
"""Side of a tile. Kernels compute whole tiles: M and N are rounded up to its multiples."""

# Rates of other convolution algorithms relative to the direct one, fitted on the same measurements.
_INPUT_GRADIENT = 0.82
_STRIDED_INPUT_GRADIENT = 0.68
_FUSED_WINOGRAD = 0.80
_WINOGRAD_PRODUCTS = 1.20

_WINOGRAD_IMAGES = 16
"""Multiple to which Winograd's algorithm in three kernels pads the batch, except for weight gradients, by the
measured workspaces."""
_WINOGRAD_CHANNELS = 16
"""Fewest input and output channels with which Winograd's algorithms are chosen."""

_MAX_WORKSPACE_SHARE = 3
"""Divisor of the device's memory that gives the largest workspace of an algorithm. Where memory is tight, cuDNN's
choice would fail to allocate more, and ATen take the next."""


def arithmetic(device: Device, dtype: str, *, tf32: bool) -> tuple[float, bool]:
    """(Operations per second at peak, True on tensor cores) for matrix products in a dtype.

    A dtype that the device has no arithmetic for runs as float32 (bfloat16 before Ampere), or at a 32nd of it
    (float64 on consumer cards).

    Args:
        dtype: torch's name, without the `torch.` prefix.
        tf32: compute float32 as TF32 on devices that have it.
    """
    peaks = device.peak_flops
    if dtype == "float64":
        return peaks.get("fp64", peaks["fp32"] / 32), False
    if dtype == "float32" and tf32 and "tf32" in peaks:
        return peaks["tf32"], True
    half = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "")
    if half in peaks:
        return peaks[half], device.has_tensor_cores
    return peaks["fp32"], False


def memory_bound(device: Device, moved_bytes: float, fraction: float) -> Cost:
    """A kernel that moves bytes at a fraction of the device's bandwidth."""
    return _cost(moved_bytes / (device.bandwidth_bytes_per_s * fraction))


def matmul(
    device: Device,
    *,
    operations: float,
    rows: int,
    columns: int,
    depth: int,
    moved_bytes: float,
    dtype: str,
    batch: int = 1,
) -> Cost:
    """`batch` products of (rows × depth) by (depth × columns), of so many operations in all."""
    peak, tensor_cores = arithmetic(device, dtype, tf32=False)
    best = device.efficiency.tensor_matmul if tensor_cores else device.efficiency.fp32_matmul
    rate = peak * best * _saturation(rows, columns, depth, batch)
    return _cost(max(operations / rate, _move(device, moved_bytes)))


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution (not transposed), or the gradient of one with respect to its input or weight.

    Attributes:
        role: `forward`, `input_gradient` or `weight_gradient`.
        batch: images.
        input_size: spatial size of the input, in points.
        output_size: spatial size of the result.
        weight_shape: (output channels, input channels of a group, *kernel).
        groups: groups of channels.
        image_bytes: of the input and the result together (or of their gradients).
        weight_bytes: of the weight.
        strided: whether any stride is not 1.
        dilated: whether any dilation is not 1.
        channels_last: whether the images are laid out with channels innermost.
    """

    role: str
    batch: int
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    weight_shape: tuple[int, ...]
    groups: int
    image_bytes: int
    weight_bytes: int
    strided: bool
    dilated: bool
    channels_last: bool

    @property
    def operations(self) -> int:
        """The same for the convolution and for either of its gradients."""
        return 2 * self.batch * math.prod(self.output_size) * math.prod(self.weight_shape)

    @property
    def moved_bytes(self) -> int:
        return self.image_bytes + self.weight_bytes

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.weight_shape[1] == 1

    @property
    def suits_winograd(self) -> bool:
        return (
            self.weight_shape[2:] == (3, 3)
            and min(self.weight_shape[:2]) >= _WINOGRAD_CHANNELS
            and self.groups == 1
            and not self.strided
            and not self.dilated
        )

    @property
    def product(self) -> tuple[int, int, int]:
        """(Rows, columns, depth) of the matrix product that it amounts to in each group."""
        outgoing, incoming, *kernel = self.weight_shape
        positions, outgoing = math.prod(kernel), outgoing // self.groups
        if self.role == "forward":
            return self.batch * math.prod(self.output_size), outgoing, incoming * positions
        if self.role == "input_gradient":
            return self.batch * math.prod(self.input_size), incoming, outgoing * positions
        return outgoing, incoming * positions, self.batch * math.prod(self.output_size)


def convolution(device: Device, work: Convolution, *, dtype: str) -> Cost:
    """The fastest of the algorithms that a library would choose from, with its workspace.

    - Tensor cores: an implicit matrix product in channels-last. Contiguous images are converted there and
      back, which moves everything twice more and takes a workspace as large as all operands.
    - Vector units: the direct algorithm, without workspace; for 3×3 kernels of stride 1 also Winograd's
      F(2×2, 3×3) in one kernel, without workspace, and F(4×4, 3×3) in three, with both images transformed in
      the workspace.
    - Depthwise convolutions are kernels of their own, bound by memory.
    """
    peak, tensor_cores = arithmetic(device, dtype, tf32=True)
    efficiency = device.efficiency
    if work.depthwise or not work.operations:
        return memory_bound(device, work.moved_bytes, efficiency.pooling)
    best = peak * (efficiency.tensor_convolution if tensor_cores else efficiency.fp32_convolution)
    rate = best * _saturation(*work.product)
    if work.role == "input_gradient":
        rate *= _STRIDED_INPUT_GRADIENT if work.strided else _INPUT_GRADIENT
    direct = max(work.operations / rate, _move(device, work.moved_bytes))
    if tensor_cores:
        if work.channels_last:
            return _cost(direct)
        return _cost(direct + _move(device, 2 * work.moved_bytes), work.moved_bytes)
    algorithms = [_cost(direct)]
    if work.suits_winograd:
        algorithms += _winograd(device, work, best)
    allowed = device.memory_bytes // _MAX_WORKSPACE_SHARE
    return min((item for item in algorithms if item.workspace_bytes <= allowed), key=lambda item: item.latency_ms)


def _winograd(device: Device, work: Convolution, rate: float) -> list[Cost]:
    """Winograd's algorithms (Lavin and Gray, arXiv:1509.09308).

    F(m×m, 3×3) makes a tile of m² results of (m+2)² inputs with (m+2)² multiplications, where the direct
    algorithm has 9m². In three kernels, both images pass through memory once more as transformed tiles,
    (m+2)²/m² as large.

    Args:
        device: the device.
        work: what to compute.
        rate: operations per second of a large matrix product.
    """
    kernels = []
    outgoing, incoming = work.weight_shape[:2]
    padding = math.prod(math.ceil(size / 4) * 4 / size for size in work.output_size)
    products = rate * _WINOGRAD_PRODUCTS
    # The products are over channels alone; the weight gradient's are channels by channels, over all tiles.
    if work.role == "weight_gradient":
        products *= _saturation(outgoing, incoming, math.inf)
    else:
        padding *= math.ceil(work.batch / _WINOGRAD_IMAGES) * _WINOGRAD_IMAGES / work.batch
        depth = incoming if work.role == "forward" else outgoing
        fused = rate * _FUSED_WINOGRAD * _saturation(math.inf, math.inf, depth)
        kernels.append(_cost(max(work.operations / 2.25 / fused, _move(device, work.moved_bytes))))
    transformed = 36 / 16 * padding * work.image_bytes + 36 / 9 * work.weight_bytes
    seconds = work.operations * padding / 4 / products + _move(device, work.moved_bytes + 2 * transformed)
    return [*kernels, _cost(seconds, math.ceil(transformed))]


def _saturation(rows: float, columns: float, depth: float, batch: int = 1) -> float:
    """Fraction of its best rate that a matrix product of a given size reaches."""
    shallow = _HALF_RATE_DEPTH / depth
    deep = 1 / (1 + min(shallow, shallow**2))
    large = 1 / (1 + _HALF_RATE_AREA / (batch * rows * columns))
    whole = math.prod(size / (math.ceil(size / _TILE) * _TILE) for size in (rows, columns) if size < math.inf)
    # A small result is made of few tiles: what it loses on either account, it loses once.
    return deep * min(large, whole)


def _move(device: Device, moved_bytes: float) -> float:
    """Seconds to move bytes in long runs."""
    return moved_bytes / (device.bandwidth_bytes_per_s * device.efficiency.elementwise)


def _cost(seconds: float, workspace_bytes: int = 0) -> Cost:
    return Cost(latency_ms=seconds * 1e3, workspace_bytes=workspace_bytes)
