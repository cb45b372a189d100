"""Keeping kernels that torch's tracing would take apart, or replace by others.

While AOTAutograd traces, some operators are replaced by Python decompositions: bilinear upsampling becomes
some thirty elementwise operators, with other rounding than the kernel that plain training runs. Captured
graphs must run what plain training runs, so these decompositions are put aside during a capture.

Batch norm on CUDA is another such case: a plain step runs cuDNN's, and a capture would have torch's own kernel in
its place, which rounds otherwise (pytorch/pytorch#187444). There is an operator that can be captured and that runs
cuDNN's where a plain step would, `_batch_norm_with_update`; a capture takes that one.

And dropout of everything: a plain step multiplies by zero, where a capture would draw a mask first, and so leave
the random number generator in another state.

Batch norm on a CPU makes a tensor in order (contiguous, or channels-last) whatever it reads, where fake tensors
have the result in the strides of the input. A view that those allow would fail on the real one. The gradient of
dropout is the other way round: a CPU makes it in the strides of the gradient it reads, and fake ones are in order.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import (
    DispatchKey,
    OperatorBase,
    OpOverload,
    PythonKernel,
    decomposed_by,
    decomposition_table,
    python_kernel,
    suggest_memory_format,
    traced_as,
    without_python_kernels,
)
from monetlite.operators.traits import TRAITS

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_BATCH_NORMS = (
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    _BATCH_NORM_BACKWARD,
)


@contextlib.contextmanager
def kernels_kept_whole() -> Iterator[None]:
    """Trace the operators above as the kernels they are."""
    with (
        patched(),  # so that no other thread's changes are wrapped by these
        without_python_kernels(list(_overloads()), _KEYS),
        _batch_norm_in_order(),
        _dropout_backward_as_read(),
        _batch_norm_by_cudnn(),
        _dropout_of_everything(DispatchKey.Autograd),
        _dropout_of_everything(DispatchKey.CompositeImplicitAutograd),
    ):
        yield


def _batch_norm_by_cudnn() -> AbstractContextManager[None]:
    """Have batches be normalised by an operator whose effects a capture sees, and that runs the same kernel."""
    operator, key = torch.ops.aten.cudnn_batch_norm.default, DispatchKey.Autograd
    decomposed = python_kernel(operator, key)

    assert decomposed is not None

    def normalize(*arguments: Any) -> Any:
        *tensors, training, momentum, eps = arguments
        if training and all(running is not None for running in tensors[3:]):
            return torch.ops.aten._batch_norm_with_update.default(*tensors, momentum, eps)
        return decomposed(*arguments)  # which has no effects

    return traced_as(operator, key, normalize)


def _batch_norm_in_order() -> AbstractContextManager[None]:
    """Have fake tensors that a CPU's batch norm and its gradient make be laid out as real ones are."""

    def in_order(operator: OperatorBase, decomposed: PythonKernel) -> PythonKernel:
        @functools.wraps(decomposed)  # whose module says that fake tensors are made by it
        def made(*args: Any, **kwargs: Any) -> Any:
            source = args[1] if operator is _BATCH_NORM_BACKWARD else args[0]
            first, *rest = decomposed(*args, **kwargs)
            if isinstance(first, torch.Tensor) and source.device.type == "cpu":
                # Not just a fake one: Inductor compiles what it finds in this table.
                first = first.contiguous(memory_format=suggest_memory_format(source))
            return (first, *rest)

        return made

    return decomposed_by({operator: in_order(operator, decomposition_table[operator]) for operator in _BATCH_NORMS})


def _dropout_backward_as_read() -> AbstractContextManager[None]:
    """Have fake gradients that a CPU's dropout makes be laid out as real ones are: a product's, of what is read."""
    operator = torch.ops.aten.native_dropout_backward.default
    decomposed = decomposition_table[operator]

    @functools.wraps(decomposed)
    def made(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
        return gradient * mask * scale if gradient.device.type == "cpu" else decomposed(gradient, mask, scale)

    return decomposed_by({operator: made})


def _dropout_of_everything(key: DispatchKey) -> AbstractContextManager[None]:
    """Have what is dropped whole be multiplied by zero, as a plain step does, without drawing numbers."""
    operator = torch.ops.aten.dropout.default
    decomposed = python_kernel(operator, key)
    assert decomposed is not None

    def dropout(source: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        made: torch.Tensor = source * source.new_zeros(()) if train and p == 1 else decomposed(source, p, train)
        return made

    return traced_as(operator, key, dropout)


def _overloads() -> Iterator[OpOverload]:
    for name in (name for name, traits in TRAITS.items() if traits.kept_whole):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            for overload in packet.overloads():
                yield getattr(packet, overload)
