"""Buffers changed where they are, as plain training changes them, and not by way of a copy.

AOTAutograd captures a training step as one that changes nothing: batch norm returns new running statistics, which
are copied into the buffers once the forward program has run. That is two copies and as many allocations a buffer
more than plain training makes, for a few numbers each: nothing but launches. Where nothing else reads a buffer,
the operator that computes its new contents writes them into the buffer itself.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from monetlite.operators.batch_norm import batch_norm_, batch_norm_in_buffers_
from monetlite.runtime.lowering import UPDATES
from monetlite.tracing.capture import Boxed, boxed

_FUNCTIONAL = "_functional"
"""How PyTorch ends the name of what returns the new contents of arguments that another operator changes."""


class _InPlace(NamedTuple):
    """What to call in an operator's place: for each result that is an argument's new contents, which argument."""

    target: Callable[..., Any]
    changes: Mapping[int, int]


_OURS = {batch_norm_: _InPlace(batch_norm_in_buffers_, {3: 3, 4: 4})}


def eager(program: fx.GraphModule, inputs: Sequence[Any] = (), internal: Collection[int] = ()) -> Boxed:
    """A program as `boxed` makes it, which changes buffers where they are."""
    update_in_place(program)
    return boxed(program, inputs, internal)


def update_in_place(program: fx.GraphModule) -> None:
    """Have a forward program write new contents of its inputs into those, where its output says which they are.

    Not where anything but the operator that makes the new contents reads the input, or where a result is read by
    anyone but AOTAutograd, which copies it into the input: a tensor copied into itself stays as it is.
    """
    output = program.graph.output_node()
    results: Any = output.args[0]
    inputs = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    updates: dict[fx.Node, dict[int, tuple[fx.Node, fx.Node]]] = {}
    for position, name in output.meta.get(UPDATES, {}).items():
        given, made = inputs[name], results[position]
        producer, at = _made_by(made)
        if list(given.users) == [producer] and _returned_once(made, results) and _alike(given, made):
            updates.setdefault(producer, {})[at] = given, made
    for producer, changed in updates.items():
        in_place = _in_place(producer)
        if in_place is None or not _changes_all(producer, in_place.changes, changed):
            continue
        producer.target = in_place.target
        for given, made in changed.values():
            if made is not producer:
                made.replace_all_uses_with(given)
                program.graph.erase_node(made)


def _made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """What computes a tensor, and which of its results it is."""
    if node.target is operator.getitem:
        producer, at = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(at, int)
        return producer, at
    return node, 0


def _returned_once(node: fx.Node, results: Sequence[fx.Node | None]) -> bool:
    return [user.op for user in node.users] == ["output"] and results.count(node) == 1


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors have one shape, one layout and one type."""
    first, second = one.meta.get("val"), other.meta.get("val")
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
        and first.device == second.device
        and not first.requires_grad
    )


def _in_place(node: fx.Node) -> _InPlace | None:
    """What changes a call's arguments where the call returns their new contents; None where there is nothing."""
    target: Any = node.target
    if target in _OURS:
        return _OURS[target]
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    if name.endswith(_FUNCTIONAL):
        changing = _overload(name.removesuffix(_FUNCTIONAL), target)
        first = 0 if changing is None else len(changing._schema.returns)
    else:
        changing = _overload(f"{name}_", target) if torch.Tag.pointwise in target.tags else None
        first = 0
    if changing is None:
        return None
    return _InPlace(changing, {first + number: at for number, at in enumerate(_changed_by(changing))})


def _overload(name: str, like: OpOverload) -> OpOverload | None:
    """The operator of this name that takes what another does."""
    found = getattr(getattr(torch.ops.aten, name, None), like._overloadname, None)
    if not isinstance(found, OpOverload):
        return None
    taken, wanted = ([argument.name for argument in item._schema.arguments] for item in (found, like))
    return found if taken == wanted else None


def _changed_by(target: OpOverload) -> list[int]:
    """Positions of the arguments that an operator changes."""
    arguments = enumerate(target._schema.arguments)
    return [at for at, item in arguments if item.alias_info is not None and item.alias_info.is_write]


def _changes_all(
    producer: fx.Node, changes: Mapping[int, int], changed: Mapping[int, tuple[fx.Node, fx.Node]]
) -> bool:
    """Whether an operator would change just the inputs that it should, none of which it reads another time."""
    read: list[fx.Node] = []
    fx.map_arg((producer.args, producer.kwargs), read.append)
    return changes.keys() == changed.keys() and all(
        len(producer.args) > changes[at] and producer.args[changes[at]] is given and read.count(given) == 1
        for at, (given, _) in changed.items()
    )


__all__ = ["eager", "update_in_place"]
