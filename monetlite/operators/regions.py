"""Regions: what lies between matrix products, convolutions and attention, as one operator.

A region is a small program of pointwise operators, reductions and copies. Run one by one, its operators make the
bits of plain training. Compiled by Inductor, they are a loop or two, and what they compute on the way is never
stored. Both are functions that calls name, by a digest of the program and its sizes: equal regions of a model are
compiled once, measured once, and found in Inductor's cache on disk by the next process.

`monetlite.tracing.regions` finds regions in a captured graph.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from monetlite.core.graph import Implementation, TensorRef
from monetlite.fx import storages
from monetlite.fx.call_encoding import spec_of
from monetlite.fx.direct_calls import as_function
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.operators.implementations import FUNCTIONS, PREFIX, TracedKernel, function, target_of

TOLERANCE = 1e-5
"""Of what Inductor computes: sums in another order, functions by other approximations, fused roundings."""
WAYS = "monetlite_ways"
"""Key of a region's node's `meta`: its `Way`s."""
_compiling = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run a region, beside the default.

    Attributes:
        name: of the implementation.
        run: registered function.
        args: nodes of the captured graph.
        tolerance: see `Implementation`.
        over: position of the argument that the first result overwrites, where one is.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[fx.Node, ...]
    tolerance: float = 0.0
    over: int | None = None


def implement(kernel: TracedKernel, way: Way, args: tuple[TensorRef, ...]) -> Implementation | None:
    """The implementation of a region's kernel that a way is; None if it can't overwrite what it would."""
    overwrites = () if way.over is None else kernel.over(args[way.over])
    if way.over is not None and not overwrites:
        return None
    return kernel.implement(way.name, way.run, args=args, tolerance=way.tolerance, overwrites=overwrites)


def one_by_one(program: fx.GraphModule) -> Callable[..., Any]:
    """The registered function that runs a region's operators in order, each value freed after its last use."""
    kernels = [node for node in program.graph.nodes if storages.is_kernel(node)]
    moved = sum(_bytes(item) for node in kernels for item in (*node.all_input_nodes, *storages.results(node)))
    ends = [*program.graph.find_nodes(op="placeholder"), *program.graph.output_node().all_input_nodes]
    costing = {
        "passes": moved / max(1, sum(map(_bytes, ends))),
        "launches": lambda _: len(kernels),
        "workspace_bytes": lambda _: _inner_bytes(program),
    }
    return _registered("region", program, lambda: as_function(_copied(program)), **costing)


def compiled(program: fx.GraphModule) -> Callable[..., Any]:
    """The registered function that runs a region as Inductor compiles it, when it is first called."""
    return _registered("compiled_region", program, lambda: _compile(program))


def _registered(
    kind: str, program: fx.GraphModule, make: Callable[[], Callable[[list[Any]], Any]], **costing: Any
) -> Callable[..., Any]:
    name = f"{kind}.{_digest(program)}"
    if PREFIX + name in FUNCTIONS:
        return FUNCTIONS[PREFIX + name].run
    made: Callable[[list[Any]], Any] | None = None

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal made
        if made is None:
            with _compiling:
                made = make()
        results: tuple[Tensor, ...] = made(list(tensors))
        return results

    run.__name__ = run.__qualname__ = name.replace(".", "_")  # by which generated code calls it
    return function(name, **costing)(run)


def _compile(program: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A region's program, compiled.

    It is traced on tensors of its own, so that nothing of the capture that it was found in stays alive.
    """
    from monetlite.fx.torch_internals.torch_inductor import compile_alone

    def described(node: fx.Node) -> tuple[Any, ...]:
        value = node.meta["val"]
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device

    inputs = [described(node) for node in program.graph.find_nodes(op="placeholder")]
    results = [described(node)[1] for node in program.graph.output_node().args[0]]  # type: ignore[union-attr]  # a flat tuple
    return compile_alone(lambda *args: program(*args), inputs, results)


def _copied(program: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return fx.GraphModule(program, graph)


def _digest(program: fx.GraphModule) -> str:
    """Digest of all that a region computes: operators, constants, and layouts of its operands and results."""
    numbers = {node: number for number, node in enumerate(program.graph.nodes)}

    def text(argument: Any) -> str:
        return f"%{numbers[argument]}" if isinstance(argument, fx.Node) else repr(argument)

    lines: list[Any] = []
    for node in program.graph.nodes:
        arguments = pytree.tree_leaves((node.args, node.kwargs))
        shape = [len(item) for item in node.args if isinstance(item, (list, tuple))]
        lines.append([node.op, "" if node.op == "placeholder" else target_of(node), shape, list(map(text, arguments))])
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            spec = spec_of(value)
            lines[-1] += [list(map(int, spec.shape)), list(map(int, spec.stride)), spec.dtype, value.device.type]
        lines[-1].append(sorted(node.kwargs))
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


def _bytes(node: fx.Node | None) -> int:
    value = None if node is None else node.meta.get("val")
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0


def _inner_bytes(program: fx.GraphModule) -> int:
    """Most memory of what a region computes and doesn't return, when its operators run one by one."""
    nodes = list(program.graph.nodes)
    returned = set(program.graph.output_node().all_input_nodes)
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(nodes):
        last.update((storages.base(item), at) for item in node.all_input_nodes)
    held = peak = 0
    made: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for item in storages.results(node) if storages.is_kernel(node) else ():
            if item is not None and item not in returned:
                held += _bytes(item)
                made[last.get(item, at)] = made.get(last.get(item, at), 0) + _bytes(item)
        peak = max(peak, held)
        held -= made.pop(at, 0)
    return peak


def results_of(nodes: Sequence[fx.Node]) -> tuple[Tensor, ...]:
    """Captured tensors of some nodes."""
    return tuple(node.meta["val"] for node in nodes)
