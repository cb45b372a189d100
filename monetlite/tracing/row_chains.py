"""Row chains in a captured graph: MLPs, projections and norms, each as one kernel forward and one backward.

A chain ends at a product or a pointwise kernel, and grows back over row-wise kernels that only it reads: down to
the residual stream, which is also read beside it. Its backward part is what reads the values inside of it or
multiplies by its matrices, what is made of that alone, and the sums with the residual stream's gradient.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from monetlite.fx import storages
from monetlite.operators.row_chain import OUTER, PRODUCTS, ROW, SUM, WHOLE, WIDENED, row_chain
from monetlite.tracing.row_kernels import REDUCTIONS, RowKernel, parse, row_count

_ADD = "aten.add.Tensor"
_WAYS_BACK = 64
"""Pointwise kernels to look back over."""


@dataclass
class _Chain:
    """A chain: its kernels, in order. Those made for the backward part alone are among `backward`."""

    count: int
    forward: dict[fx.Node, RowKernel] = field(default_factory=dict)
    backward: dict[fx.Node, RowKernel] = field(default_factory=dict)


def has_rows(graph: fx.Graph) -> bool:
    """True if a graph may have chains: that of a language model, or one with attention."""
    targets = {str(node.target) for node in graph.nodes}
    attends = any("scaled_dot_product" in target for target in targets)
    return not targets.isdisjoint(PRODUCTS) and (attends or "aten._log_softmax.default" in targets)


def chain_rows(graph: fx.Graph, forward_outputs: int) -> None:
    """Replace the row chains of a joint graph by two kernels each: one forward, one backward."""
    finder = _Finder(storages.Reachability(graph, forward_outputs))
    for node in reversed([node for node in graph.nodes if storages.is_kernel(node)]):
        if node in finder.reach.forward and node not in finder.taken:
            found = finder.find(node)
            if found is not None and _replace(graph, finder, found):
                finder.taken.update(found.forward, found.backward)
    for node in reversed(list(graph.nodes)):
        if node in finder.taken or (not node.users and (storages.is_view(node) or storages.is_item(node))):
            graph.erase_node(node)


class _Finder:
    """Finds chains in a joint graph."""

    def __init__(self, reach: storages.Reachability) -> None:
        self.reach = reach
        self.taken: set[fx.Node] = set()

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Readers of a node's storage, by way of views too: kernels and the output."""
        found: list[fx.Node] = []
        for user in node.users:
            found += self.readers(user) if storages.is_view(user) or storages.is_item(user) else [user]
        return found

    def find(self, last: fx.Node) -> _Chain | None:
        """The chain that ends at a forward kernel."""
        ends = self._ends(last)
        if ends is None:
            return None
        chain = _Chain(count=ends[0][1])
        for kernel, _ in ends:
            chain.forward[kernel.node] = kernel
        self._grow_back(chain)
        kernels = chain.forward.values()
        works = any(kernel.target in (*PRODUCTS, *REDUCTIONS) for kernel in kernels)
        if len(kernels) <= len(ends) or not works:
            return None
        chain.forward = {node: chain.forward[node] for node in sorted(chain.forward)}
        self._add_backward(chain)
        return chain if chain.backward else None

    def parse(self, node: fx.Node) -> RowKernel | None:
        """A kernel as a step on rows; None if it isn't row-wise, or reads what the step changes in place."""
        if any(storages.base(item) in self.reach.mutated for item in node.all_input_nodes):
            return None
        return parse(node)

    def _ends(self, last: fx.Node) -> list[tuple[RowKernel, int]] | None:
        """A kernel that a chain may end with, and products of the same rows; each with its number of rows."""
        kernel = self.parse(last)
        if kernel is None or self._is_residual(kernel) or kernel.target == SUM or not kernel.rows:
            return None
        count = row_count(last)
        if kernel.target not in PRODUCTS:
            return [(kernel, count)]
        beside = [self.parse(node) for node in self.readers(kernel.rows[0]) if node in self.reach.forward]
        same = [
            item
            for item in beside
            if item is not None
            and item.target in PRODUCTS
            and item.rows == kernel.rows
            and item.node not in self.taken
        ]
        return [(item, count) for item in same] if len(same) == len(beside) else [(kernel, count)]

    def _grow_back(self, chain: _Chain) -> None:
        waiting = [row for kernel in chain.forward.values() for row in kernel.rows]
        while waiting:
            node = waiting.pop(0)
            if node in chain.forward or node in self.taken or node not in self.reach.forward:
                continue
            beside = [
                reader for reader in self.readers(node) if reader in self.reach.forward or reader.op == "output"
            ]
            if any(reader not in chain.forward for reader in beside):
                continue
            kernel = self.parse(node)
            if kernel is None or row_count(node) != chain.count or self._is_residual(kernel):
                continue
            chain.forward[node] = kernel
            waiting += kernel.rows
            # A row that was read by this kernel, too, may now be read by the chain alone.
            waiting += [row for other in chain.forward.values() for row in other.rows]

    def _is_residual(self, kernel: RowKernel) -> bool:
        """True for a sum that joins a branch to the stream that it came from."""
        if kernel.target != _ADD or len(kernel.rows) != 2 or len({row_count(row) for row in kernel.rows}) > 1:
            return False
        if any(row.meta["val"].shape[-1] != kernel.width for row in kernel.rows):
            return False
        one, other = (self._sources(row) for row in kernel.rows)
        return one.isdisjoint(other) and not self._is_low_rank(*one, *other)

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """Nodes that aren't pointwise, of which a row is made by pointwise kernels."""
        found: set[fx.Node] = set()
        waiting, seen = [node], {node}
        while waiting and len(seen) < _WAYS_BACK:
            node = waiting.pop()
            kernel = self.parse(node)
            if kernel is None or kernel.target in (*PRODUCTS, *REDUCTIONS):
                found.add(node)
                continue
            waiting += [row for row in kernel.rows if row not in seen]
            seen.update(kernel.rows)
        return found

    def _is_low_rank(self, *sources: fx.Node) -> bool:
        """True for a product and another of two small matrices, of the same rows: LoRA (Hu et al., 2106.09685)."""
        kernels = [self.parse(node) for node in sources]
        if len(kernels) != 2 or any(item is None or item.target not in PRODUCTS for item in kernels):
            return False
        rows = [item.rows[0] for item in kernels if item is not None]
        down = [self.parse(row) for row in rows]
        return any(item is not None and item.target in PRODUCTS and item.rows[0] in rows for item in down)

    def _add_backward(self, chain: _Chain) -> None:
        """Find the backward part of a chain."""
        shared = {storages.base(whole) for kernel in chain.forward.values() for whole in kernel.wholes}
        inside = {
            node
            for node in chain.forward
            if all(reader in chain.forward or reader in self.reach.backward for reader in self._mandatory(node))
        }
        there = {*chain.forward, *(row for kernel in chain.forward.values() for row in kernel.rows)}
        beside: dict[fx.Node, RowKernel] = {}
        """Kernels that only the backward pass needs, of what the chain has without a gradient."""
        readers = {reader for known in (*there, *shared) for reader in self.readers(known)}
        for node in filter(readers.__contains__, self.reach.graph.nodes):  # those added later come later
            if node in self.taken or node in self.reach.forward or not storages.is_kernel(node):
                continue
            kernel = self.parse(node)
            if kernel is None or not kernel.rows or any(row_count(row) != chain.count for row in kernel.rows):
                continue
            if node not in self.reach.backward:
                if there.issuperset(kernel.rows) and kernel.target not in (OUTER, SUM):
                    beside[node] = kernel
                    there.add(node)
                    readers.update(self.readers(node))
                continue
            mine = [row for row in kernel.rows if row in chain.backward]
            reads_inside = not inside.isdisjoint(kernel.rows)
            reads_shared = any(storages.base(whole) in shared for whole in kernel.wholes)
            made_of = (
                bool(mine)
                and kernel.target not in PRODUCTS
                and there.issuperset(kernel.rows)
                and all(storages.base(whole) in shared for whole in kernel.wholes)
            )
            joins = kernel.target == _ADD and len(mine) == 1 and len(self.readers(mine[0])) == 1
            if reads_inside or reads_shared or made_of or joins:
                self._add_with_operands(chain, kernel, beside)
                there.add(node)
                readers.update(self.readers(node))

    def _mandatory(self, node: fx.Node) -> list[fx.Node]:
        """Readers of a node's storage in the forward or the backward pass, and the output."""
        return [
            reader
            for reader in self.readers(node)
            if reader.op == "output" or reader in self.reach.forward or reader in self.reach.backward
        ]

    def _add_with_operands(self, chain: _Chain, kernel: RowKernel, beside: dict[fx.Node, RowKernel]) -> None:
        """Add a backward kernel, and before it what is made for it without a gradient."""
        for row in kernel.rows:
            if row in beside and row not in chain.backward:
                self._add_with_operands(chain, beside[row], beside)
        chain.backward[kernel.node] = kernel


