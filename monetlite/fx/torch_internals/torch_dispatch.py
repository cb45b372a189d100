"""Operators and their schemas, how torch traces them, modes, fake tensors and storages.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `OpOverload` | class of a captured call's target; kernels and views are told apart by it |
| `OpOverload._schema` | names of arguments, and which results are views; graphs of values would be wrong |
| `OpOverload._op` | the operator without Python's checks; steps would be slower |
| `OpOverload.py_kernels` | Python functions that tracing runs in an operator's place; see `traced_as` |
| `OpOverload._dispatch_cache` | looked up before `py_kernels`; changes of those would not be seen |
| `decomposition_table` | Python functions that make fake tensors; see `faked_by` |
| `op_implementations_dict` | the same, before those; takes the mode and the operator, too |
| `suggest_memory_format` | layout of a batch norm's result on a CPU; captured strides would be wrong |
| `_VariableFunctions`, `_nn` | functions generated for operators; steps would be slower |
| `FakeTensor`, `FakeTensorMode` | tensors without memory, on which a step is captured |
| `"torch._subclasses.fake_tensor"` | logger of operators that fail there; a traceback would come before an error |
| `forward_ad._current_level` | tells forward-mode AD, which fails in a captured step with PyTorch's own error |
| `is_legacy_batchedtensor`, `_remove_batch_dim`, `_add_batch_dim` | gradients in a batch, which would fail |
| `_vmapmode_increment_nesting`, `_vmapmode_decrement_nesting` | the same, where numbers are drawn |
| `TorchDispatchMode` | sees which operator a function calls |
| `any_torch_dispatch_mode_on_stack` | tells modes in which TorchDynamo captures nothing; steps would fail |
| `_disable_current_modes` | real tensors while a step is captured; measurements would be of nothing |
| `temporarily_clear_interpreter_stack` | the same for transforms of `torch.func` |
| `Tensor._version` | changes in place; a piece would compute again from a changed tensor |
| `Tensor._base` | what a view is of; a changed tensor could be taken for one that is gone |
| `auto_functionalized_v2`, `_only_clone_these_bases` | an operator that changes tensors, on copies or in place |
| `Tensor._indices`, `._values` | the dense parts of a sparse tensor; its memory would not count |
| `_C._disabled_torch_dispatch_impl` | tells classes that see no operators; steps with their tensors would fail |
| `StorageWeakRef` | tells when a storage dies; recorded steps would have other lifetimes |
| `UntypedStorage._cdata` | identity of a storage; views would count as tensors of their own |
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey as DispatchKey
from torch._decomp import decomposition_table as decomposition_table
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload as OpOverload
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, any_torch_dispatch_mode_on_stack

from monetlite.fx.torch_internals.patching import patched

PythonKernel: TypeAlias = Callable[..., Any]

without_modes = _disable_current_modes
without_transforms = temporarily_clear_interpreter_stack

FakeFunctions: TypeAlias = dict[Any, PythonKernel]
"""Functions that make fake tensors, by operator: `decomposition_table` and the one below."""
special_fake_functions: FakeFunctions = op_implementations_dict

GENERATED_FUNCTIONS = (torch._C._VariableFunctions, torch._C._nn)
"""Namespaces of the functions that torch generates for operators."""


_FAILURE = "failed while attempting to run meta"
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Have operators that fail in a capture raise without a log line or warning, for the time of a block."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_FAILURE)

    _fake_log.addFilter(is_other)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in")
            yield
    finally:
        _fake_log.removeFilter(is_other)


CHANGING = torch.ops.higher_order.auto_functionalized_v2
"""The call in a capture for an operator that changes tensors: it returns the results and the changed copies."""
BASES = "_all_bases"
"""Its argument: the tensors that are changed."""


def run_changing(operator: OpOverload, arguments: Mapping[str, Any], *, in_place: bool) -> tuple[Any, ...]:
    """Run an operator that changes tensors as a capture calls it, on copies of those or in place."""
    copied = {"_only_clone_these_bases": ()} if in_place else {}
    made: tuple[Any, ...] = CHANGING(operator, **copied, **arguments)
    return made


def named_operator(name: str) -> OpOverload:
    """An operator by its name with its overload (`aten.add.Tensor`)."""
    namespace, packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """An operator's arguments and results, with which of them it changes or returns views of."""
    return operator._schema


