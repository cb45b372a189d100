"""Joint graphs as AOTAutograd makes them, made ready to be planned, or refused."""

from typing import Any

import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.fx.storages import base
from monetlite.tracing.names import source_of


def prepare(graph: fx.Graph, forward_outputs: int) -> None:
    """Change a joint graph so that it can be planned.

    Raises:
        TraceError: it can't be.
    """
    _refuse_checks(graph)
    _refuse_late_changes(graph)
    _conjugate_constants(graph)
    _copy_shared_gradients(graph, forward_outputs)


def _refuse_checks(graph: fx.Graph) -> None:
    """Refuse operators that AOTAutograd orders by tokens: those that look at what they found and raise.

    Raises:
        TraceError: names the operator and the line.
    """
    for node in graph.nodes:
        if node.target is torch.ops.higher_order.with_effects:
            name = next((str(item) for item in reversed(node.args) if isinstance(item, str)), str(node.args[1]))
            raise TraceError(
                f"{source_of(node) or 'the model'} can't be captured: {name} looks at its result on the host, "
                "to raise where there is none. Use a function that leaves this out (torch.linalg.solve_ex, inv_ex, "
                "cholesky_ex, lu_factor_ex), or wrap only submodules without it: MONeTWrapper(model.backbone, ...)"
            )


def _refuse_late_changes(graph: fx.Graph) -> None:
    """Refuse a step that changes one of its inputs in its backward pass: a graph has no result for that.

    Raises:
        TraceError: names the line.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        changed = base(node.all_input_nodes[0])
        if changed.op == "placeholder":
            raise TraceError(
                f"{source_of(node) or 'the model'} can't be captured: an autograd.Function changes a tensor of "
                f"shape {tuple(changed.meta['val'].shape)} in its backward pass, which was there before the step. "
                "Call it in a function with @torch.compiler.disable: the rest is planned in pieces"
            )


def _conjugate_constants(graph: fx.Graph) -> None:
    """Put numbers in the place of calls that conjugate numbers, as in gradients of products with them."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._conj.default):
        (number,) = node.args
        if isinstance(number, complex):
            for user in list(node.users):
                user.args = tuple(number.conjugate() if item is node else item for item in user.args)
            graph.erase_node(node)


def _copy_shared_gradients(graph: fx.Graph, forward_outputs: int) -> None:
    """Give each gradient memory of its own: where several are views of one tensor, all but the first are copied.

    A caller may change one in place (clipping, another backward pass that is added). One tensor that is several
    gradients is left to autograd, which copies it.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    made, owner = list(results), dict[fx.Node, fx.Node]()
    for at, node in enumerate(results[forward_outputs:], forward_outputs):
        if isinstance(node, fx.Node) and owner.setdefault(base(node), node) is not node:
            with graph.inserting_before(output):
                made[at] = graph.call_function(torch.ops.aten.clone.default, (node,))
            val = node.meta["val"]
            with val.fake_mode:
                made[at].meta = {**node.meta, "val": val.clone()}
    output.args = (tuple(made),)
