"""Backward programs that run more than once on the tensors that a forward pass saved.

A program may write over a saved tensor that it reads no more. Where it may run again (`retain_graph=True`), it
writes over a copy.

Gradients in a batch (`is_grads_batched=True`, `jacobian(vectorize=True)`) take a run each. PyTorch passes a batch
off as one gradient, and runs each operator on all of it. A program has calls that can't run so: those that write
over a tensor or draw numbers, kernels of monetlite and compiled regions.
"""

from collections.abc import Collection, Sequence
from typing import Any

from monetlite.fx.torch_internals.torch_aot import may_come_again
from monetlite.fx.torch_internals.torch_dispatch import batch_of, gradients_of, is_batch_of, without_batches
from monetlite.runtime.backward_parts import RUN
from monetlite.tracing.capture import Boxed


def run_backward(program: Boxed, arguments: list[Any], gradients: int, written_over: Collection[int]) -> Any:
    """Run a backward program, once for each gradient of a batch.

    Args:
        arguments: of the program, which ends by that many gradients.
        written_over: positions of those that the program writes over.

    Returns:
        its results, which are batches if a gradient is one.
    """
    if not any(map(is_batch_of, arguments[len(arguments) - gradients :])):
        if may_come_again():
            for at in written_over:
                arguments[at] = arguments[at].clone()
        return program(arguments)
    saved, batches = list(arguments), [gradients_of(item) if is_batch_of(item) else None for item in arguments]
    arguments.clear()

    def given(number: int) -> list[Any]:
        items = [item if batch is None else batch[number] for item, batch in zip(saved, batches, strict=True)]
        return [item.clone() if at in written_over else item for at, item in enumerate(items)]

    size = max(len(batch) for batch in batches if batch is not None)
    with without_batches():
        each = [program(given(number)) for number in range(size)]
    return [_together(results) for results in zip(*each, strict=True)]


def _together(results: Sequence[Any]) -> Any:
    """The results of all runs as one: a batch, or a stand-in for what parts of the program deliver later."""
    first = results[0]
    if first is None:
        return None
    if not hasattr(first, RUN):
        return batch_of(results)
    parts = [getattr(item, RUN) for item in results]

    def run(number: int) -> list[Any]:
        with without_batches():
            return [_together(made) for made in zip(*(part(number) for part in parts), strict=True)]

    setattr(first, RUN, run)
    return first
