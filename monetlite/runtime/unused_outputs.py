"""Outputs of a step that the loss does not use: parameters that lead to them alone get no gradient.

So it is in plain training. Autograd hands the program's node zeros for such an output, and a gradient computed from
zeros is not None but zero: an optimizer would move that parameter by its momentum and its weight decay. A hook on
the node sees which gradients came in, right before the node runs, on the thread that runs it.
"""

import threading
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

from torch import fx

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals.torch_aot import backward_node, boxed_function, descriptors, is_tangent
from monetlite.tracing.capture import Boxed, Joint

_RETURNED = (
    descriptors.InputMutationAOTOutput,
    descriptors.MetadataMutationAOTOutput,
    descriptors.PlainAOTOutput,
    descriptors.IntermediateBaseAOTOutput,
)
"""Kinds of forward results that AOTAutograd's node returns."""

_thread = threading.local()


class UnusedOutputs:
    """The outputs of a step that the loss does not use, and the gradients that only they reach."""

    def __init__(self, joint: Joint) -> None:
        graph = joint.graph.graph
        output = graph.output_node()
        tangents = [node for node in graph.nodes if is_tangent(node)]
        descriptions = [node.meta["desc"] for node in tangents]
        self._outputs = [item.output for item in descriptions if isinstance(item, descriptors.TangentAOTInput)]
        returned = [item for item in output.meta["desc"][: joint.forward_outputs] if isinstance(item, _RETURNED)]
        self._returned = len(returned)
        self._positions = [returned.index(item) for item in self._outputs if item in returned]
        self._several = len(tangents) > 1 and len(self._positions) == len(tangents)
        self._reached = _reached(graph, tangents)[joint.forward_outputs :]

    def watch(self, outputs: Sequence[Any]) -> None:
        """Have the node that made these outputs note which gradients it gets."""
        node = self._node(outputs) if self._several else None
        if node is not None:
            node.register_prehook(self._note)

    def _node(self, outputs: Sequence[Any]) -> Any:
        """AOTAutograd's node behind an output, or behind the tensor that an output is a view of."""
        for item in self._outputs:
            output = item.base_of if isinstance(item, descriptors.IntermediateBaseAOTOutput) else item
            if isinstance(output, descriptors.PlainAOTOutput):
                return backward_node(outputs[output.idx])
        return None

    def _note(self, gradients: Sequence[Any]) -> None:
        if len(gradients) != self._returned:
            raise ModelError(
                f"the compiled step got gradients of {len(gradients)} outputs and has {self._returned}, so those "
                "that the loss does not use can't be told; please report this with the model and torch's version"
            )
        given = (1 << number for number, at in enumerate(self._positions) if gradients[at] is not None)
        _thread.noted = (self, reduce(or_, given, 0))

    def left_out(self) -> frozenset[int]:
        """Positions of the gradients, of the program about to run, that no incoming gradient reaches."""
        noted, _thread.noted = getattr(_thread, "noted", None), None
        if noted is None or noted[0] is not self:
            return frozenset()
        given = noted[1]
        return frozenset(at for at, reached in enumerate(self._reached) if reached and not reached & given)

    def without(self, run: Boxed) -> Boxed:
        """A backward program without the gradients that are left out."""
        if not self._several:
            return run

        def call(arguments: list[Any]) -> list[Any]:
            left_out = self.left_out()
            return [None if at in left_out else result for at, result in enumerate(run(arguments))]

        return boxed_function(call)


def _reached(graph: fx.Graph, tangents: Sequence[fx.Node]) -> list[int]:
    """For each result, a bit for each incoming gradient that it depends on."""
    bits = {node: 1 << number for number, node in enumerate(tangents)}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            bits[node] = reduce(or_, (bits.get(read, 0) for read in node.all_input_nodes), 0)
    results: Any = graph.output_node().args[0]
    return [bits.get(item, 0) if isinstance(item, fx.Node) else 0 for item in results]
