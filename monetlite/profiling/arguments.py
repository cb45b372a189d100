"""Real tensors for a call that is measured, with the layouts and the kind of contents of the step's own."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from monetlite.core.graph import Call, TensorRef
from monetlite.fx.call_encoding import decode_argument
from monetlite.operators import resolve
from monetlite.operators.implementations import FUNCTIONS
from monetlite.operators.regions import is_region
from monetlite.operators.strides import item_bytes
from monetlite.operators.traits import aten_name, is_known, traits_of

NOTES_ON_CPU = "aten._scaled_dot_product_efficient_attention_backward."
"""Operator that reads the generator's seed and offset on the host, where its forward pass leaves them.

Fake tensors have them on the GPU."""


def make_arguments(call: Call, device: str, *, fractions: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call on a device: random numbers, and indices that are in range.

    Tensors that shared a storage in the step share one here. With `fractions`, numbers are between 0 and 1 and
    integers above 0, as operators require of probabilities, rates, deviations and pivots: always those that
    `Traits` says it of, and regions, in which any operator may be.
    """
    fractions = fractions or traits_of(call.target).fractions or is_region(call.target)
    bound = index_bound(call)
    wide = wide_statistics(call)
    # No bag of an `EmbeddingBag` may be empty: the kernel copies only those that are not.
    sizes = call.args[4] if call.target.startswith("aten._embedding_bag_backward.") else None
    groups = traits_of(call.target).ends_of_groups
    ends = call.args[groups] if groups is not None and groups < len(call.args) else None
    most_true = _most_true(call)
    notes_on_cpu = call.target.startswith(NOTES_ON_CPU)
    storages: dict[tuple[int | None, str], torch.Tensor] = {}
    extent = _extents(call.tensors())

    def make(ref: TensorRef) -> torch.Tensor:
        dtype = torch.float32 if ref.node in wide else getattr(torch, ref.spec.dtype)
        key = _key(ref)
        if key not in storages or storages[key].dtype != dtype:
            on_cpu = notes_on_cpu and ref.spec.dtype == "int64" and not ref.spec.shape
            storages[key] = _contents(extent[key], dtype, "cpu" if on_cpu else device, bound, fractions)
            if ref is sizes:
                storages[key].fill_(1)
            if ref is ends:  # groups of equal size: without rows, nothing would be computed
                count = len(storages[key])
                storages[key].copy_(torch.arange(1, count + 1) * _rows_in_groups(call) // count)
            if dtype is torch.bool and most_true is not None:
                repeats = max(1, math.prod(ref.spec.shape) // max(1, extent[key]))
                storages[key].fill_(False)[: most_true // repeats] = True
        return torch.as_strided(storages[key], ref.spec.shape, ref.spec.stride)

    return (
        decode_argument(call.args, make),
        {name: decode_argument(value, make) for name, value in call.kwargs},
    )


def wide_statistics(call: Call) -> frozenset[str]:
    """Names of a normalisation's statistics that are float32, as kernels keep them beside float32 weights.

    Fake tensors have them in the half precision of the input.
    """
    vectors = [ref for ref in call.tensors() if len(ref.spec.shape) == 1]
    if not any(ref.spec.dtype == "float32" for ref in vectors):
        return frozenset()
    if "batch_norm" in call.target:
        return frozenset(ref.node for ref in vectors)
    found = [call.args[at] for at in traits_of(call.target).wide_statistics if at < len(call.args)]
    return frozenset(item.node for item in found if isinstance(item, TensorRef))


def index_bound(call: Call) -> int | None:
    """Bound of a call's integer arguments, which are below it; None where nothing says one."""
    registered = FUNCTIONS.get(call.target)
    if registered is not None and registered.integers is not None:
        return registered.integers(call)
    tensors = [ref.spec for ref in call.tensors()]
    if call.target.startswith("aten.embedding.") and tensors:
        return tensors[0].shape[0]
    if call.target.startswith("aten.embedding_dense_backward."):
        rows: Any = call.args[2]
        return int(rows)
    if "max_pool2d_with_indices_backward" in call.target:
        return math.prod(tensors[1].shape[-2:])
    if (bound := _indexed_size(call)) is not None:
        return bound
    if call.target.startswith("aten.nll_loss"):
        # Scores are (batch, classes, ...), or (classes,); gradients, targets and weights have fewer dimensions.
        scores = max((spec.shape for spec in tensors), key=len)
        return scores[1] if len(scores) > 1 else max(spec.shape[0] for spec in tensors if spec.shape)
    return None


def _indexed_size(call: Call) -> int | None:
    """Size of the dimension of the first operand that another one has places of; of several, the smallest."""
    source, *rest = call.args or (None,)
    if not isinstance(source, TensorRef) or not source.spec.shape or not rest:
        return None
    match aten_name(call.target):
        case "gather" | "scatter" | "scatter_add" | "scatter_reduce" | "index_select" | "index_add" | "index_copy":
            return source.spec.shape[rest[0]] if isinstance(rest[0], int) else None
        case "index" | "_unsafe_index" | "index_put" | "_unsafe_index_put" | "index_put_":
            indices: Any = rest[0]
            return min(size for size, item in zip(source.spec.shape, indices, strict=False) if item is not None)
        case "take" | "put":
            return math.prod(source.spec.shape)
    return None


def _rows_in_groups(call: Call) -> int:
    """Number of rows in all groups. Products that sum over the rows take the first operand transposed."""
    first, second, *_ = (ref.spec.shape for ref in call.tensors())
    if len(first) == 3:
        return second[-1]
    return first[0] if len(second) == 3 else first[-1]


def _most_true(call: Call) -> int | None:
    """Elements that a mask may select: as many as there are to put in their places, or fewer."""
    match aten_name(call.target), call.args:
        case "masked_scatter", (TensorRef() as whole, TensorRef() as mask, TensorRef() as source):
            elements = math.prod(source.spec.shape)
        case "masked_scatter_backward", (TensorRef() as whole, TensorRef() as mask, tuple() | list() as sizes):
            elements = math.prod(map(int, sizes))
        case "index_put", (TensorRef() as whole, (TensorRef() as mask,), TensorRef() as values, *_):
            rows = len(values.spec.shape) > len(whole.spec.shape) - len(mask.spec.shape)
            one_for_each = rows and values.spec.shape[0] > 1 and mask.spec.dtype == "bool"
            return values.spec.shape[0] if one_for_each else None
        case _:
            return None
    given, chosen = math.prod(whole.spec.shape), math.prod(mask.spec.shape)
    return elements // max(1, given // max(1, chosen))  # each element of a mask that is broadcast selects several


def depends_on_contents(call: Call) -> bool:
    """Tell whether an operator that nothing is known about may want certain contents: integers, or to draw by."""
    known = call.target in FUNCTIONS or is_known(call.target)
    operator = None if known or not call.target.startswith("aten.") else resolve(call.target)
    if operator is None:
        return False
    draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    return draws or any(ref.spec.dtype.startswith(("int", "uint")) for ref in call.tensors())


def _contents(elements: int, dtype: torch.dtype, device: str, bound: int | None, fractions: bool) -> torch.Tensor:
    if bound is None:
        bound = 256 if dtype is torch.uint8 else 1  # bits of a mask, half of them ones
    drawn = torch.float32 if dtype.itemsize == 1 else dtype  # nothing is drawn in float8
    if fractions and dtype.is_floating_point:
        return torch.rand(elements, dtype=drawn, device=device).mul_(0.9).add_(0.05).to(dtype)
    if fractions and dtype is not torch.bool and not dtype.is_complex:
        return torch.randint(1, max(2, bound), (elements,), device=device).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(elements, dtype=drawn, device=device).to(dtype)
    if dtype is torch.bool:
        return torch.rand(elements, device=device) < 0.5
    return torch.randint(0, max(1, bound), (elements,), device=device).to(dtype)


def _key(ref: TensorRef) -> tuple[int | None, str]:
    return ref.value, "" if ref.value is not None else ref.node


def arguments_bytes(call: Call, *, resident: bool = True) -> int:
    """Memory of the arguments that `make_arguments` makes; without `resident`, of those that a step makes."""
    refs = [ref for ref in call.tensors() if resident or ref.value is not None]
    extent, item = _extents(refs), {_key(ref): item_bytes(ref.spec.dtype) for ref in refs}
    return sum(count * item[key] for key, count in extent.items())


def _extents(refs: Iterable[TensorRef]) -> dict[tuple[int | None, str], int]:
    """Elements of each storage that some tensors are in."""
    extent: dict[tuple[int | None, str], int] = defaultdict(int)
    for ref in refs:
        extent[_key(ref)] = max(extent[_key(ref)], _extent(ref))
    return extent


def _extent(ref: TensorRef) -> int:
    """Elements of storage that a tensor spans."""
    if 0 in ref.spec.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(ref.spec.shape, ref.spec.stride, strict=True))
