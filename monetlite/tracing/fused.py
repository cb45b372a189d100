"""Keeping kernels whole that torch's tracing would take apart.

While AOTAutograd traces, some operators are replaced by Python decompositions: bilinear upsampling becomes
some thirty elementwise operators, with other rounding than the kernel that plain training runs. Captured
graphs must run what plain training runs, so these decompositions are put aside during a capture.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_WHOLE = (
    *(f"upsample_nearest{dimensions}d" for dimensions in (1, 2, 3)),
    *(f"_upsample_nearest_exact{dimensions}d" for dimensions in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "hardshrink",
    "softshrink",
)


@contextlib.contextmanager
def kernels_kept_whole() -> Iterator[None]:
    """Trace the operators above as the kernels they are."""
    put_aside: list[tuple[OpOverload, DispatchKey, Callable[..., Any]]] = []
    try:
        for operator in _overloads():
            for key in _KEYS:
                kernel = operator.py_kernels.pop(key, None)
                if kernel is not None:
                    put_aside.append((operator, key, kernel))
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, key, kernel in put_aside:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


def _overloads() -> Iterator[OpOverload]:
    for name in _WHOLE:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            for overload in packet.overloads():
                yield getattr(packet, overload)
