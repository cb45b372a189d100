"""Lowered programs compiled by Inductor, which fuses operators between the values that a schedule stores.

Inductor plans the memory inside each program by itself, fuses elementwise operators and rounds as its kernels do:
the prediction of the peak is then an estimate, and results differ in their last bits. The schedule still decides
which values are stored between the programs, and which are recomputed in the second.

Inductor orders calls by their data alone. So each draw of random numbers becomes an operator that takes something
of the draw before it, and notes the generator's state that it begins from: the numbers are those of an eager run.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from monetlite.core.errors import ModelError
from monetlite.core.graph import OperatorGraph
from monetlite.core.steps import Step
from monetlite.fx.call_encoding import fake_mode
from monetlite.fx.torch_internals.torch_aot import boxed_function
from monetlite.fx.torch_internals.torch_dispatch import OpOverload, schema_of
from monetlite.fx.torch_internals.torch_graph_modules import graph_module
from monetlite.fx.torch_internals.torch_inductor import (
    compile_program,
    decomposed,
    force_strides,
    output_strides,
)
from monetlite.operators import is_random, resolve
from monetlite.operators.changing import changed
from monetlite.operators.implementations import PREFIX, name_of, returns_tuple
from monetlite.operators.normalization import require_invertible
from monetlite.operators.random import replay, rng_state, state_bytes
from monetlite.operators.traits import traits_of
from monetlite.runtime.unused_outputs import no_nan_unless_given
from monetlite.tracing.capture import Boxed, flat_outputs

NEGLIGIBLE_BYTES = 2**16
"""Extra reads up to this size are accepted for an implementation that Inductor can fuse."""


def as_inductor_fuses(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps, each by the first implementation that reads and writes the same values and overwrites none.

    Inductor decides by itself about results in place and workspace in parts, and it can fuse the default
    implementations. One may read more if that is negligible.
    """

    def plainer(index: int, choice: int) -> int:
        implementations = graph.operators[index].implementations
        chosen = implementations[choice]
        for number, item in enumerate(implementations):
            more = {*item.reads} - {*chosen.reads}
            if (
                {*item.reads} >= {*chosen.reads}
                and item.writes == chosen.writes
                and not item.overwrites
                and sum(graph.values[value].size_bytes for value in more) <= NEGLIGIBLE_BYTES
            ):
                return number
        return choice

    return tuple((index, plainer(index, choice)) for index, choice in steps)


