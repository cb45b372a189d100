"""Buffers changed where they are, as plain training changes them, and not by way of a copy.

AOTAutograd captures a training step as one that changes nothing: batch norm returns new running statistics, which
are copied into the buffers once the forward program has run. That is two copies and two allocations a buffer
more than plain training makes, for a few numbers each: nothing but launches. Where nothing else reads a buffer,
the operator that computes its new contents writes them into the buffer itself.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from monetlite.fx.torch_internals.torch_dispatch import OpOverload, schema_of
from monetlite.operators.batch_norm import batch_norm_, batch_norm_in_buffers_
from monetlite.runtime.lowering import UPDATES
from monetlite.tracing.capture import Boxed, boxed

_FUNCTIONAL = "_functional"
"""PyTorch's suffix of an operator that returns the new contents of the arguments that another operator changes."""


class InPlaceOperator(NamedTuple):
    """An operator that changes arguments, and for each result of the one it replaces, the argument it changes."""

    target: Callable[..., Any]
    changes: Mapping[int, int]


_OURS = {batch_norm_: InPlaceOperator(batch_norm_in_buffers_, {3: 3, 4: 4})}


def eager(program: fx.GraphModule, inputs: Sequence[Any] = (), internal: Collection[int] = ()) -> Boxed:
    """A program as `boxed` makes it, which changes buffers where they are."""
    _update_in_place(program)
    return boxed(program, inputs, internal)


def _update_in_place(program: fx.GraphModule) -> None:
    """Have a forward program write the new contents of its inputs into those.

    Inputs that another operator reads, and results that anyone but AOTAutograd reads, stay as they are. AOTAutograd
    copies the result into the input: a tensor copied into itself does not change.
    """
    output = program.graph.output_node()
    results: Any = output.args[0]
    inputs = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    updates: dict[fx.Node, dict[int, tuple[fx.Node, fx.Node]]] = {}
    for position, name in output.meta.get(UPDATES, {}).items():
        given, made = inputs[name], results[position]
        producer, at = made.args if made.target is operator.getitem else (made, 0)
        returned_once = [user.op for user in made.users] == ["output"] and results.count(made) == 1
        if list(given.users) == [producer] and returned_once and _alike(given, made):
            updates.setdefault(producer, {})[at] = given, made
    for producer, changed in updates.items():
        in_place = _in_place(producer.target)
        if in_place is None or not _changes_all(producer, in_place.changes, changed):
            continue
        producer.target = in_place.target
        for given, made in changed.values():
            if made is not producer:
                made.replace_all_uses_with(given)
                program.graph.erase_node(made)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Check that two tensors have one shape, strides, dtype and device, and the first no gradient."""
    first, second = one.meta.get("val"), other.meta.get("val")
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and (first.shape, first.stride(), first.dtype, first.device)
        == (second.shape, second.stride(), second.dtype, second.device)
        and not first.requires_grad
    )


def _in_place(target: Any) -> InPlaceOperator | None:
    """The operator that changes its arguments in place of one that returns their new contents, if there is one."""
    if target in _OURS:
        return _OURS[target]
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target.overloadpacket.__name__
    if name.endswith(_FUNCTIONAL):
        changing = _overload(name.removesuffix(_FUNCTIONAL), target)
        first = 0 if changing is None else len(schema_of(changing).returns)
    else:
        changing = _overload(f"{name}_", target) if torch.Tag.pointwise in target.tags else None
        first = 0
    if changing is None:
        return None
    arguments = enumerate(schema_of(changing).arguments)
    changed = [at for at, item in arguments if item.alias_info is not None and item.alias_info.is_write]
    return InPlaceOperator(changing, {first + number: at for number, at in enumerate(changed)})


def _overload(name: str, like: OpOverload) -> OpOverload | None:
    """The operator of this name with the parameters of another."""
    found = getattr(getattr(torch.ops.aten, name, None), str(like).rpartition(".")[2], None)
    if not isinstance(found, OpOverload):
        return None
    taken, wanted = ([argument.name for argument in schema_of(item).arguments] for item in (found, like))
    return found if taken == wanted else None


def _changes_all(
    producer: fx.Node, changes: Mapping[int, int], changed: Mapping[int, tuple[fx.Node, fx.Node]]
) -> bool:
    """Check that an operator would change exactly the inputs that it should, and reads each once."""
    read: list[fx.Node] = []
    fx.map_arg((producer.args, producer.kwargs), read.append)
    return changes.keys() == changed.keys() and all(
        len(producer.args) > changes[at] and producer.args[changes[at]] is given and read.count(given) == 1
        for at, (given, _) in changed.items()
    )
