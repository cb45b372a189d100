"""Channels-last throughout: a captured graph rewritten so that its images have their channels innermost.

On a CPU, and on a GPU in half precision or TF32, convolution kernels want that layout: contiguous images are
copied there and back around each one, which costs time and a workspace as large as the images. Converted where
they enter, images stay channels-last, because kernels give their results the layout of their operands. Where
something needs another layout (a `view` that flattens an image, the gradient of a pooled vector), a conversion
is inserted, which is an operator like any other and is priced and scheduled with the rest. Results leave in the
layouts that they had, and random numbers are drawn for the layouts that they were drawn for.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monetlite.captured import storages
from monetlite.captured.calls import fake_mode
from monetlite.operators.random import is_random
from monetlite.tracing.capture import Joint

_LIKE = {
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
}
"""Operands of convolutions: converted to channels-last wherever they are not."""

_GRADIENT_OF = {
    "aten.native_batch_norm_backward.default": (0, 1),
    "aten.batch_norm_backward.default": (0, 1),
    "aten.threshold_backward.default": (0, 1),
    "aten.hardtanh_backward.default": (0, 1),
    "aten.silu_backward.default": (0, 1),
    "aten.gelu_backward.default": (0, 1),
    "aten.hardswish_backward.default": (0, 1),
    "aten.max_pool2d_with_indices_backward.default": (0, 1),
}
"""Gradients (first) that are converted where what they meet (second) is channels-last."""


def channels_last(joint: Joint) -> Joint:
    """The same step with images in channels-last; the same sums, in whatever order the kernels then take.

    A graph without convolutions of two-dimensional images comes back as it is.
    """
    source = joint.graph.graph
    if not any(str(node.target) in _LIKE and _is_image(node.args[0]) for node in source.nodes):
        return joint
    converter = _Converter(source)
    for node in source.nodes:
        converter.convert(node)
    return replace(joint, graph=fx.GraphModule(joint.graph, converter.graph))


class _Converter:
    """Copies a graph node by node, on fake tensors, which say what layout each result has."""

    def __init__(self, source: fx.Graph) -> None:
        self.graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._converted: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self._mode = fake_mode(next(node for node in source.nodes if str(node.target) in _LIKE))

    def convert(self, node: fx.Node) -> None:
        """Append what a node becomes."""
        if node.op == "output":
            results = [self._as_before(item) if isinstance(item, fx.Node) else item for item in node.args[0]]  # type: ignore[union-attr]  # an output has a flat list
            self.graph.output(tuple(results)).meta.update(node.meta)
            return
        if node.op != "call_function":
            self._new[node] = self.graph.node_copy(node, self._new.__getitem__)
            return
        args: list[Any] = [fx.map_arg(item, self._new.__getitem__) for item in node.args]
        for position in _LIKE.get(str(node.target), ()):
            if _is_image(node.args[position]):
                args[position] = self._laid_out(args[position], torch.channels_last, node)
        if str(node.target) in _GRADIENT_OF:
            gradient, other = _GRADIENT_OF[str(node.target)]
            if _is_image(node.args[gradient]) and _is_channels_last(args[other]):
                args[gradient] = self._laid_out(args[gradient], torch.channels_last, node)
        if is_random(node):
            # Numbers are drawn in the order of the storage: another layout would drop other elements.
            args = [self._as_before(item) if isinstance(item, fx.Node) else item for item in node.args]
        kwargs = fx.map_arg(dict(node.kwargs), self._new.__getitem__)
        try:
            value = self._run(node.target, args, kwargs)
        except (RuntimeError, ValueError):
            if not storages.is_view(node):
                raise
            # A view that joins dimensions which are apart in this layout: it was of a contiguous tensor.
            args[0] = self._laid_out(args[0], torch.contiguous_format, node)
            value = self._run(node.target, args, kwargs)
        self._new[node] = self._append(node, node.target, tuple(args), kwargs, value, node.name)

    def _as_before(self, node: fx.Node) -> fx.Node:
        """What a tensor has become, in the layout that it had."""
        new, before = self._new[node], node.meta.get("val")
        if not isinstance(before, torch.Tensor) or new.meta["val"].stride() == before.stride():
            return new
        layout = torch.contiguous_format if before.is_contiguous() else torch.channels_last
        return self._laid_out(new, layout, node)

    def _laid_out(self, node: fx.Node, layout: torch.memory_format, reader: fx.Node) -> fx.Node:
        """A tensor in a layout: itself, or a copy that is made once for all its readers."""
        if node.meta["val"].is_contiguous(memory_format=layout):
            return node
        key = (node, layout)
        if key not in self._converted:
            kwargs = {"memory_format": layout}
            clone = torch.ops.aten.clone.default
            value = self._run(clone, (node,), kwargs)
            self._converted[key] = self._append(reader, clone, (node,), kwargs, value, "layout")
        return self._converted[key]

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


def _is_image(argument: Any) -> bool:
    tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.dim() == 4


def _is_channels_last(argument: Any) -> bool:
    tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()
    )


__all__ = ["channels_last"]
