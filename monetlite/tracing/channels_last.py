"""Channels-last throughout: a captured graph rewritten so that its images have their channels innermost.

On a CPU, and on a GPU in half precision or TF32, convolution kernels want that layout: contiguous images are
copied there and back around each one, which costs time and a workspace as large as the images. Converted where
they enter, images stay channels-last, because kernels give their results the layout of their operands. Where
something needs another layout (a `view` that flattens an image, the gradient of a pooled vector), a conversion
is inserted, which is an operator like any other and is priced and scheduled with the rest. Results leave in the
layouts that they had, and whatever goes by the order of elements in memory sees the order that there was: random
numbers are drawn in it, `as_strided` and operators of other libraries (`torch.library`) may read it.
"""

from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from monetlite.core.errors import TraceError
from monetlite.fx import storages
from monetlite.fx.call_encoding import fake_mode
from monetlite.fx.torch_internals.torch_dispatch import OpOverload
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.operators.random import is_random
from monetlite.operators.traits import traits_of
from monetlite.tracing.capture import Joint

_ANY_LAYOUT = frozenset({"aten", "prims"})
"""Libraries whose operators take operands in any layout; others may rely on those that a person tried."""

_Order: TypeAlias = torch.memory_format | tuple[int, ...]
"""Order of a tensor's elements in memory, without gaps: a format of torch's, or dimensions, the outermost
first."""


def has_images(graph: fx.Graph) -> bool:
    """True if a graph has convolutions of two-dimensional images."""
    return any(map(_wants_channels_last, graph.nodes))


def channels_last(joint: Joint) -> Joint:
    """The same step with images in channels-last; the same sums, in whatever order the kernels then take.

    A graph without convolutions of two-dimensional images comes back as it is.
    """
    source = joint.graph.graph
    if not has_images(source):
        return joint
    converter = _Converter(source)
    for node in source.nodes:
        converter.convert(node)
    return replace(joint, graph=graph_module(joint.graph, converter.graph))


