"""Real tensors for a call that is to be measured, with the layouts and the kind of contents it had."""

from typing import Any

import torch

from monetlite.captured.calls import decode_argument
from monetlite.graph import Call, TensorRef
from monetlite.operators.registry import find_function

NOTES_ON_CPU = "aten._scaled_dot_product_efficient_attention_backward."
"""Reads the generator's seed and offset on the host, where its forward pass leaves them (fake ones: on the GPU)."""


def make_arguments(call: Call, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call on a device: random numbers, and indices that are in range.

    Tensors that shared a storage in the step share one here.
    """
    bound = index_bound(call)
    mixed = has_wide_statistics(call)
    notes_on_cpu = call.target.startswith(NOTES_ON_CPU)
    storages: dict[tuple[int | None, str], torch.Tensor] = {}
    extent: dict[tuple[int | None, str], int] = {}
    for ref in call.tensors():
        extent[_key(ref)] = max(extent.get(_key(ref), 0), _extent(ref))

    def make(ref: TensorRef) -> torch.Tensor:
        dtype = torch.float32 if mixed and len(ref.spec.shape) == 1 else getattr(torch, ref.spec.dtype)
        key = _key(ref)
        if key not in storages or storages[key].dtype != dtype:
            on_cpu = notes_on_cpu and ref.spec.dtype == "int64" and not ref.spec.shape
            storages[key] = _contents(extent[key], dtype, "cpu" if on_cpu else device, bound)
        return torch.as_strided(storages[key], ref.spec.shape, ref.spec.stride)

    return (
        decode_argument(call.args, make),
        {name: decode_argument(value, make) for name, value in call.kwargs},
    )


def has_wide_statistics(call: Call) -> bool:
    """Whether a batch norm of half precision keeps float32 statistics, as its kernels do beside float32 weights.

    Fake tensors have them in half precision.
    """
    vectors = {ref.spec.dtype for ref in call.tensors() if len(ref.spec.shape) == 1}
    return "batch_norm" in call.target and "float32" in vectors


def index_bound(call: Call) -> int:
    """Integer arguments of a call may take values below this."""
    registered = find_function(call.target)
    if registered is not None and registered.integers is not None:
        return registered.integers(call)
    tensors = [ref.spec for ref in call.tensors()]
    if call.target.startswith("aten.embedding.") and tensors:
        return tensors[0].shape[0]
    if call.target.startswith("aten.embedding_dense_backward."):
        rows = call.args[2]
        return rows if isinstance(rows, int) else 1
    if "max_pool2d_with_indices_backward" in call.target:
        height, width = tensors[1].shape[-2:]
        return height * width if isinstance(height, int) and isinstance(width, int) else 1
    if call.target.startswith("aten.nll_loss"):
        # Scores are (batch, classes, ...), or (classes,); gradients, targets and weights have fewer dimensions.
        scores = max((spec.shape for spec in tensors), key=len)
        return scores[1] if len(scores) > 1 else max(spec.shape[0] for spec in tensors if spec.shape)
    return 1


def _contents(elements: int, dtype: torch.dtype, device: str, bound: int) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(elements, dtype=dtype, device=device)
    if dtype is torch.bool:
        return torch.rand(elements, device=device) < 0.5
    return torch.randint(0, max(1, bound), (elements,), device=device).to(dtype)


def _key(ref: TensorRef) -> tuple[int | None, str]:
    return ref.value, "" if ref.value is not None else ref.node


def _extent(ref: TensorRef) -> int:
    """Elements of storage that a tensor spans."""
    if 0 in ref.spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(ref.spec.shape, ref.spec.stride, strict=True))
