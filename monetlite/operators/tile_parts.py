"""Parts of functions that run in tiles: sums over tiles, and kernels that are made up for estimates."""

import math
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from monetlite.core.graph import Call, TensorRef, TensorSpec
from monetlite.operators.implementations import KernelRuns, elements
from monetlite.operators.strides import item_bytes

_numbers = count()


def made_up(dtype: str, *shape: int) -> TensorRef:
    """A contiguous tensor, another one than all others."""
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    spec = TensorSpec(shape=shape, stride=stride, dtype=dtype)
    return TensorRef(node=f"made up {next(_numbers)}", value=None, spec=spec)


def turned(matrix: TensorRef) -> TensorRef:
    """A matrix's transpose."""
    return made_up(matrix.spec.dtype, *reversed(matrix.spec.shape))


def runs(times: int, target: str, *args: Any, made: TensorRef) -> KernelRuns:
    """Runs of an ATen kernel that writes one tensor."""
    call = Call(target=target, args=args, outputs=("made",))
    return KernelRuns(call=call, written_bytes=elements(made) * item_bytes(made.spec.dtype), times=times)


def first_part(part: Tensor, tiles: int) -> Tensor:
    """The first part of a sum over tiles: in float32, if there are several."""
    return part if tiles == 1 else part.to(torch.promote_types(part.dtype, torch.float32))


def added_product(total: Tensor | None, left: Tensor, right: Tensor, tiles: int) -> Tensor:
    """A sum of products over tiles, with that of another tile."""
    if total is None:
        return first_part(left @ right, tiles)
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(left @ right)


def summed_product(left: TensorRef, right: TensorRef, tiles: int) -> Iterator[KernelRuns]:
    """The kernels of `added_product` over all tiles."""
    dtype = left.spec.dtype
    shape = left.spec.shape[0], right.spec.shape[1]
    part, total = made_up(dtype, *shape), made_up("float32", *shape)
    if tiles > 1 and item_bytes(dtype) >= 4:
        yield runs(1, "aten.mm.default", left, right, made=part)
        yield runs(tiles - 1, "aten.addmm.default", part, left, right, made=part)
        return
    yield runs(tiles, "aten.mm.default", left, right, made=part)
    if tiles > 1:
        yield runs(1, "aten._to_copy.default", part, made=total)
        yield runs(tiles - 1, "aten.add.Tensor", total, part, made=total)
        yield runs(1, "aten._to_copy.default", total, made=part)
