"""Whole numbers that a model counts with, and that no tensor depends on, taken out of its graph.

Code such as `self.steps += 1` in a forward pass reads a number and changes it. Taken as a constant, each of its
values would be captured by itself. So it is a symbol, and what is computed of it is computed beside the step.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_symbols import expression

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def without_counters(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    compiled: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """A captured graph as a function, of which all but its counters is compiled.

    Args:
        graph: as TorchDynamo captures it. It is not changed.
        inputs: that it is captured with.
        compiled: makes a function of a graph and its inputs.

    Raises:
        TraceError: a tensor depends on a number that is the size of no input.
    """
    given = graph.graph.find_nodes(op="placeholder")
    counters = _counters(given)
    if not counters:
        return compiled(graph, inputs)
    counting = _computed_from(graph, counters)
    results: Any = graph.graph.output_node().args[0]
    counted = [at for at, item in enumerate(results) if item in counting]
    rest = [at for at in range(len(results)) if at not in counted]
    run = compiled(
        _part(graph, [node for node in graph.graph.nodes if node not in counting], [results[at] for at in rest]),
        [item for node, item in zip(given, inputs, strict=True) if node not in counting],
    )
    needed = _needed_by(graph, [results[at] for at in counted])
    count = _part(graph, needed, [results[at] for at in counted])
    of_run = [node not in counting for node in given]
    of_count = [node in needed for node in given]

    def both(*arguments: Any) -> list[Any]:
        numbers = count(*itertools.compress(arguments, of_count))
        others = run(*itertools.compress(arguments, of_run))
        found = dict(zip(counted, numbers, strict=True)) | dict(zip(rest, others, strict=True))
        return [found[at] for at in range(len(results))]

    return both


def _counters(given: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs that are numbers, and the size of no tensor among the inputs."""
    values = [node.meta.get("example_value") for node in given]
    sizes = {
        symbol
        for value in values
        if isinstance(value, torch.Tensor)
        for size in (*value.shape, *value.stride())
        if isinstance(size, torch.SymInt)
        for symbol in expression(size).free_symbols
    }
    return [
        node
        for node, value in zip(given, values, strict=True)
        if isinstance(value, torch.SymInt) and not expression(value).free_symbols & sizes
    ]


def _computed_from(graph: fx.GraphModule, counters: Sequence[fx.Node]) -> set[fx.Node]:
    """Counters, and the numbers that are computed of them."""
    found = set(counters)
    for node in graph.graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            if not all(
                isinstance(item.meta.get("example_value"), _SYMBOLIC) for item in (node, *node.all_input_nodes)
            ):
                raise TraceError(f"{node.name} depends on a number that varies")
            found.add(node)
    return found


def _needed_by(graph: fx.GraphModule, results: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that results are computed of, and themselves, in the order of the graph."""
    found = set(results)
    for node in reversed(graph.graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return [node for node in graph.graph.nodes if node in found]


def _part(graph: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[Any]) -> fx.GraphModule:
    made, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node.op != "output":
            copied[node] = made.node_copy(node, copied.__getitem__)
    made.output(tuple(copied[item] if isinstance(item, fx.Node) else item for item in results))
    return graph_module(graph, made)
