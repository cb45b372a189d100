"""Regions of a joint graph: the operators between its anchors, each region as one node.

Anchors are operators that Inductor would call as they are (products, convolutions, attention, look-ups), that draw
random numbers or have effects. All others belong to regions, forward and backward apart. A region is the operators
that are connected without an anchor in between and as many anchors deep: an operator is one anchor deeper than
anchors that it reads, and as deep as its deepest neighbour. So no path leads out of a region and back, and regions
can be put in order.

A forward region writes what anchors or other regions of the forward pass read, results of the model, and what is
small (statistics of a normalisation). What only the backward pass reads is computed again inside the regions that
read it: that costs a few operations an element of what is read anyway. A backward region that reads a result of a
forward region can also be run from what that region was computed from.
"""

import heapq
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter
from typing import TypeAlias

import torch
from torch import fx

from monetlite.core.options import REORDERED_SUMS
from monetlite.fx import storages
from monetlite.fx.storages import kernel_of
from monetlite.fx.torch_internals.torch_dispatch import OpOverload, schema_of
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.operators import is_random
from monetlite.operators.regions import (
    REGION_CALLS,
    RegionCall,
    compiled,
    moved_bytes,
    one_by_one,
    over_first,
)
from monetlite.operators.taking_apart import FUSIBLE
from monetlite.operators.traits import traits_of
from monetlite.tracing.capture import Joint

REDUCTIONS = frozenset(
    f"aten.{name}" for name in ("sum", "mean", "var_mean", "amax", "amin", "any", "all", "native_layer_norm")
) | {"aten.native_group_norm", "aten.native_batch_norm", "aten._fused_rms_norm"}
"""Operators whose results are small where they have fewer elements than what they are computed from."""
COMPARISONS = frozenset({"aten.eq.Tensor", "aten.ne.Tensor"})
"""Operators that are in no region where they compare floating-point numbers: a maximum's gradient looks for the
maximum, and finds it only if its operands have the bits that they had. Compiled regions round elsewhere."""
NEGLIGIBLE_SHARE = 1e-3
"""Regions that move less than this share of the bytes that all regions move are not compiled."""
MIN_KERNELS = 2
"""Fewer operators are no region: they stay with the implementations that they have."""


def form_regions(joint: Joint, reach: storages.Reachability) -> Joint:
    """The same step with each region as one node, whose `meta` has other calls (`REGION_CALLS`)."""
    return _Regions(joint, reach).rewritten()


_Program: TypeAlias = tuple[fx.GraphModule, tuple[fx.Node, ...]]
"""A region's program with all that it computes inside, and the tensors that it reads."""


