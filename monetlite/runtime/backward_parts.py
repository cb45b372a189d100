"""A backward program in parts, each of which runs up to a delivery of gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from monetlite.fx.torch_internals.torch_aot import boxed_function, without_autocast
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.varying_sizes import input_sizes, shape_with
from monetlite.operators.program_calls import deliver
from monetlite.runtime.unused_outputs import UnusedOutputs
from monetlite.tracing.capture import Boxed, Compiler, flat_outputs

RUN = "_monetlite_run"
"""Attribute of a stand-in: the function that runs a part of the backward program and returns its results."""


@dataclass(frozen=True, kw_only=True)
class BackwardPart:
    """A part of a backward program: the calls up to a delivery.

    Attributes:
        run: takes the tensors named by `takes`; returns those named by `gives`, then its results.
        takes: names of tensors; `lets_go` are those that no later part reads.
        gives: names of tensors that later parts read.
        results: positions, in the whole program, of the results it computes.
    """

    run: Boxed
    takes: tuple[str, ...]
    lets_go: frozenset[str]
    gives: tuple[str, ...]
    results: tuple[int, ...]


def deferred(
    program: fx.GraphModule,
    inputs: Sequence[Any],
    compiler: Compiler,
    unused: UnusedOutputs,
    ended: Callable[[], None],
) -> Boxed:
    """A backward program that returns a stand-in for one result of each part; the parts run later, in order.

    `ended` is called after the last.

    Parts hand tensors on by name. A tensor that no later part reads is given away, so it is freed inside the part
    exactly where it would be in the whole program.
    """
    parts = _split(program, inputs, compiler)
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    results = flat_outputs(program)
    first = {part.results[0]: results[part.results[0]] for part in parts if part.results}
    specs = {at: node.meta["val"] for at, node in first.items() if node is not None}
    symbols = {symbol: node.name for symbol, node in input_sizes(program.graph).items()}

    def call(arguments: list[Any]) -> list[torch.Tensor | None]:
        tensors, given = dict(zip(names, arguments, strict=True)), unused.given()
        left_out = unused.left_out(given)
        arguments.clear()
        values = {symbol: tensors[name] for symbol, name in symbols.items()}

        def run(number: int) -> list[Any]:
            part = parts[number]
            taken = [tensors.pop(name) if name in part.lets_go else tensors[name] for name in part.takes]
            with without_autocast():
                made = list(unused.run(part.run, taken, given))
            tensors.update(zip(part.gives, made, strict=False))
            made_results = zip(part.results, made[len(part.gives) :], strict=True)
            if number == len(parts) - 1:
                ended()
            return [None if at in left_out else result for at, result in made_results]

        stand_ins: list[torch.Tensor | None] = [None] * len(results)
        for at, spec in specs.items():
            stand_in = _zero(spec.dtype, spec.device).expand(shape_with(values, spec))
            setattr(stand_in, RUN, run)
            stand_ins[at] = stand_in
        return stand_ins

    return boxed_function(call)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zero that stand-ins are made of. To make one for each would be a launch for each on a GPU."""
    with without_modes():  # it is kept beyond them
        return torch.zeros((), dtype=dtype, device=device)


def results_by_part(program: fx.GraphModule) -> list[list[int]]:
    """For each part of a program, the positions of the results that it delivers; the last delivers the rest."""
    outputs = flat_outputs(program)
    parts = [
        [at for at, node in enumerate(outputs) if node is not None and node in mark.args]
        for mark in program.graph.nodes
        if mark.target is deliver
    ]
    delivered = {at for part in parts for at in part}
    rest = [at for at, node in enumerate(outputs) if node is not None and at not in delivered]
    return [*parts, rest] if rest or not parts else parts


def _split(program: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> list[BackwardPart]:
    """Cut a program after each `deliver` and compile each part for these inputs (fake tensors)."""
    results, outputs = results_by_part(program), flat_outputs(program)
    bodies: list[list[fx.Node]] = [[] for _ in results]
    number = 0
    for node in program.graph.nodes:
        if node.target is deliver:
            number = min(number + 1, len(results) - 1)
        elif node.op not in ("placeholder", "output"):
            bodies[number].append(node)
    delivered = [[node for at in positions if (node := outputs[at]) is not None] for positions in results]
    reads = [
        [*(read for node in body for read in node.all_input_nodes), *made]
        for body, made in zip(bodies, delivered, strict=True)
    ]
    last_read = {node: number for number, read in enumerate(reads) for node in read}
    values = dict(zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True))
    parts = []
    for number, (body, made) in enumerate(zip(bodies, delivered, strict=True)):
        inside = set(body)
        takes = list(dict.fromkeys(node for node in reads[number] if node not in inside))
        gives = [node for node in body if last_read.get(node, 0) > number]
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in takes:
            new[node] = graph.placeholder(node.name)
            new[node].meta.update(node.meta)
        for node in body:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in (*gives, *made)))
        run = compiler(graph_module(program, graph), [values[node] for node in takes], range(len(gives)))
        values.update(zip(gives, laid_out(run, [node.meta.get("val") for node in gives]), strict=True))
        parts.append(
            BackwardPart(
                run=run,
                takes=tuple(node.name for node in takes),
                lets_go=frozenset(node.name for node in takes if last_read[node] == number),
                gives=tuple(node.name for node in gives),
                results=tuple(results[number]),
            )
        )
    return parts


def laid_out(run: Boxed, captured: Sequence[Any]) -> list[Any]:
    """The first results of a compiled program, as captured, with the strides that its compiler chose."""
    chosen: Sequence[tuple[int, ...] | None] = getattr(run, "output_strides", None) or [None] * len(captured)
    return [
        value.new_empty_strided(value.shape, strides)
        if strides is not None and isinstance(value, torch.Tensor) and strides != value.stride()
        else value
        for value, strides in zip(captured, chosen, strict=False)
    ]
