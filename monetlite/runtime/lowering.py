"""A schedule as two straight-line programs, forward and backward, that AOTAutograd runs as its partition.

Each step of the schedule becomes one call; views are rebuilt right before the step that reads them. Values of the
forward program that the backward program reads are saved for it. Generated code drops every name after its last
use, so a value is freed exactly where `simulate` says that it dies.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from monetlite.core.graph import LOSS, Argument, Call, TensorRef
from monetlite.core.steps import Step, border
from monetlite.fx import storages
from monetlite.fx.call_encoding import decode_argument
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import is_tangent
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_symbols import computed
from monetlite.fx.varying_sizes import Size, input_sizes
from monetlite.operators import resolve, returns_tensor
from monetlite.operators.batch_norm import reading_the_batch
from monetlite.operators.implementations import name_of
from monetlite.operators.normalization import is_invertible, require_invertible
from monetlite.operators.program_calls import deliver, prepared
from monetlite.operators.region_compiler import compile_ahead
from monetlite.tracing.operator_graph import Traced

_DELIVER = name_of(deliver)
CAPTURED = "monetlite_captured"
"""Key of a node's `meta`: the name of the tensor of the joint graph that the node stands for."""
RUN = "monetlite_run"
"""Key of a node's `meta`: the `OperatorRun` that the node is."""
WRITTEN_OVER = "monetlite_written_over"
"""Key of a placeholder's `meta`: there if a call of the program takes its memory for a result."""
UPDATES = "monetlite_updates"
"""Key of a forward output's `meta`: the input's name, by the position of the result with its new contents."""


@dataclass(frozen=True, kw_only=True)
class OperatorRun:
    """A call of a program: the step that it runs, how often the operator has run before, and what it overwrites."""

    call: Call
    step: Step
    number: int
    overwrites: tuple[int, ...]


