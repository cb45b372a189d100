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

Where a tensor that has a gradient is changed by the program or seen by one of its outputs, more is added to that
gradient outside of the chain. Then (`Joint.at_once`) there is no chain, and the program's node runs it whole.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from monetlite.core.errors import ModelError
from monetlite.runtime.parts import Run, results_by_part, split
from monetlite.runtime.unused import Unused
from monetlite.tracing.capture import Backend, Boxed, Compiler, Joint, Partition, aot_backend, boxed, flat_outputs

_RUN = "_monetlite_run"
"""Attribute of a gradient that stands for a real one: the `Run` that makes that."""


def delivering_backend(lower: Partition, compiler: Compiler = boxed) -> Backend:
    """A backend for `torch.compile` that runs what a joint graph is lowered to, gradients delivered as marked.

    What runs of each program, or part of one, is what `compiler` makes of it.
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        deliveries: list[list[int]] = []
        unused: Unused | None = None

        def partition(joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
            nonlocal unused
            unused = Unused(joint)
            forward, backward = lower(joint)
            deliveries[:] = [] if joint.at_once else results_by_part(backward)
            return forward, backward

        def compile_backward(program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
            assert unused is not None
            if len(deliveries) < 2:
                return unused.without(compiler(program, inputs, internal))
            return _deferred(program, inputs, compiler, unused)

        run = aot_backend(partition, forward=compiler, backward=compile_backward)(graph, inputs)
        if unused is None:
            return run
        order = list(reversed(list(enumerate(deliveries)))) if len(deliveries) > 1 else []
        watched = unused

        def call(*arguments: Any) -> Any:
            outputs = run(*_through_chain(list(arguments), order))
            watched.watch(outputs)
            return outputs

        return call

    return backend


def _deferred(program: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, unused: Unused) -> Boxed:
    """A backward program that returns a stand-in for one result of each part, to be run part by part."""
    parts = split(program, inputs, compiler)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    results = flat_outputs(program)
    specs: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}
    for part in parts:
        for at in part.results[:1]:
            node = results[at]
            assert node is not None
            specs[at] = node.meta["val"].shape, node.meta["val"].dtype, node.meta["val"].device

    def call(arguments: list[Any]) -> list[torch.Tensor | None]:
        run = Run(parts, dict(zip(names, arguments, strict=True)), unused.left_out())
        arguments.clear()
        made: list[torch.Tensor | None] = [None] * len(results)
        for at, (shape, dtype, device) in specs.items():
            stand_in = torch.empty((), dtype=dtype, device=device).expand(shape)
            setattr(stand_in, _RUN, run)
            made[at] = stand_in
        return made

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
        runs = {id(run): run for item in gradients if item is not None if (run := getattr(item, _RUN, None))}
        if len(runs) != 1 or not all(hasattr(item, _RUN) for item in gradients if item is not None):
            raise ModelError(
                f"delivery {ctx.number} of the backward pass got a gradient that is not the compiled step's, so "
                "gradients would be lost. Please report this with the model; until then pass the model copies of "
                "the tensors that it changes or returns, or return copies of them (.clone())"
            )
        (run,) = runs.values()
        return None, None, *run.part(ctx.number)


__all__ = ["delivering_backend"]
