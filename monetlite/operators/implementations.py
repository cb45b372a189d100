"""Implementations: how an operator family registers ways to run a kernel, and the functions that they call.

A family is one file of this folder. Importing `monetlite.operators` imports them all, and the decorators below
register what they offer. `docs/implementations.md` has a worked example.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor, fx

from monetlite.core.graph import Argument, Call, Implementation, TensorRef, TensorSpec, Value

PREFIX = "monetlite."
"""Namespace of our own functions in calls."""
MIN_TILE_ROWS = 32
"""Rows of the smallest tile."""

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class KernelRuns:
    """Runs of one kernel in a function of several.

    Attributes:
        call: of the kernel, with operands as large as those of one run.
        written_bytes: by one run.
        times: number of runs.
    """

    call: Call
    written_bytes: int
    times: int


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of ours that calls can name, and its work on a device that nobody has measured.

    Attributes:
        name: its name in calls, without the prefix.
        run: takes and returns tensors.
        limit: what bounds it: a field of `monetlite.core.devices.Efficiency`.
        passes: bytes that it moves, as a multiple of reading its operands and writing its results once.
        workspace_bytes: memory that it holds on a GPU, beside operands and results.
        launches: number of kernels that it launches on a GPU.
        like: a call that takes as long, if there is one; `limit` and `passes` are then ignored.
        integers: bound of integer operands that are made up to measure it.
        random: it draws random numbers.
        parts: number of batch slices it runs one after another.
        kernels: those that it runs, where they are many; `limit`, `passes`, `launches` and `like` are then ignored.
    """

    name: str
    run: Callable[..., Any]
    limit: str = "elementwise"
    passes: float = 1.0
    workspace_bytes: Callable[[Call], int] = lambda _: 0
    launches: Callable[[Call], int] = lambda _: 1
    like: Callable[[Call], Call] | None = None
    integers: Callable[[Call], int] | None = None
    random: bool = False
    parts: Callable[[Call], int] | None = None
    kernels: Callable[[Call], Iterable[KernelRuns]] | None = None


