"""A captured graph whose inputs vary in size, as operator graphs at several sizes."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch

from monetlite.core.errors import TraceError
from monetlite.core.graph import AS_TRACED, OperatorGraph
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.fx.torch_internals.torch_symbols import captured_number, expression, largest
from monetlite.fx.varying_sizes import agreeing, graph_at, input_sizes
from monetlite.tracing.capture import Joint
from monetlite.tracing.operator_graph import Traced

Limits: TypeAlias = tuple[int, ...]
"""Sizes of the inputs that vary, in the order of the captured graph's inputs."""


class SizedGraphs:
    """The operator graphs of a captured graph at sizes of its inputs.

    Args:
        joint: as captured. It is not changed.
        build: makes the operator graph of a joint graph at some sizes, in a layout.

    Attributes:
        captured: the sizes of the captured call.
        most: the largest for which the capture holds; None without a limit.

    Raises:
        TraceError: it can't be planned for several sizes.
    """

    def __init__(self, joint: Joint, build: Callable[[Joint, Limits, str], Traced]) -> None:
        self.joint, self._build = joint, build
        if not Reachability(joint.graph.graph, joint.forward_outputs).takes_arguments:
            raise TraceError("inputs that share memory are changed")
        symbols = input_sizes(joint.graph.graph)
        sizes = [node.meta["val"] for node in symbols.values()]
        self._symbols = list(symbols)
        self.captured: Limits = tuple(captured_number(size) or 0 for size in sizes)
        self.most = [largest(size) for size in sizes]
        self._graphs: dict[tuple[Limits, str], OperatorGraph] = {}

    def symbol_of(self, size: torch.SymInt | int) -> int | None:
        """The place of a captured size among those that vary; None if it is not one of them."""
        found = expression(size) if isinstance(size, torch.SymInt) else None
        return self._symbols.index(found) if found in self._symbols else None

    def traced_at(self, sizes: Limits, layout: str = AS_TRACED) -> Traced:
        """The graph at these sizes, with implementations that serve others, too.

        Raises:
            TraceError: it has other operators there.
        """
        traced = self._traced(sizes, layout)
        known = (of for (at, name), of in self._graphs.items() if name == layout and at != sizes)
        if (reference := next(known, None)) is None:
            other = tuple(size - 1 if size > 2 else size + 1 for size in sizes)
            reference = self.graph_at(other if self.captured == sizes else self.captured, layout)
        return replace(traced, graph=agreeing(traced.graph, reference))

    def graph_at(self, sizes: Limits, layout: str = AS_TRACED) -> OperatorGraph:
        """The operator graph at these sizes, with all implementations that it has there."""
        if (sizes, layout) not in self._graphs:
            self._graphs[sizes, layout] = self._traced(sizes, layout).graph
        return self._graphs[sizes, layout]

    def _traced(self, sizes: Limits, layout: str) -> Traced:
        with without_modes():  # of the capture, whose tensors have other sizes
            graph = graph_at(self.joint.graph, dict(zip(self._symbols, sizes, strict=True)))
            return self._build(replace(self.joint, graph=graph), sizes, layout)
