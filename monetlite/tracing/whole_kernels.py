"""Keeping kernels that torch's tracing would take apart, or replace by others.

While AOTAutograd traces, some operators are replaced by Python decompositions: bilinear upsampling becomes
some thirty elementwise operators, with other rounding than the kernel that plain training runs. Captured
graphs must run what plain training runs, so these decompositions are put aside during a capture.

Batch norm on CUDA is another such case: a plain step runs cuDNN's, and a capture would have torch's own kernel in
its place, which rounds otherwise (pytorch/pytorch#187444). There is an operator that can be captured and that runs
cuDNN's where a plain step would, `_batch_norm_with_update`; a capture takes that one.

And draws in place (dropout in place, alpha dropout): a plain step draws in the order of the storage, where a
capture would draw in the order of indices, and so drop other elements of a channels-last tensor.

And cells of GRUs: a plain step computes two gates in slices of their rows, in place. A capture would have each in
a tensor of its own, where a CPU's kernels begin their vectors at other elements, and round some otherwise.

And dropout of everything: a plain step multiplies by zero, where a capture would draw a mask first, and so leave
the random number generator in another state.

Some fake tensors are laid out otherwise than the real ones: torch makes them by Python functions, whose results
follow the strides of what they read, where kernels make a tensor in order, or the other way round. A view that
those allow would fail on the real one, and what reads the tensor would be measured in another layout. The table of
layouts below says what kernels make.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from monetlite.fx.torch_internals.patching import patched
from monetlite.fx.torch_internals.torch_dispatch import (
    DispatchKey,
    OpOverload,
    PythonKernel,
    decomposition_table,
    faked_by,
    python_kernel,
    special_fake_functions,
    suggest_memory_format,
    traced_as,
    without_modes,
    without_python_kernels,
)
from monetlite.fx.torch_internals.torch_symbols import same_sizes
from monetlite.operators.packing import outermost_first
from monetlite.operators.traits import traits_of
from monetlite.tracing.interpolation import interpolated_to_any_size, packets_kept_whole
from monetlite.tracing.strides_of_ones import ones_laid_out_as_real

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

Layout: TypeAlias = "Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]"
"""A result of a fake operator, laid out as its kernel does it, by the arguments. Inductor compiles what it finds in
torch's table, so the result has the right values, too, and nothing is written to.
"""


def _in_order(made: torch.Tensor, order: torch.memory_format) -> torch.Tensor:
    alike = same_sizes(made.stride(), torch.empty_like(made, memory_format=order).stride())
    return made if alike else made.clone(memory_format=order)


def _contiguous(made: torch.Tensor, _: Sequence[Any]) -> torch.Tensor:
    return _in_order(made, torch.contiguous_format)


def _as_read(made: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """The layout of a pointwise kernel: that of what it reads, of the first tensor above all."""
    first, *_, last = (item for item in args if isinstance(item, torch.Tensor))
    like = torch.add(first, last)
    alike = same_sizes(made.stride(), like.stride())
    return made if alike else torch.where(torch.ones_like(like, dtype=torch.bool), made, like)


def _in_order_of_second(made: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """The order of the second argument, contiguous or channels-last, on a CPU."""
    source: torch.Tensor = args[1]
    return _in_order(made, suggest_memory_format(source)) if source.device.type == "cpu" else made


def _of_batch_norm(made: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    """The order of the images, on a CPU. Images of one pixel or channel are in both, and contiguous then."""
    source: torch.Tensor = args[0]
    if source.device.type != "cpu":
        return made
    return _contiguous(made, args) if source.is_contiguous() else _in_order(made, suggest_memory_format(source))


def _of_batch_norm_backward(made: torch.Tensor, args: Sequence[Any]) -> torch.Tensor:
    gradient, source = args[:2]
    alike = suggest_memory_format(gradient) == suggest_memory_format(source)
    return _of_batch_norm(made, (source,)) if alike else _in_order_of_second(made, args)


_aten = torch.ops.aten
_LAYOUTS: Mapping[OpOverload, Layout] = {
    _aten._native_batch_norm_legit_functional.default: _of_batch_norm,
    _aten._native_batch_norm_legit.no_stats: _of_batch_norm,
    _aten._native_batch_norm_legit_no_training.default: _of_batch_norm,
    _aten.native_batch_norm_backward.default: _of_batch_norm_backward,
    _aten.native_group_norm_backward.default: _in_order_of_second,
    _aten.native_layer_norm_backward.default: _contiguous,
    _aten._log_softmax_backward_data.default: _contiguous,
    _aten.glu_backward.default: _contiguous,
    _aten.mse_loss_backward.default: _contiguous,
    _aten.smooth_l1_loss_backward.default: _contiguous,
    _aten.huber_loss_backward.default: _contiguous,
    _aten.hardtanh_backward.default: _as_read,
    _aten.hardswish_backward.default: _as_read,
    _aten.hardsigmoid_backward.default: _as_read,
    _aten.softplus_backward.default: _as_read,
    _aten.elu_backward.default: _as_read,
}
"""Operators whose fake results are laid out otherwise than those of their kernels."""


@contextlib.contextmanager
def kernels_kept_whole() -> Iterator[None]:
    """Trace the operators above as the kernels they are."""
    overloads = [getattr(packet, name) for packet in packets_kept_whole() for name in packet.overloads()]
    with (
        patched(),  # so that no other thread's changes are wrapped by these
        without_python_kernels(overloads, _KEYS),
        _laid_out_as_real(),
        ones_laid_out_as_real(),
        interpolated_to_any_size(_KEYS),
        _dropout_backward_as_read(),
        _group_norm_in_order_on_gpus(),
        _batch_norm_by_cudnn(),
        _draws_in_storage_order(),
        _dropout_of_everything(DispatchKey.Autograd),
        _dropout_of_everything(DispatchKey.CompositeImplicitAutograd),
        _gates_in_rows(DispatchKey.Autograd),
        _gates_in_rows(DispatchKey.CompositeImplicitAutograd),
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


def _laid_out_as_real() -> AbstractContextManager[None]:
    """Have fake tensors be laid out as the real ones that kernels make."""

    def laid_out(operator: OpOverload, decomposed: PythonKernel, layout: Layout) -> PythonKernel:
        @functools.wraps(decomposed)  # whose module says that fake tensors are made by it
        def made(*args: Any, **kwargs: Any) -> Any:
            read = list(args)  # other strides can't be faked
            for at in traits_of(str(operator)).reads_in_order:
                read[at] = read[at].contiguous()
            results = decomposed(*read, **kwargs)
            first, *rest = results if isinstance(results, tuple) else (results,)
            if isinstance(first, torch.Tensor):
                first = layout(first, args)
            return (first, *rest) if isinstance(results, tuple) else first

        return made

    return faked_by(
        decomposition_table,
        {item: laid_out(item, decomposition_table[item], layout) for item, layout in _LAYOUTS.items()},
    )


def _dropout_backward_as_read() -> AbstractContextManager[None]:
    """Have fake gradients that a CPU's dropout makes be laid out as real ones are: a product's, of what is read."""
    operator = torch.ops.aten.native_dropout_backward.default
    decomposed = decomposition_table[operator]

    @functools.wraps(decomposed)
    def made(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
        return gradient * mask * scale if gradient.device.type == "cpu" else decomposed(gradient, mask, scale)

    return faked_by(decomposition_table, {operator: made})


def _group_norm_in_order_on_gpus() -> AbstractContextManager[None]:
    """Have fake images that a GPU's group norm reads and makes be contiguous, as real ones are."""

    def made(_mode: Any, operator: OpOverload, source: torch.Tensor, *args: Any) -> Any:
        as_it_is = source.device.type == "cpu" or source.is_contiguous()
        return NotImplemented if as_it_is else operator(source.contiguous(), *args)

    return faked_by(special_fake_functions, {torch.ops.aten.native_group_norm.default: made})