def _replace(graph: fx.Graph, finder: _Finder, chain: _Chain) -> bool:
    """Put the two kernels in place of a chain's; False, and nothing changed, where they would not be in order."""
    inside = {*chain.forward, *chain.backward}
    ends = [node for node in chain.forward if _is_read_beside(finder, node, inside)]
    saved = [
        node
        for node in chain.forward
        if node not in ends and any(reader in chain.backward for reader in finder.readers(node))
    ]
    made = [node for node in chain.backward if _is_read_beside(finder, node, inside)]
    kernels = chain.forward | chain.backward
    programs = (
        _Program(chain.forward, known=(), made=[*ends, *saved], own=len(ends)),
        _Program(kernels, known=[*ends, *saved], made=made, own=len(made)),
    )
    results = [program.results() for program in programs]
    places = [_place(program, finder, inside) for program in programs]
    if None in results or None in places or not programs[0].rows:
        return False
    calls = []
    for program, place, outcome in zip(programs, places, results, strict=True):
        assert place is not None
        assert outcome is not None
        _hoist_views(place, program.operands)
        args = (program.rows, program.wholes, program.steps(), outcome, program.own, 1, None)
        with graph.inserting_before(place):
            call = graph.call_function(row_chain, args)
        call.meta.update({**program.made[0].meta, "val": tuple(node.meta["val"] for node in program.made)})
        calls.append(call)
    for program, call in zip(programs, calls, strict=True):
        last = call
        for position, node in enumerate(program.made):
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (call, position))
            last.meta.update(node.meta)
            node.replace_all_uses_with(last)
            _move_views(last)
    return True


