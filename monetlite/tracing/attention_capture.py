"""Attention as a GPU runs it, in a capture on a machine without one.

`scaled_dot_product_attention` is the one function of common models for which torch runs another operator on a GPU
than on a CPU: flash, cuDNN's or memory-efficient attention, by the rules of its `sdp_utils.cpp`. A schedule that is
solved here for a GPU has to be one of the graph that is traced there, so a capture for a GPU chooses as it would.

Not followed: nested tensors, and what a person switches off by `torch.nn.attention.sdpa_kernel`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Capability = tuple[int, int]
"""NVIDIA's compute capability, as (major, minor)."""

_ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = {"flash": 256, "cudnn": 128}
_ALIGNED = 8
"""Flash attention's head size and the rows of memory-efficient attention's mask are multiples of this."""


def as_on_gpu(graph: fx.GraphModule, capability: Capability) -> fx.GraphModule:
    """Have the attention of a captured function run as on a GPU of that compute capability; changes it in place."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attention_on_gpu(capability, *args, **kwargs)

    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in _ATTENTION:
            node.target = attention
    graph.recompile()
    return graph


def attention_on_gpu(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the operators that a GPU of that compute capability runs.

    Only to be traced: the operators have no kernels for the CPU.
    """
    query, key, value = map(_autocast, (query, key, value))
    attn_mask = None if attn_mask is None else _autocast(attn_mask)
    kernel = _kernel(capability, (query, key, value), attn_mask, dropout_p, is_causal, enable_gqa)
    mask = _additive(attn_mask, query.dtype)
    aten = torch.ops.aten
    trained = torch.is_grad_enabled() and any(item.requires_grad for item in (query, key, value))
    if kernel == "flash":
        size = query.shape[-1]
        padded = [_padded(item) for item in (query, key, value)]
        scale = 1 / math.sqrt(size) if scale is None else scale
        made = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
        result: torch.Tensor = made[0]
        return result if result.shape[-1] == size else result[..., :size]
    if kernel == "cudnn":
        made = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, trained, dropout_p, is_causal, False, scale=scale
        )
    elif kernel == "efficient":
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        made = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, trained, dropout_p, is_causal, scale=scale
        )
    else:
        made = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    first: torch.Tensor = made[0]
    return first


def _kernel(
    capability: Capability,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    grouped: bool,
) -> str:
    """`"cudnn"`, `"flash"`, `"efficient"` or `"math"`: the first in torch's order that can take these operands."""
    query, key, _ = operands
    last_strides = [item.stride(-1) for item in operands]
    if (
        any(item.dim() != 4 for item in operands)
        or len({item.dtype for item in operands}) > 1
        or len({item.shape[0] for item in operands}) > 1
        or 0 in (query.shape[2], key.shape[2])
        or (mask is not None and mask.stride(-1) != 1)
    ):
        return "math"
    heads, sizes = [item.shape[1] for item in operands], [item.shape[-1] for item in operands]
    same_heads = len(set(heads)) == 1
    matching = same_heads or (grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0)
    in_rows = set(last_strides) == {1} or query.shape[-1] == 1
    half = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and capability >= (8, 0))
    fused = half and capability >= (8, 0) and matching and in_rows
    if (
        fused
        and capability[0] in (9, 10)
        and max(sizes) <= _LARGEST_HEAD["cudnn"]
        and not any(size % _ALIGNED for size in sizes)
        and (dropout_p * 16).is_integer()
        and key.shape[2] > 1
        and (dropout_p == 0 or query.shape[2] > 1)
        and _broadcasts(mask, query, key)
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return "cudnn"
    if (
        fused
        and mask is None
        and len(set(sizes)) == 1
        and sizes[0] <= _LARGEST_HEAD["flash"]
        and not (is_causal and query.shape[2] != key.shape[2])
        and _flash_differentiates(capability, sizes[0], dropout_p)
    ):
        return "flash"
    alignment = _matmul_alignment(capability, query.dtype)
    if (
        (half or query.dtype == torch.float32)
        and same_heads
        and sizes[0] == sizes[1]
        and not any(size % alignment for size in sizes)
        and set(last_strides) == {1}
    ):
        return "efficient"
    return "math"


def _flash_differentiates(capability: Capability, size: int, dropout_p: float) -> bool:
    """True if flash attention has a backward pass for heads of this size."""
    limited = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return not limited or size <= 192 or (size > 224 and dropout_p == 0)


def _matmul_alignment(capability: Capability, dtype: torch.dtype) -> int:
    """Number of which head sizes are multiples for memory-efficient attention."""
    half = dtype in _HALF
    on_tensor_cores = capability[0] >= 8 or (capability[0] == 7 and half)
    least = 4 if capability[0] >= 8 else 1
    return max(least, 8 if half else 4) if on_tensor_cores else least


def _broadcasts(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    """True for a mask that cuDNN takes: of two or four dimensions, each whole or 1, without a gradient."""
    if mask is None:
        return True
    whole = (*query.shape[:3], key.shape[2])[-mask.dim() :]
    fits = all(size in (1, full) for size, full in zip(mask.shape, whole, strict=False))
    return not mask.requires_grad and mask.dim() in (2, 4) and fits


def _autocast(operand: torch.Tensor) -> torch.Tensor:
    """An operand as autocast hands it to attention."""
    cast = torch.is_autocast_enabled("cpu") and operand.is_floating_point()
    return operand.to(torch.get_autocast_dtype("cpu")) if cast else operand


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as numbers that are added: 0 where it lets through."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose rows begin where memory-efficient attention can load them."""
    if mask.stride(-1) == 1 and not any(stride % _ALIGNED for stride in mask.stride()[:-1]):
        return mask
    size = mask.shape[-1]
    return F.pad(mask, (0, _ALIGNED - size % _ALIGNED))[..., :size]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is a multiple of what flash attention takes."""
    rest = tensor.shape[-1] % _ALIGNED
    return F.pad(tensor, (0, _ALIGNED - rest)) if rest else tensor
