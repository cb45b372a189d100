"""Kernels made of real tensors, outside any graph: to ask for their implementations and run them."""

from collections.abc import Sequence
from typing import Any

import torch
from harness import difference, same_bits

from monetlite.core.graph import Call, Implementation, TensorRef, Value, ValueKind
from monetlite.fx.call_encoding import decode_argument, spec_of
from monetlite.operators import TracedKernel, resolve


class Bench:
    """A kernel's call on real tensors; each tensor given is a value of its own, in the order given."""

    def __init__(
        self,
        target: str,
        *arguments: Any,
        kinds: Sequence[ValueKind] = (),
        writer: Call | None = None,
        extra: Sequence[torch.Tensor] = (),
        **keywords: Any,
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        encoded = tuple(self.encode(item) for item in arguments)
        kwargs = tuple((name, self.encode(item)) for name, item in keywords.items())
        for item in extra:
            self.encode(item)
        self.expected = resolve(target)(*arguments, **keywords)
        results = list(self.expected) if isinstance(self.expected, tuple) else [self.expected]
        call = Call(
            target=target,
            args=encoded,
            kwargs=kwargs,
            outputs=tuple(f"result{i}" for i in range(len(results))),
        )
        made = [*self.tensors, *results]
        kinds = [*kinds, *[ValueKind.ACTIVATION] * (len(made) - len(kinds))]
        self.values = [
            Value(name=f"v{i}", kind=kind, size_bytes=item.untyped_storage().nbytes())
            for i, (item, kind) in enumerate(zip(made, kinds, strict=True))
        ]
        count = len(self.tensors)
        default = Implementation(
            name="default", reads=tuple(range(count)), writes=tuple(range(count, len(made))), call=call
        )
        self.kernel = TracedKernel(
            call=call,
            default=default,
            results=tuple(spec_of(item) for item in results),
            values=self.values,
            writer=lambda _: Implementation(name="default", reads=(), writes=(), call=writer),
        )

    def encode(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            position = next((i for i, known in enumerate(self.tensors) if known is item), len(self.tensors))
            if position == len(self.tensors):
                self.tensors.append(item)
            return TensorRef(node=f"t{position}", value=position, spec=spec_of(item))
        return tuple(item) if isinstance(item, list) else item

    def run(self, implementation: Implementation) -> tuple[Any, list[torch.Tensor]]:
        """Result of an implementation on copies of the tensors, and those copies afterwards."""
        copies = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in self.tensors]
        call = implementation.call
        assert call is not None

        def find(ref: TensorRef) -> torch.Tensor:
            return copies[ref.value]

        arguments = decode_argument(call.args, find)
        keywords = {name: decode_argument(value, find) for name, value in call.kwargs}
        return resolve(call.target)(*arguments, **keywords), copies


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit equal; of NaNs, only that they are NaNs in the same places."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert same_bits(found, expected), difference(found, expected)
