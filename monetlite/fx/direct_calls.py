"""A captured program as a Python function that adds little to each operator beyond what plain training does.

A captured program calls `torch.ops.aten.add.Tensor`, a Python function that reads its arguments by the operator's
schema. Plain training calls `torch.add` or `tensor.add_`, generated for the operator, in half the time. Such a
function takes the operator's place here if it calls the same operator with the same arguments. Its name is no proof
of that: each call is made once, stopped at the operator, and the arguments that arrive are compared. Operators
without such a function (gradients, mostly) are called by their schema. Views that change nothing are left out.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from monetlite.fx.storages import is_view
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_aot import function_of, set_boxed
from monetlite.fx.torch_internals.torch_dispatch import (
    GENERATED_FUNCTIONS,
    OpOverload,
    TorchDispatchMode,
    schema_of,
    unchecked,
    without_modes,
)
from monetlite.fx.varying_sizes import Size, sizes_of
from monetlite.fx.view_strides import strides_of_view

_ALL_IF_OF_ONE_SHAPE = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.expand.default",
        "aten.alias.default",
        "aten.detach.default",
        "aten.slice.Tensor",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    }
)
"""Views whose result is their argument where both have one shape, but for strides of dimensions of one."""
_BY_SHAPE = frozenset({"aten.view.default", "aten._unsafe_view.default"})
"""Those among them that give dimensions of one the strides that follow from the shape."""
_METHODS = {"view": "reshape"}
"""Methods that call an operator, by its name, where that is not its own. Some kernels lay a result out otherwise
than in a capture (`softplus_backward`, of operands in two layouts), and what was a view there is a copy."""


class _NamedFunction:
    """A function under a name of its own, which generated code looks up once."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def as_function(program: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Turn a program into a function of one list, which it empties: arguments die at their last use.

    Args:
        program: its nodes have captured tensors in `meta["val"]`; a call of a node without one is left as it is.
            Its graph becomes that of the function.
    """
    graph = program.graph
    launched: dict[Callable[..., Any], _NamedFunction] = {}
    for node, function in _direct(graph):
        if isinstance(function, str):
            node.op, node.target = "call_method", function
        else:
            name = f"{node.target}".replace(".", "_")
            node.target = launched.setdefault(function, _NamedFunction(function, name))
    set_boxed(graph)
    code = graph.python_code("self")
    names = {
        name: item.function if isinstance(item, _NamedFunction) else item for name, item in code.globals.items()
    }
    return functools.partial(function_of(code.src, names), program)


def _direct(graph: fx.Graph) -> list[tuple[fx.Node, Callable[..., Any] | str]]:
    """The calls of operators, once views that change nothing are left out.

    Each is with what to call in its place: a function, or the name of a tensor's method.
    A graph in which sizes are still symbols stays as it is: to ask for their values would make constants of them.
    """
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.nodes):
        return []
    _leave_out_views(graph)
    recorder = _CallRecorder()
    with without_modes():
        return [
            (node, _same_call(node, node.target, recorder) or unchecked(node.target))
            for node in graph.nodes
            if node.op == "call_function" and isinstance(node.target, OpOverload)
        ]


def _leave_out_views(graph: fx.Graph) -> None:
    """Take out views that change nothing: of all of a tensor in its own shape, or undone by the next.

    Not those that the program returns: what is returned twice is not the same as two views of it. Nor those that
    give a dimension of one another stride: the same elements, but matrix products choose a kernel by it.
    """
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        viewed = _viewed(node)
        if viewed is None:
            continue
        before = _viewed(viewed)
        if str(node.target) == "aten.view.default" and str(viewed.target) == "aten.view.default":
            if before is not None and _strides(node, viewed) == _strides(node, before):
                node.update_arg(0, before)
                viewed = before
        elif str(node.target) == "aten.t.default" and str(viewed.target) == "aten.t.default":
            viewed = before
        elif str(node.target) not in _ALL_IF_OF_ONE_SHAPE:
            continue
        if viewed is None or node in returned or _shape(node) is None or _shape(node) != _shape(viewed):
            continue
        if str(node.target) not in _BY_SHAPE or _strides(node, viewed) == list(viewed.meta["val"].stride()):
            node.replace_all_uses_with(viewed)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if not node.users and _viewed(node) is not None:
            graph.erase_node(node)


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a view is of; None if a node is not a view."""
    return cast("fx.Node", node.args[0]) if is_view(node) else None


def _strides(view: fx.Node, source: fx.Node) -> list[int] | None:
    """The strides that a kernel gives a view of a tensor; None where they are not known."""
    made, viewed = view.meta.get("val"), source.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(viewed, torch.Tensor):
        return None
    return strides_of_view(made.shape, made.stride(), viewed)


def _shape(node: fx.Node) -> tuple[Any, ...] | None:
    """A tensor's shape. A size that varies is none of the numbers that it may be."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return None
    return tuple(size.expression if isinstance(size, Size) else size for size in sizes_of(tensor)[0])


def _same_call(node: fx.Node, target: OpOverload, recorder: "_CallRecorder") -> Callable[..., Any] | str | None:
    """A function or method that calls a node's operator with the node's arguments; None where there is none."""
    given = _stand_ins(node)
    if given is None or target.namespace != "aten":
        return None
    args, kwargs = given
    name: str = target.overloadpacket.__name__
    if args and isinstance(args[0], torch.Tensor) and (name.endswith("_") or target.is_view):
        name = _METHODS.get(name, name)
        method = getattr(torch.Tensor, name, None)
        if method is not None and recorder.reaches(target, args, kwargs, method):
            return name
    for namespace in GENERATED_FUNCTIONS:
        function = getattr(namespace, name, None)
        if function is not None and recorder.reaches(target, args, kwargs, function):
            return cast("Callable[..., Any]", function)
    return None


def _stand_ins(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A call's arguments, with tensors without memory in place of nodes; None if what one is, is not known."""
    empty: dict[fx.Node, torch.Tensor | int] = {}
    for item in node.all_input_nodes:
        tensor = item.meta.get("val")
        if isinstance(tensor, Size):
            empty[item] = int(tensor)
            continue
        if not isinstance(tensor, torch.Tensor):
            return None
        empty[item] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    args, kwargs = fx.map_arg((node.args, node.kwargs), empty.__getitem__)
    return tuple(args), dict(kwargs)


class _Stopped(Exception):
    """Ends a call at the operator that it reaches."""


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Says whether a function calls an operator with given arguments, without running it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._reached: tuple[OpOverload, Sequence[Any], dict[str, Any]] | None = None

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._reached = (func, args, kwargs or {})
        raise _Stopped

    def reaches(self, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], call: Any) -> bool:
        """Tell whether `call(*args, **kwargs)` calls `target` first, with these arguments."""
        self._reached = None
        try:
            with self, torch.no_grad():
                call(*args, **kwargs)
        except _Stopped:
            pass
        except (TypeError, RuntimeError, ValueError, NotImplementedError):
            return False
        if self._reached is None or self._reached[0] is not target:
            return False
        wanted, reached = _complete(target, args, kwargs), _complete(target, *self._reached[1:])
        return len(wanted) == len(reached) and all(itertools.starmap(_same, zip(wanted, reached, strict=True)))


def _complete(target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of an operator in the order of its schema, defaults included, lists taken apart."""
    values = [
        args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
        for at, argument in enumerate(schema_of(target).arguments)
    ]
    return pytree.tree_leaves([list(value) if isinstance(value, (list, tuple)) else value for value in values])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)