class _Converter:
    """Copies a graph node by node, on fake tensors, which say what layout each result has."""

    def __init__(self, source: fx.Graph) -> None:
        self.graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._converted: dict[tuple[fx.Node, _Order], fx.Node] = {}
        self._restored: dict[fx.Node, fx.Node] = {}
        """Views as they were, of what they were of."""
        self._mode = fake_mode(next(filter(_wants_channels_last, source.nodes)))

    def convert(self, node: fx.Node) -> None:
        """Append what a node becomes."""
        if node.op == "output":
            results = [self._in_storage(item) if isinstance(item, fx.Node) else item for item in node.args[0]]  # type: ignore[union-attr]  # an output has a flat list
            self.graph.output(tuple(results)).meta.update(node.meta)
            return
        if node.op != "call_function":
            self._new[node] = self.graph.node_copy(node, self._new.__getitem__)
            return
        args: list[Any] = [fx.map_arg(item, self._new.__getitem__) for item in node.args]
        kwargs = fx.map_arg(dict(node.kwargs), self._new.__getitem__)
        traits = traits_of(str(node.target))
        for position in traits.wants_channels_last:
            if _is_image(node.args[position]):
                args[position] = self._laid_out(args[position], torch.channels_last, node)
        if traits.gradient_follows and _is_image(node.args[0]) and _is_channels_last(args[1]):
            args[0] = self._laid_out(args[0], torch.channels_last, node)
        if traits.by_storage:
            args[0] = self._by_storage(node)
        elif not _takes_any_layout(node):
            args, kwargs = fx.map_arg((list(node.args), dict(node.kwargs)), self._in_storage)
        elif is_random(node):
            # Numbers are drawn in the order of the storage: another layout would drop other elements.
            args, kwargs = fx.map_arg((list(node.args), dict(node.kwargs)), self._in_order)
        append = self._view if storages.is_view(node) else self._call
        self._new[node] = append(node, args, kwargs)

    def _call(self, node: fx.Node, args: list[Any], kwargs: Any) -> fx.Node:
        value = self._run(node.target, args, kwargs)
        return self._append(node, node.target, tuple(args), kwargs, value, node.name)

    def _view(self, node: fx.Node, args: list[Any], kwargs: Any) -> fx.Node:
        """A view; of a copy, where it joins dimensions that are apart in this layout."""
        for restored in (self._in_order, self._in_storage):
            try:
                return self._call(node, args, kwargs)
            except (RuntimeError, ValueError):
                args = [restored(node.all_input_nodes[0], node), *args[1:]]
        return self._call(node, args, kwargs)

    def _in_order(self, node: fx.Node, reader: fx.Node | None = None) -> fx.Node:
        """The new form of a tensor, its elements in memory in the order in which they were.

        If they had gaps between them, or were repeated, they lie as in `torch.empty_like` of it, which is how
        operators lay out masks and results.
        """
        new, before = self._new[node], node.meta.get("val")
        if not isinstance(before, torch.Tensor) or new.meta["val"].stride() == before.stride():
            return new
        with self._mode:
            dense = torch.empty_like(before)
        return self._laid_out(new, _order_of(dense), reader or node)

    def _in_storage(self, node: fx.Node, reader: fx.Node | None = None) -> fx.Node:
        """The new form of a tensor, in a storage like the one that it had; a view has the same base."""
        if storages.base(node) is node:
            return self._in_order(node, reader)
        if node not in self._restored:
            new, source = self._new[node], self._in_storage(node.all_input_nodes[0], reader)
            others = fx.map_arg(node.args[1:], self._new.__getitem__)
            kwargs = fx.map_arg(dict(node.kwargs), self._new.__getitem__)
            same = new.args[0] is source
            self._restored[node] = new if same else self._call(node, [source, *others], kwargs)
        return self._restored[node]

    def _by_storage(self, node: fx.Node) -> fx.Node:
        """The first operand of an operator that finds elements by their position in its storage.

        Raises:
            TraceError: the storage has gaps, whose contents would not be the same.
        """
        viewed = node.all_input_nodes[0]
        base = storages.base(viewed)
        before, new = base.meta["val"], self._new[base].meta["val"]
        if new.stride() != before.stride() and storages.storage_bytes(base) != before.nbytes:
            raise TraceError(
                f"{node.target} reads a tensor with gaps in memory (strides {tuple(before.stride())}, shape "
                f"{tuple(before.shape)}), which layout 'channels_last' would not keep; use layout='as_traced'"
            )
        return self._in_storage(viewed)

    def _laid_out(self, node: fx.Node, order: _Order, reader: fx.Node) -> fx.Node:
        """A tensor in a layout: itself, or a copy that is made once for all its readers."""
        if _lies_in(node.meta["val"], order):
            return node
        key = (node, order)
        if key not in self._converted:
            self._converted[key] = self._copied(node, order, reader)
        return self._converted[key]

    def _copied(self, node: fx.Node, order: _Order, reader: fx.Node) -> fx.Node:
        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return self._append(reader, target, args, kwargs, self._run(target, args, kwargs), "layout")

        clone, permute = torch.ops.aten.clone.default, torch.ops.aten.permute.default
        if isinstance(order, torch.memory_format):
            return call(clone, node, memory_format=order)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        outermost_first = call(permute, node, list(order))
        return call(permute, call(clone, outermost_first, memory_format=torch.contiguous_format), inverse)

    def _append(
        self, origin: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any, value: Any, name: str
    ) -> fx.Node:
        created = self.graph.create_node("call_function", target, args, kwargs, name)
        created.meta.update(origin.meta)
        created.meta["val"] = value
        return created

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        def value(item: fx.Node) -> Any:
            return item.meta["val"]

        with self._mode, torch.no_grad():
            return target(*fx.map_arg(tuple(args), value), **fx.map_arg(kwargs, value))


def _wants_channels_last(node: fx.Node) -> bool:
    return bool(traits_of(str(node.target)).wants_channels_last) and _is_image(node.args[0])


def _is_image(argument: Any) -> bool:
    tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 4


def _is_channels_last(argument: Any) -> bool:
    if not _is_image(argument):
        return False
    tensor = argument.meta["val"]
    return _lies_in(tensor, torch.channels_last) and not tensor.is_contiguous()


def _takes_any_layout(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return target.namespace in _ANY_LAYOUT or torch.Tag.flexible_layout in target.tags


def _order_of(dense: torch.Tensor) -> _Order:
    for layout in (torch.contiguous_format, torch.channels_last):
        if _lies_in(dense, layout):
            return layout
    steps = dense.stride()
    return tuple(sorted(range(dense.dim()), key=lambda dimension: -steps[dimension]))


def _lies_in(tensor: torch.Tensor, order: _Order) -> bool:
    if isinstance(order, torch.memory_format):
        return tensor.is_contiguous(memory_format=order)
    return tensor.permute(order).is_contiguous()
