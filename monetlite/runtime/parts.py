"""A straight-line program cut where gradients are delivered, so that each part can run when autograd asks for it.

What passes from one part to the next is handed over by name; a tensor that no later part reads is given away,
so it is freed inside the part exactly where it would be in the whole program.
"""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monetlite.operators.delivery import deliver
from monetlite.tracing.capture import Boxed, Compiler, boxed, flat_outputs


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a program.

    Attributes:
        run: takes the tensors of `takes` and returns those of `gives`, then its share of the results.
        takes: names of tensors; `lets_go` are those of them that nothing reads later.
        gives: names of tensors that later parts read.
        results: which of the program's results it makes, by position.
    """

    run: Boxed
    takes: tuple[str, ...]
    lets_go: frozenset[str]
    gives: tuple[str, ...]
    results: tuple[int, ...]


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


def split(program: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler = boxed) -> list[Part]:
    """Cut a program after each `deliver`; each part becomes what a compiler makes of it, for these inputs."""
    results = results_by_part(program)
    part_of: dict[fx.Node, int] = {}
    part = 0
    for node in program.graph.nodes:
        part_of[node] = part
        if node.target is deliver:
            part = min(part + 1, len(results) - 1)
    outputs = flat_outputs(program)
    last_read: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            for read in node.all_input_nodes:
                last_read[read] = max(last_read.get(read, 0), part_of[node])
    for at, positions in enumerate(results):
        for position in positions:
            node = outputs[position]
            assert node is not None
            last_read[node] = max(last_read.get(node, 0), at)
    given = dict(zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True))
    parts = []
    for number, positions in enumerate(results):
        nodes = [node for node in program.graph.nodes if part_of[node] == number]
        kept = [node for node in nodes if last_read.get(node, 0) > number]
        last = {node for node, at in last_read.items() if at <= number}
        parts.append(_part(program, nodes, kept, positions, last, given, compiler))
    return parts


def _part(
    program: fx.GraphModule,
    nodes: Sequence[fx.Node],
    kept: Collection[fx.Node],
    positions: Sequence[int],
    last: Container[fx.Node],
    given: dict[fx.Node, Any],
    compiler: Compiler,
) -> Part:
    """Some nodes as a program of their own.

    `positions`: which of the whole program's results it makes; `kept`: what is read later; `last`: what is not.
    `given`: the tensors that there are, in their layouts, to which those that are kept are added.
    """
    outputs = flat_outputs(program)
    body = [node for node in nodes if node.op not in ("placeholder", "output") and node.target is not deliver]
    inside = set(body)
    delivered = [node for position in positions if (node := outputs[position]) is not None]
    read = [node for made in body for node in made.all_input_nodes] + delivered
    takes = list(dict.fromkeys(node for node in read if node not in inside))
    gives = [node for node in body if node in kept]
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in takes}
    for node in takes:
        new[node].meta.update(node.meta)
    for node in body:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in (*gives, *delivered)))
    run = compiler(fx.GraphModule(program, graph), [given[node] for node in takes], range(len(gives)))
    for node, value in zip(gives, laid_out(run, [node.meta.get("val") for node in gives]), strict=True):
        given[node] = value
    return Part(
        run=run,
        takes=tuple(node.name for node in takes),
        lets_go=frozenset(node.name for node in takes if node in last),
        gives=tuple(node.name for node in gives),
        results=tuple(positions),
    )


def laid_out(run: Boxed, captured: Sequence[Any]) -> list[Any]:
    """The first results of a compiled program, as captured, in the layouts that its compiler chose."""
    chosen: Sequence[tuple[int, ...] | None] = getattr(run, "output_strides", None) or [None] * len(captured)
    return [
        value.new_empty_strided(value.shape, strides)
        if strides is not None and isinstance(value, torch.Tensor) and strides != value.stride()
        else value
        for value, strides in zip(captured, chosen, strict=False)
    ]


class Run:
    """A program that is run part by part, without the results (by position) that are `left_out`."""

    def __init__(self, parts: Sequence[Part], tensors: dict[str, Any], left_out: Collection[int] = ()) -> None:
        self._parts = parts
        self._tensors = tensors
        self._left_out = left_out

    def part(self, number: int) -> list[Any]:
        """Run a part, after those before it; returns its results."""
        part = self._parts[number]
        tensors = self._tensors
        arguments = [tensors.pop(name) if name in part.lets_go else tensors[name] for name in part.takes]
        made = list(part.run(arguments))
        tensors.update(zip(part.gives, made, strict=False))
        results = zip(part.results, made[len(part.gives) :], strict=True)
        return [None if at in self._left_out else result for at, result in results]
