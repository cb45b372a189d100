"""What an operator family sees of a kernel when it offers other ways to run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from monetlite.graph import Argument, Call, Implementation, TensorRef, TensorSpec, Value


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A traced kernel: its call, its default implementation, and the graph built so far.

    `results[i]` is the layout of the i-th result (None where nobody reads it); `values` are those of the
    graph, by index; `writer_call(v)` is the call that computes value v, if an operator does.
    """

    call: Call
    default: Implementation
    results: tuple[TensorSpec | None, ...]
    values: Sequence[Value]
    writer_call: Callable[[int], Call | None]

    def implement(
        self,
        name: str,
        *,
        target: str | None = None,
        args: tuple[Argument, ...] | None = None,
        kwargs: tuple[tuple[str, Argument], ...] | None = None,
        outputs: tuple[str | None, ...] | None = None,
        overwrites: tuple[int, ...] = (),
        exact: bool = True,
    ) -> Implementation:
        """Another implementation of this kernel: the default call with what is given replaced."""
        call = replace(
            self.call,
            target=self.call.target if target is None else target,
            args=self.call.args if args is None else args,
            kwargs=self.call.kwargs if kwargs is None else kwargs,
            outputs=self.call.outputs if outputs is None else outputs,
        )
        reads = tuple(sorted({ref.value for ref in call.tensors() if ref.value is not None}))
        return Implementation(
            name=name, reads=reads, writes=self.default.writes, overwrites=overwrites, exact=exact, call=call
        )

    def can_overwrite(self, argument: Argument) -> bool:
        """Whether the only result can take the memory of an argument: same layout, and all of its storage.

        That the argument dies there is for the solver to see to.
        """
        if not isinstance(argument, TensorRef) or argument.value is None or len(self.default.writes) != 1:
            return False
        source, result = self.values[argument.value], self.values[self.default.writes[0]]
        others = [ref.spec for ref in self.call.tensors() if ref.value == argument.value]
        layout = (argument.spec.shape, argument.spec.stride, argument.spec.dtype)
        spec = self.results[0]
        return (
            spec is not None
            and not source.held
            and source.size_bytes == result.size_bytes
            and layout == (spec.shape, spec.stride, spec.dtype)
            and all((other.shape, other.stride, other.dtype) == layout for other in others)
        )