@dataclass(eq=False)
class _Region:
    """A region.

    Attributes:
        kernels: in order.
        phase: of them (`_phase`).
        writes: the tensors that it writes.
        sources: the forward regions whose results a backward region reads.
        program: of the region.
        from_inputs: its program that computes large results of `sources` inside; None without them.
    """

    kernels: list[fx.Node]
    phase: int
    writes: dict[fx.Node, None] = field(default_factory=dict)
    sources: list["_Region"] = field(default_factory=list)
    program: _Program = field(init=False)
    from_inputs: _Program | None = None

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The tensors that its program reads."""
        return self.program[1]


class _Regions:
    """Finds the regions of a joint graph, and rewrites it."""

    def __init__(self, joint: Joint, reach: storages.Reachability) -> None:
        self._joint, self._reach = joint, reach
        self._graph = joint.graph.graph
        self._order = {node: at for at, node in enumerate(self._graph.nodes)}
        self._kernels = [node for node in self._graph.nodes if node in reach.needed and storages.is_kernel(node)]
        self._returned = {storages.base(item) for item in reach.output if item is not None}
        self._fused = {node for node in self._kernels if self._is_fusible(node)}
        self._constants = {node for node in self._fused if not node.all_input_nodes and node not in self._returned}
        self._regions = self._found()
        self._region_of = {kernel: item for item in self._regions for kernel in item.kernels}
        self._find_writes()
        self._find_programs()

    def _is_fusible(self, node: fx.Node) -> bool:
        target = node.target
        tensors = tensors_among([of.meta.get("val") for of in (node, *node.all_input_nodes)])
        if (
            is_random(node)
            or node in self._reach.effects
            or not tensors
            or any(item.op == "get_attr" or item.meta.get("val") is None for item in node.all_input_nodes)
            or any(storages.base(item) in self._reach.mutated for item in node.all_input_nodes)
            or any(item.dtype.is_complex or item.layout is not torch.strided for item in tensors)
            or len({item.device for item in tensors}) > 1
        ):
            return False
        if not isinstance(target, OpOverload):
            return target in FUSIBLE
        if schema_of(target).is_mutable or (
            str(target) in COMPARISONS and any(item.is_floating_point() for item in tensors)
        ):
            return False
        return torch.Tag.pointwise in target.tags or traits_of(str(target)).fusible

    def _phase(self, node: fx.Node) -> int:
        """0: forward; 1: only the backward pass needs it, at any time; 2: backward."""
        return 2 if node in self._reach.backward else int(node not in self._reach.forward)

    def _found(self) -> list[_Region]:
        """The regions, by the depth of their operators."""
        depth: dict[fx.Node, int] = {}
        parent: dict[fx.Node, fx.Node] = {}
        nearest: dict[tuple[fx.Node, int], fx.Node] = {}
        last_effect: dict[int, fx.Node] = {}

        def root(node: fx.Node) -> fx.Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        for node in self._kernels:
            phase, fused = self._phase(node), node in self._fused
            producers = map(kernel_of, storages_read(node))
            before = [item for item in producers if item in depth and self._phase(item) == phase]
            if is_random(node) or node in self._reach.effects:
                # What has effects stays in order.
                before += [last_effect[phase]] if phase in last_effect else []
                last_effect[phase] = node
            before = [item for item in before if item not in self._constants]
            depth[node] = max((depth[item] + (fused and item not in self._fused) for item in before), default=0)
            if not fused or phase == 1 or node in self._constants:
                continue
            parent[node] = node
            for item in before:
                if item in self._fused and depth[item] == depth[node]:
                    parent[root(item)] = root(node)
                elif item not in self._fused and depth[item] == depth[node] - 1:
                    # They read the same, which a loop reads once.
                    other = nearest.setdefault((item, depth[node]), node)
                    parent[root(other)] = root(node)
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in parent:
            members.setdefault(root(node), []).append(node)
        return [
            _Region(kernels=kernels, phase=self._phase(kernels[0]))
            for kernels in members.values()
            if len(kernels) >= MIN_KERNELS
        ]

    @cached_property
    def _readers(self) -> dict[fx.Node, set[fx.Node]]:
        """Kernels that read a tensor or a view of it."""
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self._kernels:
            for item in storages_read(node):
                found.setdefault(item, set()).add(node)
        return found

    def _find_writes(self) -> None:
        """Note the tensors of each region that others read as they are."""
        for region in self._regions:
            own = set(region.kernels)
            for kernel in region.kernels:
                for item in filter(None, storages.results(kernel)):
                    others = self._readers.get(item, set()) - own
                    if region.phase == 0:
                        others = {node for node in others if not self._reads_by_itself(node)}
                    if others or item in self._returned:
                        region.writes[item] = None

    def _reads_by_itself(self, node: fx.Node) -> bool:
        """True for a kernel that is run inside of those that read it, or that can compute what it reads."""
        return node in (self._region_of if self._phase(node) == 2 else self._inlined)

    @cached_property
    def _inlined(self) -> set[fx.Node]:
        """Optional operators that only backward regions read: they are run inside of those."""
        found: set[fx.Node] = set()
        for node in reversed(self._kernels):  # readers first
            results = (item for item in storages.results(node) if item is not None)
            readers = {reader for item in results for reader in self._readers.get(item, ())}
            if (
                self._phase(node) == 1
                and node in self._fused
                and node not in self._returned
                and all(reader in (self._region_of if self._phase(reader) == 2 else found) for reader in readers)
            ):
                found.add(node)
        return found

    def _is_there(self, tensor: fx.Node, sources: Collection[_Region]) -> bool:
        """True for a tensor that a backward region reads; others it computes inside.

        Args:
            tensor: a base tensor.
            sources: regions whose large results are computed inside.
        """
        kernel = kernel_of(tensor)
        if kernel not in self._fused or self._phase(kernel) == 2:
            return True
        region = self._region_of.get(kernel)
        if kernel in self._constants or kernel in self._inlined:
            return False
        if region is None:
            return True
        if self._is_small(kernel, tensor):
            region.writes[tensor] = None
            return True
        return tensor in region.writes and region not in sources

    def _is_small(self, kernel: fx.Node, tensor: fx.Node) -> bool:
        largest = max((item.meta["val"].numel() for item in storages_read(kernel)), default=0)
        return str(kernel.target).rpartition(".")[0] in REDUCTIONS and bool(tensor.meta["val"].numel() < largest)

    def _program(self, region: _Region, sources: Collection[_Region] = ()) -> _Program:
        """A region's program, which computes large results of `sources` inside."""
        own, forward = set(region.kernels), region.phase == 0
        inside: set[fx.Node] = set()
        inputs: dict[fx.Node, None] = {}
        waiting = [*reversed(region.writes)]
        while waiting:
            node = waiting.pop()
            if node in inside or node in inputs:
                continue
            kernel = kernel_of(node)
            computed = kernel in own or kernel in self._constants
            is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
            is_base = is_tensor and not storages.is_view(node) and storages.base(node) is node
            given = node.op != "call_function" or forward
            if not computed and is_base and (given or self._is_there(node, sources)):
                inputs[node] = None
            else:
                inside.add(node)
                waiting += reversed(node.all_input_nodes)
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, item in enumerate(inputs):
            new[item] = graph.placeholder(f"input_{number}")
            new[item].meta["val"] = item.meta["val"]
        for node in sorted(inside, key=self._order.__getitem__):
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta = {"val": node.meta["val"]}
        graph.output(tuple(new[item] for item in region.writes))
        return graph_module(torch.nn.Module(), graph), tuple(inputs)

    def _find_programs(self) -> None:
        """Make the programs of all regions."""
        # Backward regions come first: they say what small values they need of forward regions.
        for region in sorted(self._regions, key=lambda region: -region.phase):
            region.program = self._program(region)
            if region.phase == 2:
                read = (self._region_of.get(kernel_of(item)) for item in region.inputs)
                region.sources = list(dict.fromkeys(item for item in read if item is not None and item.phase == 0))
            if region.sources:
                region.from_inputs = self._program(region, region.sources)

    def rewritten(self) -> Joint:
        """The joint graph with a node for each region."""
        new: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        made: dict[_Region, fx.Node] = {}
        for unit in self._in_order():
            if isinstance(unit, _Region):
                program, inputs = unit.program
                node = graph.call_function(one_by_one(program), tuple(new[item] for item in inputs))
                largest = max(unit.writes, key=lambda item: item.meta["val"].numel())
                node.meta = {**kernel_of(largest).meta, "val": tuple(item.meta["val"] for item in unit.writes)}
                made[unit] = node
                for position, item in enumerate(unit.writes):
                    new[item] = graph.call_function(operator.getitem, (node, position))
                    new[item].meta = dict(item.meta)
            else:
                new[unit] = graph.node_copy(unit, new.__getitem__)
        self._negligible_bytes = NEGLIGIBLE_SHARE * sum(moved_bytes(region.program[0]) for region in self._regions)
        for region, node in made.items():
            node.meta[REGION_CALLS] = list(self._calls(region, new))
        return replace(self._joint, graph=graph_module(self._joint.graph, graph))

    def _calls(self, region: _Region, new: dict[fx.Node, fx.Node]) -> Iterator[RegionCall]:
        program, inputs = region.program
        if moved_bytes(program) < self._negligible_bytes:
            return
        args = tuple(new[item] for item in inputs)
        yield RegionCall(name="compiled", run=compiled(program), args=args, tolerance=REORDERED_SUMS)
        if (over := over_first(program, args)) is not None:
            run = compiled(program, over)
            yield RegionCall(name="compiled_inplace", run=run, args=args, tolerance=REORDERED_SUMS, over=over)
        if region.from_inputs is not None:
            program, others = region.from_inputs
            if set(others) != set(inputs):
                args = tuple(new[item] for item in others)
                yield RegionCall(name="from_inputs", run=one_by_one(program), args=args)
                yield RegionCall(
                    name="compiled_from_inputs", run=compiled(program), args=args, tolerance=REORDERED_SUMS
                )

    def _in_order(self) -> Iterator["fx.Node | _Region"]:
        """Regions and all other nodes, each after what it reads, else in the order in which they were."""
        units: dict[fx.Node, fx.Node | _Region] = {}
        for node in self._graph.nodes:
            region = self._region_of.get(kernel_of(node))
            if region is None or storages.base(node) is not node:
                units[node] = node
            elif node in region.writes:
                units[node] = region
        alive = self._alive(units)
        reads: dict[fx.Node | _Region, set[fx.Node | _Region]] = {}
        place: dict[fx.Node | _Region, int] = {}
        before: fx.Node | None = None
        for node in self._graph.nodes:
            unit = units.get(node)
            if unit is None or node not in alive:
                continue
            place.setdefault(unit, self._order[node])
            read = unit.inputs if isinstance(unit, _Region) else node.all_input_nodes
            reads[unit] = {units[item] for item in read}
            if storages.is_kernel(node) and (is_random(node) or node in self._reach.effects):
                reads[unit] |= {before} if before is not None else set()
                before = node
        sorter = TopologicalSorter(reads)
        sorter.prepare()
        ready: list[tuple[int, fx.Node | _Region]] = []
        while sorter.is_active():
            for unit in sorter.get_ready():
                heapq.heappush(ready, (place[unit], unit))
            _, unit = heapq.heappop(ready)
            yield unit
            sorter.done(unit)

    def _alive(self, units: dict[fx.Node, "fx.Node | _Region"]) -> set[fx.Node]:
        """Nodes that are still there once each region computes all that it needs."""
        alive: set[fx.Node] = set()
        waiting = [*self._graph.find_nodes(op="placeholder"), self._graph.output_node()]
        waiting += [node for node in self._kernels if node in self._reach.effects]
        waiting += [item for region in self._regions for source in region.sources for item in source.writes]
        while waiting:
            node = waiting.pop()
            if node in alive:
                continue
            alive.add(node)
            unit = units[node]
            if isinstance(unit, _Region):
                alive.update(unit.writes)
                for _, read in filter(None, (unit.program, unit.from_inputs)):
                    waiting += read
            else:
                waiting += node.all_input_nodes
        return alive


def read_or_made_by_regions(graph: fx.Graph) -> Iterator[fx.Node]:
    """Results of regions, and what any of their forms reads, though the default one may not."""
    for node in graph.nodes:
        if REGION_CALLS in node.meta:
            yield from node.users
            for call in node.meta[REGION_CALLS]:
                yield from call.args


def storages_read(node: fx.Node) -> Iterator[fx.Node]:
    """The base tensors that a kernel reads."""
    return map(storages.base, node.all_input_nodes)