@dataclass(frozen=True, kw_only=True)
class Intermediate:
    """A small value that a backward kernel can read in place of a large one: a packed mask, pooling offsets.

    It becomes an optional operator, which the solver may run wherever what it reads is in memory, or never.

    Attributes:
        name: last part of the operator's name; `TracedKernel.intermediates` has the value under it.
        function: registered with `function`.
        ways: (implementation's name, arguments) of each way to compute it; arguments are of the captured graph.
        shape, dtype: of the result; dtype is torch's name.
    """

    name: str
    function: Callable[..., Any]
    ways: tuple[tuple[str, tuple[Any, ...]], ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class TracedKernel:
    """A traced kernel: its call, its default implementation, and the graph built so far.

    Attributes:
        call, default: what was traced.
        results: the layout of each result; None where nobody reads it.
        values: those of the graph, by index.
        writer: the default implementation of the operator that writes a value, if one does.
        reader_calls: the calls that read a value.
        references: a tensor that an operator has written, by name.
        intermediates: the small values offered to this kernel, by name.
    """

    call: Call
    default: Implementation
    results: tuple[TensorSpec | None, ...]
    values: Sequence[Value]
    writer: Callable[[int], Implementation | None]
    reader_calls: Callable[[int], Iterable[Call]] = lambda _: ()
    references: Callable[[str], TensorRef | None] = lambda _: None
    intermediates: Mapping[str, TensorRef] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the call."""
        return self.call.args

    def reader(self, source: TensorRef, *targets: str) -> tuple[Call, TensorRef] | None:
        """A call of one of some targets whose first argument is a tensor, and its first result, if it has them."""
        return self._first_of(() if source.value is None else self.reader_calls(source.value), source, targets)

    def normalization(
        self, source: TensorRef, statistic: TensorRef, *targets: str
    ) -> tuple[Call, TensorRef] | None:
        """The same of the call that wrote a statistic. Others may normalise the tensor with other weights."""
        call = self.computed_by(statistic)
        return self._first_of(() if call is None else (call,), source, targets)

    def computed_by(self, tensor: TensorRef) -> Call | None:
        """The call that computes a tensor, if an operator does."""
        writer = None if tensor.value is None else self.writer(tensor.value)
        return None if writer is None else writer.call

    def _first_of(
        self, calls: Iterable[Call], source: TensorRef, targets: Sequence[str]
    ) -> tuple[Call, TensorRef] | None:
        for call in calls:
            if call.target in targets and call.args[:1] == (source,):
                output = None if call.outputs[0] is None else self.references(call.outputs[0])
                return None if output is None else (call, output)
        return None

    def implement(
        self,
        name: str,
        run: str | Callable[..., Any] | None = None,
        **changes: Any,
    ) -> Implementation:
        """Another implementation of this kernel: the default call with what is given replaced.

        Args:
            name: of the implementation.
            run: an ATen overload, by name, or a registered function.
            changes: args, kwargs and outputs of the call; other fields of `Implementation`: overwrites, tolerance,
                devices, guard, again.
        """
        of_call: dict[str, Any] = {
            field: changes.pop(field) for field in ("args", "kwargs", "outputs") if field in changes
        }
        if run is not None:
            of_call["target"] = run if isinstance(run, str) else name_of(run)
        call = replace(self.call, **of_call)
        made = [name for name in self.call.outputs if name is not None]
        writes = (value for value, name in zip(self.default.writes, made, strict=True) if name in call.outputs)
        return Implementation(name=name, reads=reads_of(call), writes=tuple(writes), call=call, **changes)

    def implement_over(
        self,
        name: str,
        run: Callable[..., Any],
        run_over: Callable[..., Any],
        args: tuple[Argument, ...],
        **promises: Any,
    ) -> Iterator[Implementation]:
        """An implementation by a function, and where possible one by another over the first argument."""
        yield self.implement(name, run, args=args, kwargs=(), **promises)
        if overwrites := self.over(args[0]):
            promises["overwrites"] = overwrites
            yield self.implement(f"{name}_inplace", run_over, args=args, kwargs=(), **promises)

    def over(self, argument: Argument, result: int = 0) -> tuple[int, ...]:
        """The value that an implementation overwrites if its result takes an argument's memory.

        Empty unless argument and result have the same layout and fill the same storage. The solver sees to it that
        the argument dies there.
        """
        spec = self.results[result] if result < len(self.results) else None
        if not isinstance(argument, TensorRef) or argument.value is None or spec is None:
            return ()
        source = self.values[argument.value]
        written = self.default.writes[sum(item is not None for item in self.results[:result])]
        layout = (spec.shape, spec.stride, spec.dtype)
        read = [ref.spec for ref in (argument, *self.call.tensors()) if ref.value == argument.value]
        possible = (
            not source.held
            and source.size_bytes == self.values[written].size_bytes
            and all((other.shape, other.stride, other.dtype) == layout for other in read)
        )
        return (argument.value,) if possible else ()


Alternatives = Callable[[TracedKernel], Iterator[Implementation]]
Intermediates = Callable[..., Iterator[Intermediate]]

FUNCTIONS: dict[str, Function] = {}
"""Our own functions, by their names in calls, with the prefix."""
_names: dict[Callable[..., Any], str] = {}
_alternatives: dict[str, list[Alternatives]] = {}
_intermediates: dict[str, list[Intermediates]] = {}


def function(name: str, **costing: Any) -> Callable[[_F], _F]:
    """Register a function that calls can name as `monetlite.NAME`; keywords are `Function`'s."""

    def register(run: _F) -> _F:
        target = PREFIX + name
        assert target not in FUNCTIONS, f"{target} is registered twice"
        FUNCTIONS[target] = Function(name=name, run=run, **costing)
        _names[run] = target
        return run

    return register


def function_pair(
    run: Callable[..., Any], name: str, name_over: str = "", *, over: int = 0, **costing: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register a function twice: with its result in new memory, and over one of its operands.

    Args:
        run: takes a tensor for the result, which may be the operand, and then the arguments of calls.
        name: in calls, where the result is a tensor like the operand.
        name_over: in calls, where it is the operand; by default the name with `_` after it.
        over: position of the operand.
        costing: attributes of `Function`.
    """

    @wraps(run)
    def anew(*args: Any) -> Any:
        return run(torch.empty_like(args[over]), *args)

    @wraps(run)
    def over_operand(*args: Any) -> Any:
        return run(args[over], *args)

    for made, called in ((anew, name), (over_operand, name_over or f"{name}_")):
        made.__name__ = made.__qualname__ = called  # by which generated code calls it
        function(called, **costing)(made)
    return anew, over_operand


def alternatives_for(*targets: str) -> Callable[[Alternatives], Alternatives]:
    """Register a generator of implementations for the kernels of some targets (`"aten.relu.default"`)."""
    return partial(_register, _alternatives, targets)


def intermediates_for(*targets: str) -> Callable[[_F], _F]:
    """Register a generator of what a backward kernel of some targets could read in place of an activation.

    It is given the kernel's arguments in the captured graph, where tensors are nodes.
    """
    return partial(_register, _intermediates, targets)


def _register(families: dict[str, list[Any]], targets: Iterable[str], family: _F) -> _F:
    for target in targets:
        families.setdefault(target, []).append(family)
    return family


def alternatives(kernel: TracedKernel) -> Iterator[Implementation]:
    """Every implementation of a kernel beside its default one."""
    for family in _alternatives.get(kernel.call.target, ()):
        yield from family(kernel)


def intermediates(node: fx.Node) -> Iterator[Intermediate]:
    """The small values that families offer a backward kernel to read."""
    for family in _intermediates.get(target_of(node), ()):
        yield from family(*node.args)


def name_of(run: Callable[..., Any]) -> str:
    """The target by which calls name a registered function."""
    return _names[run]


def returns_tuple(run: Callable[..., Any]) -> bool:
    """Tell whether a registered function returns several tensors rather than one, by its annotation."""
    return get_type_hints(run)["return"] is not Tensor


def target_of(node: fx.Node) -> str:
    """The target of a node of a captured graph, as calls write it."""
    return _names.get(node.target, str(node.target)) if callable(node.target) else str(node.target)


def reads_of(*calls: Call | None) -> tuple[int, ...]:
    """The values that calls read, in order."""
    tensors = (ref for call in calls if call is not None for ref in call.tensors())
    return tuple(sorted({ref.value for ref in tensors if ref.value is not None}))


def tensor_at(call: Call, position: int) -> TensorRef:
    """The tensor that is an argument of a call."""
    argument = call.args[position]
    assert isinstance(argument, TensorRef), f"argument {position} of {call.target} is a tensor"
    return argument


def elements(ref: TensorRef) -> int:
    """The number of a tensor's elements."""
    return math.prod(ref.spec.shape)


def slices(count: int, step: int) -> Iterator[slice]:
    """Slices of so many elements, `step` at a time, but at least one; an empty one of no elements."""
    step = max(1, step)
    for start in range(0, max(1, count), step):
        yield slice(start, start + step)
