"""Gradients in a batch (`is_grads_batched=True`, `jacobian(vectorize=True)`): a backward program runs for each.

PyTorch passes a batch off as one gradient and runs each operator on all of it. A plan has calls that can't run so:
those that write over a tensor or draw numbers, kernels of monetlite and compiled regions. One after another, the
runs take the memory that was planned; gradients for all of the batch come on top.
"""

from collections.abc import Sequence
from typing import Any

from monetlite.fx.torch_internals.torch_dispatch import batch_of, gradients_of, is_batch_of, without_batches
from monetlite.runtime.backward_parts import RUN
from monetlite.tracing.capture import Boxed


def run_for_each(program: Boxed, arguments: list[Any], gradients: int) -> Any:
    """Run a backward program, whose last arguments are gradients; if one is a batch, results are batches."""
    if not any(map(is_batch_of, arguments[len(arguments) - gradients :])):
        return program(arguments)
    batches = [gradients_of(item) if is_batch_of(item) else None for item in arguments]
    runs = [
        [item if batch is None else batch[number] for item, batch in zip(arguments, batches, strict=True)]
        for number in range(max(len(batch) for batch in batches if batch is not None))
    ]
    arguments.clear()
    with without_batches():
        return [_together(results) for results in zip(*map(program, runs), strict=True)]


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