def inductor(program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
    """Compile a program (see `Compiler`) to a function of one list.

    Results that only other programs read stay in the layout in which Inductor computes them, as channels-last
    around convolutions on a CPU; those programs are compiled for that.

    Raises:
        ModelError: a program that checks a guard, or draws random numbers in place or in the backward pass.
    """
    for node in list(program.graph.nodes):
        if node.target is no_nan_unless_given:  # it depends on the step
            program.graph.erase_node(node)
        elif node.target is require_invertible:
            raise ModelError(
                "the schedule runs an implementation that checks its weights first, which Inductor can't compile. "
                "Solve with implementations='default', or run the schedule without compile=True"
            )
    program = with_draws(program)
    placeholders = program.graph.find_nodes(op="placeholder")
    captured: list[Any] = [node.meta["val"] for node in placeholders]
    if not captured:
        raise ModelError("a program without inputs can't be compiled")
    mode = fake_mode(placeholders[0])
    # Our functions look things up in tables, which are real tensors.
    with patch.object(mode, "allow_non_fake_inputs", True):
        # They become operators of torch. Those go by the order of elements in the captured layouts, which is the
        # same in every program.
        traced = decomposed(lambda *args: program(*args), captured, mode)
        _as_captured(traced, captured, inputs)
        results = flat_outputs(traced)
        # Other code reads these in the strides that they were captured with.
        visible = {at: item for at, item in enumerate(results) if item is not None and at not in internal}
        tensors = {at: made for at, item in visible.items() if isinstance(made := item.meta["val"], torch.Tensor)}
        force_strides(traced, visible, {at: made.stride() for at, made in tensors.items() if made.dim() > 2})
        compiled = compile_program(traced, inputs)

    def run(args: list[Any]) -> Any:
        return compiled(args)

    run.output_strides = output_strides(compiled)  # type: ignore[attr-defined]  # read by `gradient_delivery`
    return boxed_function(run)


def _as_captured(program: fx.GraphModule, captured: Sequence[Any], given: Sequence[Any]) -> None:
    """Copy inputs of other strides to those that a program was traced with, if it sees storage by `as_strided`.

    Other operators go by the order of a tensor's elements, whatever its strides.
    """
    if not any(traits_of(str(node.target)).by_storage for node in program.graph.nodes):
        return
    placeholders = program.graph.find_nodes(op="placeholder")
    for node, value, item in zip(placeholders, captured, given, strict=True):
        if isinstance(value, torch.Tensor) and value.stride() != item.stride():
            readers = list(node.users)
            with program.graph.inserting_after(placeholders[-1]):
                copy = program.graph.call_function(
                    torch.ops.aten.new_empty_strided.default, (node, value.shape, value.stride())
                )
            with program.graph.inserting_after(copy):
                filled = program.graph.call_function(torch.ops.aten.copy.default, (copy, node))
            for reader in readers:
                reader.replace_input_with(node, filled)
    program.recompile()


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
        if node.target is replay:
            state, device, name, *args = node.args
            again = _draw_operators(resolve(str(name)))[1]
            node.target, node.args = again, (state, device, *args)
        elif node.target is rng_state:
            _refuse_if(noted is not None, noted)
            noted = node
        elif node.op == "call_function" and is_random(node):
            _refuse_if(noted is None, node)
            assert noted is not None
            last, noted = _draw(graph, node, noted, last), None
    _refuse_if(noted is not None, noted)
    graph.lint()
    return graph_module(program, graph)


def _refuse_if(wrong: bool, node: object) -> None:
    if wrong:
        raise ModelError(
            f"the schedule draws random numbers at {node} in a way that Inductor can't compile "
            "(over what it reads, or in the backward pass). Solve with implementations='default', or run the "
            "schedule without compile=True"
        )


def _draw(graph: fx.Graph, node: fx.Node, noted: fx.Node, last: fx.Node | None) -> fx.Node:
    """Replace the node that notes the state and the node that draws by one draw; returns the state."""
    draw, _ = _draw_operators(node.target)
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
    return len(schema_of(target).returns) > 1 if isinstance(target, OpOverload) else returns_tuple(target)


@cache
def _draw_operators(target: Any) -> tuple[Any, Any]:
    """(draw, draw again) for a function that draws random numbers: torch's operator, or one of ours.

    `draw(after, device, …)` returns the state that it begins from and then the function's results; `after` is a
    state that was noted earlier, or None. `draw again(state, device, …)` returns the function's results. Their
    schemas have other names for these, as the function may have a `device` of its own.
    """
    if isinstance(target, OpOverload):
        _refuse_if(schema_of(target).is_mutable, target)
        text, target_name = str(schema_of(target)), str(target)
    else:
        target_name = name_of(target)
        _refuse_if(target is changed or target_name.endswith("_"), target)
        text = torch.library.infer_schema(target, mutates_args=())
    name = target_name.removeprefix(PREFIX).replace(".", "_")
    arguments, returns = text.split("(", 1)[1].rsplit(") -> ", 1)
    results = returns.removeprefix("(").removesuffix(")")
    several = _returns_several(target)

    def draw_from(state_of: Callable[[str], torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def draw(_: torch.Tensor | None, device: str, /, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            state = state_of(device)
            made = target(*args, **kwargs)
            return (state, *made) if several else (state, made)

        return draw

    def fake_state(device: str) -> torch.Tensor:
        return torch.empty(state_bytes(device), dtype=torch.uint8, device="cpu")

    def redraw(state: torch.Tensor, device: str, /, *args: Any, **kwargs: Any) -> Any:
        return replay(state, device, target_name, *args, **kwargs)

    def fake_redraw(_: torch.Tensor, __: str, /, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return (
        _registered(
            f"draw_{name}(Tensor? noted_before, str drawn_on, {arguments}) -> (Tensor, {results})",
            draw_from(rng_state),
            draw_from(fake_state),
        ),
        _registered(f"redraw_{name}(Tensor noted, str drawn_on, {arguments}) -> {returns}", redraw, fake_redraw),
    )


def _registered(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register a function with torch as a random operator."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,))
    _LIBRARY.impl(f"monetlite::{name}", run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"monetlite::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.monetlite, name).default


_LIBRARY: Any = torch.library.Library("monetlite", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it