def lower(traced: Traced, steps: Sequence[Step]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Lower a legal sequence of steps to (forward, backward) programs.

    The forward program takes the joint graph's primals and returns the forward results and then the saved
    tensors; the backward program takes the saved tensors and the tangents and returns the gradients. This is
    AOTAutograd's convention for a partition. Where sizes vary, those of the inputs come first in the backward
    program, too.
    """
    joint = traced.joint.graph
    reach = storages.Reachability(joint.graph, traced.joint.forward_outputs)
    outputs: Any = joint.graph.output_node().args[0]
    results, gradients = outputs[: traced.joint.forward_outputs], reach.output[traced.joint.forward_outputs :]
    tangents = list(filter(is_tangent, joint.graph.nodes))
    forward_runs, backward_runs = _runs(traced, steps)
    primals_of: dict[str, list[fx.Node]] = {}
    for node, primal in reach.gradients:
        primals_of.setdefault(node.name, []).append(primal)

    compile_ahead(run.call.target for run in (*forward_runs, *backward_runs))
    backward_runs = _delivered_when_final(joint, backward_runs, primals_of)
    sizes = list(input_sizes(joint.graph).values())
    there = [*sizes, *tangents]
    saved = _read_before_written(joint, (run.call for run in backward_runs), gradients, there)

    backward = ProgramBuilder(joint, [*sizes, *saved, *tangents])
    backward.run(backward_runs)
    forward = ProgramBuilder(joint, reach.primals)
    chosen = ((traced.graph.operators[index], choice) for index, choice in steps)
    forward.require({item.name: guard for item, choice in chosen if (guard := item.implementations[choice].guard)})
    forward.run(forward_runs)
    forward_program, backward_program = forward.finish([*results, *saved]), backward.finish(gradients)
    if reach.takes_arguments:
        updates = {at: node.name for at, node in reach.updates.items()}
        forward_program.graph.output_node().meta[UPDATES] = updates
    return forward_program, backward_program


def _runs(traced: Traced, steps: Sequence[Step]) -> tuple[list[OperatorRun], list[OperatorRun]]:
    """The calls of the forward and of the backward part of a sequence of steps."""
    parts: tuple[list[OperatorRun], list[OperatorRun]] = ([], [])
    split = border(traced.graph, steps)
    ran: Counter[int] = Counter()
    for at, (index, choice) in enumerate(steps):
        traced_operator = traced.graph.operators[index]
        if traced_operator.family != LOSS:
            implementation = traced_operator.implementations[choice]
            call = implementation.again if index in ran and implementation.again else implementation.call
            assert call is not None, f"{traced_operator.name} can't be executed: it has no call"
            run = OperatorRun(
                call=reading_the_batch(call),
                step=(index, choice),
                number=ran[index],
                overwrites=implementation.overwrites,
            )
            parts[at >= split].append(run)
        ran[index] += 1
    return parts


def _delivered_when_final(
    joint: fx.GraphModule, runs: Sequence[OperatorRun], primals_of: Mapping[str, Sequence[fx.Node]]
) -> list[OperatorRun]:
    """The same runs, each gradient delivered after the last call that reads its primal.

    Once its gradient is delivered, a parameter may change: an optimizer may step, its shards may be freed.
    """
    nodes = {node.name: node for node in joint.graph.nodes}
    last_read: dict[fx.Node, int] = {}
    for at, run in enumerate(runs):
        if run.call.target != _DELIVER:
            last_read.update((storages.base(nodes[ref.node]), at) for ref in run.call.tensors())
    waiting: list[Argument] = []
    changed: list[OperatorRun] = []
    for at, run in enumerate(runs):
        if run.call.target != _DELIVER:
            changed.append(run)
            continue
        waiting += run.call.args
        ready = [
            ref
            for ref in waiting
            if isinstance(ref, TensorRef) and all(last_read.get(primal, -1) < at for primal in primals_of[ref.node])
        ]
        waiting = [ref for ref in waiting if ref not in ready]
        if ready:
            changed.append(replace(run, call=replace(run.call, args=tuple(ready))))
    return changed


def _read_before_written(
    joint: fx.GraphModule, calls: Iterable[Call], outputs: Iterable[fx.Node | None], given: Iterable[fx.Node]
) -> list[fx.Node]:
    """Base tensors that calls and outputs need and that neither a call nor `given` provides, in order."""
    nodes = {node.name: node for node in joint.graph.nodes}
    there = set(given)
    needed: dict[fx.Node, None] = {}

    def read(node: fx.Node) -> None:
        source = storages.base(node)
        if source not in there and source.op != "get_attr":
            needed[source] = None

    for call in calls:
        for ref in call.tensors():
            read(nodes[ref.node])
        there.update(nodes[name] for name in call.outputs if name is not None)
    for node in outputs:
        if node is not None:
            read(node)
    return list(needed)


class ProgramBuilder:
    """A straight-line program under construction, over the tensors of a joint graph."""

    def __init__(self, joint: fx.GraphModule, inputs: Iterable[fx.Node]) -> None:
        self._joint = joint
        self._nodes = {node.name: node for node in joint.graph.nodes}
        self._graph = fx.Graph()
        self._bases: dict[fx.Node, fx.Node] = {}
        """The present version, in this program, of each base tensor of the joint graph."""
        self._views: dict[fx.Node, fx.Node] = {}
        self._views_of: dict[fx.Node, list[fx.Node]] = {}
        """The views of each base tensor that there are at present."""
        self._sizes: dict[sympy.Expr, fx.Node] = {}
        for node in inputs:
            self._bases[node] = _described(self._graph.placeholder(node.name), node)
        self._symbols = {
            symbol: self._bases[node] for symbol, node in input_sizes(joint.graph).items() if node in self._bases
        }

    def require(self, guards: Mapping[str, Call]) -> None:
        """Append the check that guards, by operator, hold. All are of normalisations, and checked together."""
        if guards:
            assert {guard.target for guard in guards.values()} == {name_of(is_invertible)}
            weights, biases = zip(*(self._arguments(guard.args) for guard in guards.values()), strict=True)
            self._graph.call_function(require_invertible, (list(guards), list(weights), list(biases)))

    def _call(self, call: Call) -> fx.Node:
        arguments = self._arguments(call.args)
        keywords = dict(zip(dict(call.kwargs), self._arguments(tuple(dict(call.kwargs).values())), strict=True))
        return self._graph.call_function(prepared(call.target, resolve(call.target)), arguments, keywords)

    def _arguments(self, given: tuple[Argument, ...]) -> tuple[Any, ...]:
        return tuple(self._with_sizes(decode_argument(given, lambda ref: self._tensor(self._nodes[ref.node]))))

    def _with_sizes(self, given: Any) -> Any:
        """The same arguments, with nodes in place of sizes that vary."""
        return pytree.tree_map_only(Size, self._size, given)

    def _size(self, size: Size) -> fx.Node:
        if size.expression not in self._sizes:
            node = computed(size.expression, self._symbols)
            node.meta["val"] = size
            self._sizes[size.expression] = node
        return self._sizes[size.expression]

    def run(self, runs: Iterable[OperatorRun]) -> None:
        """Append calls, binding their results."""
        for run in runs:
            call = run.call
            result = self._call(call)
            result.meta[RUN] = run
            for ref in call.tensors():
                if ref.value in run.overwrites:
                    self._bases[storages.base(self._nodes[ref.node])].meta[WRITTEN_OVER] = True
            captured = [None if name is None else self._nodes[name] for name in call.outputs]
            if returns_tensor(call):
                (node,) = captured
                assert node is not None
                self._bind(node, result)
                continue
            for position, node in enumerate(captured):
                if node is not None:
                    self._bind(node, self._graph.call_function(operator.getitem, (result, position)))

    def finish(self, outputs: Iterable[fx.Node | int | None]) -> fx.GraphModule:
        """Close the program with its outputs, sizes among them."""
        made = (self._tensor(item) if isinstance(item, fx.Node) else self._with_sizes(item) for item in outputs)
        self._graph.output(tuple(made))
        self._graph.lint()
        return graph_module(self._joint, self._graph)

    def _bind(self, node: fx.Node, created: fx.Node) -> None:
        self._bases[node] = _described(created, node)
        for view in self._views_of.pop(node, ()):
            del self._views[view]

    def _tensor(self, node: fx.Node) -> fx.Node:
        """The present version of a tensor (or of a list of views), with the views that lead to it."""
        if node in self._bases:
            return self._bases[node]
        if node in self._views:
            return self._views[node]
        target: Any = node.target
        if node.op == "get_attr":
            created = self._graph.get_attr(target)
        else:
            assert storages.is_view(node) or storages.is_item(node), f"{node.name} is read before it is computed"
            arguments = self._with_sizes(fx.map_arg(node.args, self._tensor))
            keywords = self._with_sizes(fx.map_arg(node.kwargs, self._tensor))
            created = self._graph.call_function(target, arguments, keywords)
        self._views[node] = _described(created, node)
        self._views_of.setdefault(storages.base(node), []).append(node)
        return created


def _described(created: fx.Node, node: fx.Node) -> fx.Node:
    """A new node with the captured one's name and its fake tensor, which AOTAutograd reads."""
    created.meta[CAPTURED] = node.name
    if isinstance(node.meta.get("val"), (torch.Tensor, Size)):
        created.meta["val"] = node.meta["val"]
    return created