def _draws_in_storage_order() -> AbstractContextManager[None]:
    """Have zeros and ones be drawn in place as a plain step draws them."""
    operator, key = torch.ops.aten.bernoulli_.float, DispatchKey.Autograd

    def draw(tensor: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
        order = outermost_first(tensor.shape, tensor.stride())
        with without_python_kernels([operator], [key]):
            by_index = tensor.is_contiguous() or (tensor.device.type == "cpu" and _drawn_by_index())
            operator(tensor if by_index else tensor.permute(order), p, generator=generator)
        return tensor

    return traced_as(operator, key, draw)


@functools.cache
def _drawn_by_index() -> bool:
    """Tell whether torch draws in place in the order of indices on this CPU, where it may have another kernel."""
    with without_modes():
        drawn, by_index = (
            made.bernoulli_(generator=torch.Generator().manual_seed(0))
            for made in (torch.empty(64, 64).t(), torch.empty(64, 64))
        )
        return torch.equal(drawn, by_index)


def _dropout_of_everything(key: DispatchKey) -> AbstractContextManager[None]:
    """Have what is dropped whole be multiplied by zero, as a plain step does, without drawing numbers."""
    operator = torch.ops.aten.dropout.default
    decomposed = python_kernel(operator, key)
    assert decomposed is not None

    def dropout(source: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        made: torch.Tensor = source * source.new_zeros(()) if train and p == 1 else decomposed(source, p, train)
        return made

    return traced_as(operator, key, dropout)


def _gates_in_rows(key: DispatchKey) -> AbstractContextManager[None]:
    """Have a CPU's GRU cell compute the sigmoid of two gates in slices, as a plain step does."""
    operator = torch.ops.aten.gru_cell.default

    def cell(
        source: torch.Tensor,
        hidden: torch.Tensor,
        of_source: torch.Tensor,
        of_hidden: torch.Tensor,
        *biases: torch.Tensor | None,
    ) -> torch.Tensor:
        if source.device.type != "cpu":
            with without_python_kernels([operator], [key]):
                made: torch.Tensor = operator(source, hidden, of_source, of_hidden, *biases)
            return made
        to_source, to_hidden = biases or (None, None)
        given = F.linear(source, of_source, to_source).unsafe_chunk(3, 1)
        kept = F.linear(hidden, of_hidden, to_hidden).unsafe_chunk(3, 1)
        gates = torch.cat([kept[0] + given[0], kept[1] + given[1]], 1)
        reset, update = (gate.sigmoid() for gate in gates.chunk(2, 1))
        new = (given[2] + kept[2] * reset).tanh()
        return (hidden - new) * update + new

    return traced_as(operator, key, cell)
