"""Gradients handed to autograd as they become ready, instead of all at the end of the backward program.

AOTAutograd runs a backward program as one autograd node, so every gradient would be in memory before the first
is accumulated, and DistributedDataParallel could reduce none while others are computed. Here the parameters pass
through a chain of autograd nodes on their way into the program, one for each delivery:

    parameters ─→ deliver 3 ─→ deliver 2 ─→ deliver 1 ─→ program ─→ outputs
                     └─ parameters of 3 ──────────────────↗

Going backward, autograd first reaches the program's node, which runs nothing yet and returns gradients without
memory that stand for the real ones; then the nodes of the chain in order, each of which runs one part of the
program and returns the gradients that part makes. After each, autograd does what it always does with a gradient
that is ready: hooks, accumulation, reduction.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from monetlite.runtime.parts import Run, results_by_part, split
from monetlite.tracing.capture import Backend, Boxed, Compiler, Joint, Partition, aot_backend, boxed, flat_outputs

_RUN = "_monetlite_run"
"""Attribute of a gradient that stands for a real one: the `Run` that makes that."""


def delivering_backend(lower: Partition, compiler: Compiler = boxed) -> Backend:
    """A backend for `torch.compile` that runs what a joint graph is lowered to, gradients delivered as marked.

    What runs of each program, or part of one, is what `compiler` makes of it.
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        deliveries: list[list[int]] = []

        def partition(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
            forward, backward = lower(joint)
            deliveries[:] = results_by_part(backward)
            return forward, backward

        run = aot_backend(partition, forward=compiler, backward=partial(deferred, compiler=compiler))(graph, inputs)
        if len(deliveries) < 2:
            return run
        order = list(reversed(list(enumerate(deliveries))))

        def call(*arguments: Any) -> Any:
            return run(*_through_chain(list(arguments), order))

        return call

    return backend


def deferred(
    program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int] = (), *, compiler: Compiler = boxed
) -> Boxed:
    """A backward program that returns stand-ins for its results, to be run part by part."""
    if len(results_by_part(program)) < 2:
        return compiler(program, inputs, internal)
    parts = split(program, inputs, compiler)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    specs = [
        (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else None
        for value in (None if item is None else item.meta["val"] for item in flat_outputs(program))
    ]

    def call(arguments: list[Any]) -> list[torch.Tensor | None]:
        run = Run(parts, dict(zip(names, arguments, strict=True)))
        arguments.clear()
        scalars: dict[tuple[Any, Any], torch.Tensor] = {}
        results: list[torch.Tensor | None] = []
        for spec in specs:
            if spec is None:
                results.append(None)
                continue
            shape, dtype, device = spec
            scalar = scalars.get((dtype, device))
            if scalar is None:
                scalar = scalars[dtype, device] = torch.empty((), dtype=dtype, device=device)
            result = scalar.expand(shape)
            setattr(result, _RUN, run)
            results.append(result)
        return results

    call.__dict__["_boxed_call"] = True
    return call


def _through_chain(arguments: list[Any], order: Sequence[tuple[int, Sequence[int]]]) -> list[Any]:
    """The arguments of a program, those that get a gradient having passed through the chain."""
    token = torch.empty(0)
    for number, positions in order:
        token, *passed = _Deliver.apply(number, token, *[arguments[position] for position in positions])  # type: ignore[no-untyped-call]  # torch has no types for it
        for position, tensor in zip(positions, passed, strict=True):
            arguments[position] = tensor
    return arguments


class _Deliver(torch.autograd.Function):
    """Nothing, going forward; one part of a backward program, going backward.

    The token orders the chain: each node's comes from the node that runs after it.
    """

    @staticmethod
    def forward(ctx: Any, number: int, token: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.number = number
        ctx.set_materialize_grads(False)
        return token.detach(), *(tensor.detach() for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        run: Run = next(getattr(gradient, _RUN) for gradient in gradients if gradient is not None)
        return None, None, *run.part(ctx.number)


__all__ = ["deferred", "delivering_backend"]
