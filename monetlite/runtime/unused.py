"""Outputs that get no gradient: what leads to them alone gets none either, as in plain training.

For an output that the loss does not depend on, autograd hands a program's node zeros. A gradient computed from
zeros alone is not None but zero, and an optimizer moves that parameter by its momentum and its weight decay. Here
a hook on the node sees which gradients are there, right before the node runs, on the thread that runs it.
"""

import threading
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    MetadataMutationAOTOutput,
    PlainAOTOutput,
    TangentAOTInput,
)

from monetlite.core.errors import ModelError
from monetlite.fx.storages import is_tangent
from monetlite.tracing.capture import Boxed, Joint

_RETURNED = (InputMutationAOTOutput, MetadataMutationAOTOutput, PlainAOTOutput, IntermediateBaseAOTOutput)
"""What AOTAutograd's node returns of a forward program's results."""
_NODE = "CompiledFunctionBackward"

_thread = threading.local()


class Unused:
    """Which gradients a backward program leaves out, from those of the outputs that came in.

    Args:
        joint: as it was captured.
    """

    def __init__(self, joint: Joint) -> None:
        graph = joint.graph.graph
        output = graph.output_node()
        inputs = [node for node in graph.nodes if is_tangent(node)]
        self._outputs = [
            node.meta["desc"].output for node in inputs if isinstance(node.meta["desc"], TangentAOTInput)
        ]
        returned = [item for item in output.meta["desc"][: joint.forward_outputs] if isinstance(item, _RETURNED)]
        self._returned = len(returned)
        self._positions = [returned.index(item) for item in self._outputs if item in returned]
        self._there = len(inputs) > 1 and len(self._positions) == len(inputs)
        self._reached = _reached(graph, inputs)[joint.forward_outputs :]

    def watch(self, outputs: Sequence[Any]) -> None:
        """Have the node that made these outputs say which gradients it gets."""
        node = self._node(outputs) if self._there else None
        if node is not None:
            node.register_prehook(self._note)

    def _node(self, outputs: Sequence[Any]) -> Any:
        """AOTAutograd's node behind an output, or behind what an output is a view of."""
        for item in self._outputs:
            output = item.base_of if isinstance(item, IntermediateBaseAOTOutput) else item
            if isinstance(output, PlainAOTOutput):
                node = outputs[output.idx].grad_fn
                while node is not None and type(node).__name__ != _NODE:
                    node = node.next_functions[0][0] if node.next_functions else None
                return node
        return None

    def _note(self, gradients: Sequence[Any]) -> None:
        if len(gradients) != self._returned:
            raise ModelError(
                f"the compiled step got gradients of {len(gradients)} outputs and has {self._returned}, so those "
                "that the loss does not use can't be told; please report this with the model and torch's version"
            )
        given = [number for number, at in enumerate(self._positions) if gradients[at] is not None]
        _thread.noted = (self, reduce(or_, (1 << number for number in given), 0))

    def left_out(self) -> frozenset[int]:
        """Of the gradients that the program about to run returns, those that no gradient which came in reaches."""
        noted, _thread.noted = getattr(_thread, "noted", None), None
        if noted is None or noted[0] is not self:
            return frozenset()
        given = noted[1]
        return frozenset(at for at, reached in enumerate(self._reached) if reached and not reached & given)

    def without(self, run: Boxed) -> Boxed:
        """A backward program without the gradients that are left out."""
        if not self._there:
            return run

        def call(arguments: list[Any]) -> list[Any]:
            left_out = self.left_out()
            return [None if at in left_out else result for at, result in enumerate(run(arguments))]

        call.__dict__["_boxed_call"] = True
        return call


def _reached(graph: fx.Graph, tangents: Sequence[fx.Node]) -> list[int]:
    """For each result, a bit for each of the gradients coming in that it depends on."""
    bits = {node: 1 << number for number, node in enumerate(tangents)}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            bits[node] = reduce(or_, (bits.get(read, 0) for read in node.all_input_nodes), 0)
    results: Any = graph.output_node().args[0]
    return [bits.get(item, 0) if isinstance(item, fx.Node) else 0 for item in results]
