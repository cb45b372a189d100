"""What an operator family sees of a kernel when it offers other ways to run it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from monetlite.core.graph import Argument, Call, Implementation, TensorRef, TensorSpec, Value


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A traced kernel: its call, its default implementation, and the graph built so far.

    Attributes:
        call, default: what was traced.
        results: the layout of each result; None where nobody reads it.
        values: those of the graph, by index.
        writer_call: the call that computes a value, if an operator does; writer_again: what later runs of
            that operator call instead.
        reader_calls: the calls that read a value.
        references: a tensor that an operator has written, by name.
        intermediates: the small values offered to this kernel, by name.
    """

    call: Call
    default: Implementation
    results: tuple[TensorSpec | None, ...]
    values: Sequence[Value]
    writer_call: Callable[[int], Call | None]
    writer_again: Callable[[int], Call | None] = lambda _: None
    reader_calls: Callable[[int], Iterable[Call]] = lambda _: ()
    references: Callable[[str], TensorRef | None] = lambda _: None
    intermediates: Mapping[str, TensorRef] = field(default_factory=dict)

    def reader(self, source: TensorRef, *targets: str) -> Call | None:
        """A call of one of some targets whose first argument is a tensor, if there is one."""
        if source.value is None:
            return None
        calls = self.reader_calls(source.value)
        return next((call for call in calls if call.target in targets and call.args[:1] == (source,)), None)

    def reference(self, name: str | None) -> TensorRef | None:
        """The tensor that an operator has written under a name."""
        return None if name is None else self.references(name)

    def implement(
        self,
        name: str,
        *,
        target: str | None = None,
        args: tuple[Argument, ...] | None = None,
        kwargs: tuple[tuple[str, Argument], ...] | None = None,
        outputs: tuple[str | None, ...] | None = None,
        overwrites: tuple[int, ...] = (),
        tolerance: float = 0.0,
        devices: tuple[str, ...] = (),
        guard: Call | None = None,
        again: Call | None = None,
    ) -> Implementation:
        """Another implementation of this kernel: the default call with what is given replaced."""
        call = replace(
            self.call,
            target=self.call.target if target is None else target,
            args=self.call.args if args is None else args,
            kwargs=self.call.kwargs if kwargs is None else kwargs,
            outputs=self.call.outputs if outputs is None else outputs,
        )
        reads = {ref.value for ref in call.tensors() if ref.value is not None}
        return Implementation(
            name=name,
            reads=tuple(sorted(reads)),
            writes=self.default.writes,
            overwrites=overwrites,
            tolerance=tolerance,
            devices=devices,
            guard=guard,
            call=call,
            again=again,
        )

    def over(self, argument: Argument, result: int = 0) -> tuple[int, ...]:
        """What an implementation overwrites whose result takes an argument's memory; empty where it can't."""
        if isinstance(argument, TensorRef) and argument.value is not None and self.can_overwrite(argument, result):
            return (argument.value,)
        return ()

    def can_overwrite(self, argument: Argument, result: int = 0) -> bool:
        """Whether a result can take the memory of an argument: same layout, and all of its storage.

        That the argument dies there is for the solver to see to.
        """
        if not isinstance(argument, TensorRef) or argument.value is None or result >= len(self.results):
            return False
        spec = self.results[result]
        if spec is None:
            return False
        source = self.values[argument.value]
        written = self.default.writes[sum(item is not None for item in self.results[:result])]
        layout = (argument.spec.shape, argument.spec.stride, argument.spec.dtype)
        others = [ref.spec for ref in self.call.tensors() if ref.value == argument.value]
        return (
            not source.held
            and source.size_bytes == self.values[written].size_bytes
            and layout == (spec.shape, spec.stride, spec.dtype)
            and all((other.shape, other.stride, other.dtype) == layout for other in others)
        )


def is_whole(values: Sequence[Value], ref: TensorRef) -> bool:
    """Whether a tensor is all of its storage, and so begins where the allocator put it, which is aligned."""
    if not is_dense(ref.spec):
        return False
    if ref.value is None:
        # What AOTAutograd calls parameters and inputs; their views have other names.
        return ref.node.startswith("primals")
    item_bytes: int = getattr(torch, ref.spec.dtype).itemsize
    return math.prod(ref.spec.shape) * item_bytes == values[ref.value].size_bytes


def is_dense(spec: TensorSpec) -> bool:
    """Whether a tensor's elements fill its storage without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether a tensor is laid out row by row."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether an image of shape (batch, channels, rows, columns) is laid out with its channels innermost."""
    if len(spec.shape) != 4:
        return False
    order = (0, 2, 3, 1)
    shape, stride = tuple(spec.shape[i] for i in order), tuple(spec.stride[i] for i in order)
    return is_contiguous(TensorSpec(shape=shape, stride=stride, dtype=spec.dtype))


def same_layout(one: TensorSpec, other: TensorSpec) -> bool:
    """Whether two tensors have their elements in the same places of their storages."""
    return one.shape == other.shape and all(
        size == 1 or mine == theirs for size, mine, theirs in zip(one.shape, one.stride, other.stride, strict=True)
    )