def _is_read_beside(finder: _Finder, node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(reader not in inside for reader in finder.readers(node))


def _place(program: "_Program", finder: _Finder, inside: set[fx.Node]) -> fx.Node | None:
    """The first node that reads one of a kernel's results, before which it stands; None if an operand is later."""
    users = [reader for node in program.made for reader in finder.readers(node) if reader not in inside]
    if not users:
        return None
    first = min(users)
    return first if all(storages.base(operand) < first for operand in program.operands) else None


def _hoist_views(place: fx.Node, operands: Iterable[fx.Node]) -> None:
    """Put views that are operands of a kernel before the place where it is going to stand."""
    for node in operands:
        if (storages.is_view(node) or storages.is_item(node)) and node > place:
            _hoist_views(place, node.all_input_nodes)
            place.prepend(node)


def _move_views(node: fx.Node) -> None:
    """Put the views of a node that moved after it."""
    for user in list(node.users):
        if storages.is_view(user) or storages.is_item(user):
            node.append(user)
            _move_views(user)


class _Program:
    """Kernels as the steps of a chain: numbers its rows and results.

    Args:
        kernels: in order.
        known: nodes that are given as rows, though kernels make them.

    Attributes:
        made: the results. own: number of those that are the chain's (`row_chain`).
    """

    def __init__(
        self, kernels: dict[fx.Node, RowKernel], *, known: Sequence[fx.Node], made: Sequence[fx.Node], own: int
    ) -> None:
        self.kernels, self.made, self.own = kernels, made, own
        read = dict.fromkeys(row for kernel in kernels.values() for row in kernel.rows)
        given = [node for node in read if node not in kernels]
        self.rows = (*given, *(node for node in known if node in read))
        self.wholes = tuple(dict.fromkeys(whole for kernel in kernels.values() for whole in kernel.wholes))
        self.slots = {node: at for at, node in enumerate(self.rows)}
        for node in kernels:
            self.slots.setdefault(node, len(self.slots))

    @property
    def operands(self) -> list[fx.Node]:
        return [*self.rows, *self.wholes]

    def steps(self) -> tuple[Any, ...]:
        """The fields of each `ChainStep`."""
        return tuple(
            (
                self.slots[kernel.node],
                kernel.target,
                tuple(self._encoded(item) for item in kernel.args),
                tuple((name, self._encoded(item)) for name, item in kernel.kwargs),
                kernel.width,
                str(kernel.node.meta["val"].dtype).removeprefix("torch."),
            )
            for kernel in self.kernels.values()
        )

    def _encoded(self, item: Any) -> Any:
        if not isinstance(item, tuple) or not item or item[0] not in (ROW, WIDENED, WHOLE):
            return item
        kind, node, *rest = item
        return (kind, self.wholes.index(node) if kind == WHOLE else self.slots[node], *rest)

    def results(self) -> tuple[Any, ...] | None:
        """The `results` of `row_chain`; None if the leading dimensions of one are not those of a row."""
        found: list[Any] = []
        for node in self.made:
            shape = tuple(node.meta["val"].shape)
            if self.kernels[node].target in (OUTER, SUM):
                found.append((self.slots[node], None, shape))
                continue
            leading = (row.meta["val"].shape[:-1] for row in self.rows)
            like = next((at for at, its in enumerate(leading) if its == shape[:-1]), None)
            if like is None and len(shape) != 2:
                return None
            found.append((self.slots[node], like if len(shape) != 2 else None, None))
        return tuple(found)