def unchecked(operator: OpOverload) -> Callable[..., Any]:
    """An operator as a function that goes to the dispatcher without Python's detour."""
    function: Callable[..., Any] = operator._op
    return function


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors of one storage share while they live, fake ones too."""
    key: int = tensor.untyped_storage()._cdata
    return key


def stored(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor's elements are in: itself, or the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    with without_modes():  # the parts of a real tensor are asked for while a step is captured, too
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def without_class(item: Any) -> Any:
    """A tensor of a class that sees calls of functions only (MONAI's MetaTensor) as a plain one; others as is.

    Dynamo has called the functions then, and operators refuse the class while AOTAutograd looks at a first run.
    """
    if type(item) in (torch.Tensor, torch.nn.Parameter) or not isinstance(item, torch.Tensor):
        return item
    sees_operators = type(item).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return item if sees_operators else item.as_subclass(torch.Tensor)


def weak_storage(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's storage; `expired()` tells if that is gone."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types for it


def changes_of_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Changes in place of several tensors, as each step asks of all parameters; 0 where they are not counted."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def watched(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that tells whether a tensor's storage was changed in place since; it doesn't keep that alive.

    Autograd counts changes (`_version`). A detached tensor counts with the one that it is of, and goes on where its
    `data` is replaced.
    """
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    before = counter._version
    return lambda: counter._version != before


def is_transformed() -> bool:
    """True inside of a transform of `torch.func` (grad, vmap, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batch_of(gradient: object) -> bool:
    """True for a batch of gradients (`is_grads_batched`), which poses as one of them."""
    return isinstance(gradient, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(gradient)


def gradients_of(batch: torch.Tensor) -> Sequence[torch.Tensor]:
    """The gradients of a batch."""
    return torch._remove_batch_dim(batch, 1, 1, 0).unbind()


def in_batches() -> bool:
    """True in the thread that asks for gradients in a batch."""
    nesting = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    return nesting > 1


@contextlib.contextmanager
def without_batches() -> Iterator[None]:
    """Numbers may be drawn in the block, which PyTorch refuses where gradients are computed in a batch."""
    depth = torch._C._vmapmode_increment_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth - 1):
            torch._C._vmapmode_increment_nesting()


def batch_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """A batch that poses as one gradient."""
    return torch._add_batch_dim(torch.stack(tuple(gradients)), 0, 1)


def is_forward_mode() -> bool:
    """True where forward-mode AD is on (`torch.autograd.forward_ad.dual_level`)."""
    level: int = forward_ad._current_level
    return level >= 0


def is_watched() -> bool:
    """True where a person's dispatch mode (a counter of FLOPs) or `torch.jit.trace` sees each operator."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # torch has no types for it
    return traced or any_torch_dispatch_mode_on_stack()


def is_traced() -> bool:
    """True where operators are recorded or faked: inside of a transform or a dispatch mode."""
    return is_transformed() or torch._C._len_torch_dispatch_stack() > 0


def python_kernel(operator: OpOverload, key: DispatchKey) -> PythonKernel | None:
    """The Python function that tracing runs in an operator's place; None where it records the operator."""
    return operator.py_kernels.get(key)


def without_python_kernels(
    operators: Iterable[OpOverload], keys: Collection[DispatchKey]
) -> AbstractContextManager[None]:
    """Trace operators as the kernels that they are, for the time of a block."""
    return patched(*(_python_kernel_set(operator, key, None) for operator in operators for key in keys))


def traced_as(operator: OpOverload, key: DispatchKey, function: PythonKernel) -> AbstractContextManager[None]:
    """Trace an operator as a Python function does it, for the time of a block."""
    return patched(_python_kernel_set(operator, key, function))


@contextlib.contextmanager
def _python_kernel_set(operator: OpOverload, key: DispatchKey, function: PythonKernel | None) -> Iterator[None]:
    before = operator.py_kernels.pop(key, None)
    if function is not None:
        operator.py_kernels[key] = function
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.pop(key, None)
        if before is not None:
            operator.py_kernels[key] = before
        operator._dispatch_cache.clear()


def faked_by(table: FakeFunctions, functions: Mapping[Any, PythonKernel]) -> AbstractContextManager[None]:
    """Make fake tensors of operators by functions that a block has in one of the tables above."""
    return patched(_updated(table, functions))


@contextlib.contextmanager
def _updated(table: FakeFunctions, functions: Mapping[Any, PythonKernel]) -> Iterator[None]:
    before = {operator: table[operator] for operator in functions if operator in table}
    table.update(functions)
    FakeTensorMode.cache_clear()  # of results that the other functions made
    try:
        yield
    finally:
        for operator in functions:
            del table[operator]
        table.update(before)
        FakeTensorMode.cache_clear()
