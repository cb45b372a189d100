"""Operators that change tensors they are given, as libraries register them: attention's gradient into `dq`, say.

A capture has no changes. It has a call in their place that runs the operator on copies of those tensors and returns
the copies. Run in place, it changes the tensors themselves, as plain training does, where nothing else reads them.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from monetlite.core.graph import Implementation, TensorRef
from monetlite.fx.torch_internals.torch_dispatch import BASES, CHANGING, OpOverload, named_operator, run_changing
from monetlite.operators.implementations import PREFIX, TracedKernel, alternatives_for, function


def by_name(graph: fx.Graph) -> None:
    """Have such calls in a captured graph name their operator, as schedules can write it."""
    for node in graph.nodes:
        if node.target is CHANGING and isinstance(node.args[0], OpOverload):
            node.target, node.args = changed, (str(node.args[0]), *node.args[1:])


def called_operator(node: fx.Node) -> OpOverload | None:
    """The operator that a node of a captured graph runs, on copies or not; None for other functions."""
    target: Any = node.args[0] if node.target in (CHANGING, changed) else node.target
    if node.target is changed:
        target = named_operator(target)
    return target if isinstance(target, OpOverload) else None


@function("changed")
def changed(name: str, /, **arguments: Any) -> tuple[Tensor | None, ...]:
    """Run an operator on copies of the tensors that it changes.

    Args:
        name: of the operator, with its overload.
        arguments: by name, as torch's `auto_functionalized_v2` has them.

    Returns:
        Its results, and then the copies.
    """
    return run_changing(named_operator(name), arguments, in_place=False)


@function("changed_")
def changed_in_place(name: str, /, **arguments: Any) -> tuple[Tensor | None, ...]:
    """The same on the tensors themselves."""
    return run_changing(named_operator(name), arguments, in_place=True)


@alternatives_for(PREFIX + "changed")
def in_place(kernel: TracedKernel) -> Iterator[Implementation]:
    """The new contents over the old, if every tensor that the operator changes may be overwritten."""
    bases: Any = dict(kernel.call.kwargs).get(BASES, ())
    first = len(kernel.results) - len(bases)
    read = [ref.value for ref in kernel.call.tensors()]
    overwrites: list[int] = []
    for number, base in enumerate(bases):
        if not isinstance(base, TensorRef) or read.count(base.value) > 1:
            return
        overwrites += kernel.over(base, first + number)
    if overwrites and len(overwrites) == len(bases):
        yield kernel.implement("inplace", changed_in_place, overwrites=tuple(overwrites))
