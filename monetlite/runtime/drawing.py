"""Random operators for Inductor: noting the generator's state, drawing, and drawing the same again, as operators.

Inductor orders calls by their data alone, so each draw takes something of the one before it, and notes the state
that it begins from itself: the numbers are those of an eager run.
"""

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

from monetlite.core.errors import ModelError
from monetlite.operators import is_random, resolve
from monetlite.operators.random import replay, rng_state, state_bytes
from monetlite.operators.registry import PREFIX, name_of, returns_tuple


def with_draws(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, every random operator in it one that Inductor keeps whole and in its place.

    Raises:
        ModelError: random numbers are drawn in place, or where no state was noted.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    noted: fx.Node | None = None
    last: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is replay:
            state, device, name, *args = node.args
            with graph.inserting_before(node):
                again = graph.call_function(_operators(resolve(str(name)))[1], (state, device, *args), node.kwargs)
            node.replace_all_uses_with(again)
            graph.erase_node(node)
        elif node.target is rng_state:
            _refuse_if(noted is not None, noted)
            noted = node
        elif is_random(node):
            _refuse_if(noted is None, node)
            assert noted is not None
            last = _draw(graph, node, noted, last)
            noted = None
    _refuse_if(noted is not None, noted)
    graph.lint()
    return fx.GraphModule(program, graph)


def _refuse_if(wrong: bool, node: object) -> None:
    if wrong:
        raise ModelError(
            f"the schedule draws random numbers at {node} in a way that Inductor can't compile "
            "(over what it reads, or in the backward pass). Solve with implementations='default', or run the "
            "schedule without compile=True"
        )


def _draw(graph: fx.Graph, node: fx.Node, noted: fx.Node, last: fx.Node | None) -> fx.Node:
    """Put one draw in place of the node that notes the state and the node that draws; returns the state."""
    draw, _ = _operators(node.target)
    with graph.inserting_before(node):
        drawn = graph.call_function(draw, (last, noted.args[0], *node.args), node.kwargs)
        state = graph.call_function(operator.getitem, (drawn, 0))
    noted.replace_all_uses_with(state)
    graph.erase_node(noted)
    if not _returns_several(node.target):
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (drawn, 1)))
    else:
        for item in list(node.users):
            position: Any = item.args[1]
            item.args = (drawn, position + 1)
    graph.erase_node(node)
    return state


def _returns_several(target: Any) -> bool:
    return len(target._schema.returns) > 1 if isinstance(target, torch._ops.OpOverload) else returns_tuple(target)


@cache
def _operators(target: Any) -> tuple[Any, Any]:
    """(draw, draw again) for a function that draws random numbers: torch's operator, or one of ours.

    `draw(after, device, …)` returns the state that it begins from and then the function's results; `after` is a
    state that was noted earlier, or None. `draw again(state, device, …)` returns the function's results. Their
    schemas have other names for these, as the function may have a `device` of its own.
    """
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        _refuse_if(schema.is_mutable, target)
        text, target_name, name = str(schema), str(target), str(target).replace(".", "_")
    else:
        target_name = name_of(target)
        name = target_name.removeprefix(PREFIX)
        _refuse_if(name.endswith("_"), target)
        text = torch.library.infer_schema(target, mutates_args=())
    arguments, returns = text.split("(", 1)[1].rsplit(") -> ", 1)
    results = returns.removeprefix("(").removesuffix(")")
    several = _returns_several(target)

    def draw(_: torch.Tensor | None, device: str, /, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        state = rng_state(device)
        made = target(*args, **kwargs)
        return (state, *made) if several else (state, made)

    def fake_draw(_: torch.Tensor | None, device: str, /, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        state = torch.empty(state_bytes(device), dtype=torch.uint8, device="cpu")
        made = target(*args, **kwargs)
        return (state, *made) if several else (state, made)

    def redraw(state: torch.Tensor, device: str, /, *args: Any, **kwargs: Any) -> Any:
        return replay(state, device, target_name, *args, **kwargs)

    def fake_redraw(_: torch.Tensor, __: str, /, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    made = []
    for schema_text, run, fake in (
        (f"draw_{name}(Tensor? noted_before, str drawn_on, {arguments}) -> (Tensor, {results})", draw, fake_draw),
        (f"redraw_{name}(Tensor noted, str drawn_on, {arguments}) -> {returns}", redraw, fake_redraw),
    ):
        full_name = f"monetlite::{schema_text.split('(')[0]}"
        _LIBRARY.define(schema_text, tags=(torch.Tag.nondeterministic_seeded,))
        _LIBRARY.impl(full_name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(full_name, fake, lib=_LIBRARY)
        made.append(getattr(torch.ops.monetlite, schema_text.split("(")[0]).default)
    return made[0], made[1]


_LIBRARY: Any = torch.library.Library("monetlite", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it

__all__ = ["with_draws"]
