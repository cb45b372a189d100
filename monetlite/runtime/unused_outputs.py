"""Outputs of a step that the loss does not use: parameters that lead to them alone get no gradient.

So it is in plain training. Autograd hands the program's node zeros for such an output, and a gradient computed from
zeros is not None but zero: an optimizer would move that parameter by its momentum and its weight decay. A hook on
the node sees which gradients came in, right before the node runs, on the thread that runs it.

What the program computes from such zeros alone is NaN where a derivative is infinite (a square root of 0). Before
that is added to what other outputs lead to, NaN is set to zero in it. All else stays: a person's own function may
make anything of a gradient of zeros.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect

from monetlite.core.errors import ModelError
from monetlite.fx.storages import is_view
from monetlite.fx.torch_internals.torch_aot import backward_node, boxed_function, descriptors, is_tangent
from monetlite.runtime.lowering import CAPTURED
from monetlite.tracing.capture import Boxed, Joint, flat_outputs

_RETURNED = (
    descriptors.InputMutationAOTOutput,
    descriptors.MetadataMutationAOTOutput,
    descriptors.PlainAOTOutput,
    descriptors.IntermediateBaseAOTOutput,
)
"""Kinds of forward results that AOTAutograd's node returns."""

_thread = threading.local()


def no_nan_unless_given(tensor: torch.Tensor, gradients: int) -> None:
    """Set NaN to zero, in a backward program, in what is made of gradients (a bit for each) that didn't come in."""
    given: int | None = _thread.given
    if given is not None and not given & gradients:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        real.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)


has_side_effect(no_nan_unless_given)


class UnusedOutputs:
    """The outputs of a step that the loss does not use, and the gradients that only they reach.

    Attributes:
        returned: what AOTAutograd says of each result of the forward program that its node returns.
    """

    def __init__(self, joint: Joint) -> None:
        graph = joint.graph.graph
        tangents = [node for node in graph.nodes if is_tangent(node)]
        descriptions = [node.meta["desc"] for node in tangents]
        self._outputs = [item.output for item in descriptions if isinstance(item, descriptors.TangentAOTInput)]
        described = graph.output_node().meta["desc"][: joint.forward_outputs]
        self.returned = [item for item in described if isinstance(item, _RETURNED)]
        self._positions = [self.returned.index(item) for item in self._outputs if item in self.returned]
        self._several = len(tangents) > 1 and len(self._positions) == len(tangents)
        self._bits = _bits(graph, tangents)
        gradients = flat_outputs(joint.graph)[joint.forward_outputs :]
        self._reached = [0 if item is None else self._bits[item.name] for item in gradients]

    def watch(self, outputs: Sequence[Any]) -> Any:
        """Have the node that made these outputs note which gradients it gets; returns the node, if there is one."""
        node = self._node(outputs)
        if node is not None and self._several:
            node.register_prehook(self._note)
        return node

    def _node(self, outputs: Sequence[Any]) -> Any:
        """AOTAutograd's node behind an output, or behind the tensor that an output is a view of."""
        for item in self._outputs:
            output = item.base_of if isinstance(item, descriptors.IntermediateBaseAOTOutput) else item
            if isinstance(output, descriptors.PlainAOTOutput):
                return backward_node(outputs[output.idx])
        return None

    def _note(self, gradients: Sequence[Any]) -> None:
        if len(gradients) != len(self.returned):
            raise ModelError(
                f"the compiled step got gradients of {len(gradients)} outputs and has {len(self.returned)}, so "
                "those that the loss does not use can't be told; please report this with the model and with "
                "torch's version"
            )
        given = (1 << number for number, at in enumerate(self._positions) if gradients[at] is not None)
        _thread.noted = (self, reduce(or_, given, 0))

    def given(self) -> int | None:
        """Bits of the gradients that came in for the program about to run; None if that is not known.

        They stay noted, as a program runs more than once for gradients in a batch.
        """
        noted = getattr(_thread, "noted", None)
        return None if noted is None or noted[0] is not self else int(noted[1])

    def left_out(self, given: int | None) -> frozenset[int]:
        """Positions of a program's gradients that none of those given reaches."""
        if given is None:
            return frozenset()
        return frozenset(at for at, reached in enumerate(self._reached) if reached and not reached & given)

    def without_nan(self, program: fx.GraphModule) -> None:
        """Have a backward program, to be run by `run`, add no NaN that it computes from zeros alone."""
        if not self._several:
            return
        for node in list(program.graph.nodes):
            own = self._bits.get(node.meta.get(CAPTURED, ""), 0)
            if not own or node.op == "placeholder" or is_view(node):
                continue
            if any(_bits_of(reader, self._bits) not in (0, own) for reader in _readers(node)):
                with program.graph.inserting_after(node):
                    program.graph.call_function(no_nan_unless_given, (node, own))

    def run(self, program: Boxed, arguments: list[Any], given: int | None) -> Any:
        """Run a backward program or a part of it, for the gradients that came in."""
        before, _thread.given = getattr(_thread, "given", None), given
        try:
            return program(arguments)
        finally:
            _thread.given = before

    def without(self, run: Boxed) -> Boxed:
        """A backward program without the gradients that are left out."""
        if not self._several:
            return run

        def call(arguments: list[Any]) -> list[Any]:
            given = self.given()
            left_out = self.left_out(given)
            results = self.run(run, arguments, given)
            return [None if at in left_out else result for at, result in enumerate(results)]

        return boxed_function(call)


def _bits(graph: fx.Graph, tangents: Sequence[fx.Node]) -> dict[str, int]:
    """For each node, by name, a bit for each incoming gradient that it depends on."""
    bits = {node.name: 0 for node in graph.nodes}
    bits.update({node.name: 1 << number for number, node in enumerate(tangents)})
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            bits[node.name] = reduce(or_, (bits[read.name] for read in node.all_input_nodes), 0)
    return bits


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Calls that read a tensor, or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _bits_of(call: fx.Node, bits: Mapping[str, int]) -> int:
    """The incoming gradients that a call's results depend on, as the joint graph has them."""
    made = [call] if CAPTURED in call.meta else list(call.users)
    return reduce(or_, (bits.get(item.meta.get(CAPTURED, ""), 0) for item in made), 0)
