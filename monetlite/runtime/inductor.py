"""Lowered programs compiled by Inductor: its fusion inside of what a schedule stores and recomputes.

Inductor plans the memory inside each program by itself, fuses elementwise operators and rounds as its kernels do:
the prediction of the peak is then an estimate, and results differ in their last bits. What is stored between the
programs, and what is recomputed in the second, stays the schedule's choice.
"""

from collections.abc import Collection, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from monetlite.core.errors import ModelError
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Step
from monetlite.fx.calls import fake_mode
from monetlite.operators.batch_norm_backward import require_invertible
from monetlite.operators.guards import require
from monetlite.runtime.drawing import with_draws
from monetlite.tracing.capture import Boxed

NEXT_TO_NOTHING = 2**16
"""Bytes."""
BY_STRIDES = frozenset(
    {
        torch.ops.aten.as_strided.default,
        torch.ops.aten.as_strided_copy.default,
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.resize.default,
    }
)
"""Operators that see a tensor's storage, so that its strides matter to what they compute."""


def as_inductor_fuses(graph: OperatorGraph, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same steps, each by the first implementation that reads and writes the same values, over none of them.

    What others are for, results in place or workspace in parts, Inductor decides by itself inside a program; and
    default ones are those that it can fuse. One may read more, where that is next to nothing.
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
                and sum(graph.values[value].size_bytes for value in more) <= NEXT_TO_NOTHING
            ):
                return number
        return choice

    return tuple((index, plainer(index, choice)) for index, choice in steps)


def inductor(program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
    """A program, compiled (see `Compiler`); a function of one list, as `boxed` makes.

    What only other programs read is left in the layout in which Inductor computes it, as channels-last around
    convolutions on a CPU; those programs are compiled for that.

    Raises:
        ModelError: a program that checks a guard, or draws random numbers in place or in the backward pass, which
            can't be compiled.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in (require, require_invertible):
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
    with mode, patch.object(mode, "allow_non_fake_inputs", True):
        # Our own functions become torch's operators, and those the ones that Inductor knows. They go by the order
        # of elements in the captured layouts, in every program the same.
        traced = make_fx(torch.func.functionalize(lambda *args: program(*args)), select_decomp_table())(*captured)
    _as_captured(traced, captured, inputs)
    _results_as_captured(traced, internal)
    tables = _lift_constants(traced)
    with torch._inductor.config.patch(fallback_random=True):
        compiled: Any = compile_fx_inner(traced, [*inputs, *map(mode.from_tensor, tables)])

    def run(args: list[Any]) -> Any:
        args.extend(tables)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]  # read by AOTAutograd: `run` empties its list
    run.output_strides = [  # type: ignore[attr-defined]  # read by `parts.laid_out`
        None if strides is None else tuple(map(int, strides)) for strides in compiled.output_strides
    ]
    return run


def _as_captured(program: fx.GraphModule, captured: Sequence[Any], given: Sequence[Any]) -> None:
    """Where a program sees storage through `as_strided`, copy inputs of other strides to those it was traced with.

    Other operators go by the order of a tensor's elements, whatever its strides.
    """
    if not any(node.target in BY_STRIDES for node in program.graph.nodes):
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


def _results_as_captured(program: fx.GraphModule, internal: Collection[int]) -> None:
    """Return what others than our programs read in the strides that it was captured with."""
    from torch._inductor.inductor_prims import force_stride_order

    output = program.graph.output_node()
    given: Any = output.args[0]
    results = list(given)
    outside = [at for at, item in enumerate(results) if isinstance(item, fx.Node) and at not in internal]
    with program.graph.inserting_before(output):
        for at in outside:
            value = results[at].meta["val"]
            if isinstance(value, torch.Tensor) and value.dim() > 2:
                results[at] = program.graph.call_function(force_stride_order, (results[at], value.stride()))
                results[at].meta["val"] = value
    output.args = (tuple(results),)
    output.meta["user_visible_output_idxs"] = outside
    program.recompile()


def _lift_constants(program: fx.GraphModule) -> list[torch.Tensor]:
    """Make further inputs of a program's constant tensors, and return them in that order."""
    constants: dict[str, tuple[torch.Tensor, fx.Node]] = {}
    last = program.graph.find_nodes(op="placeholder")[-1]
    for node in program.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in constants:
            tensor = getattr(program, name)
            with program.graph.inserting_after(last):
                last = program.graph.placeholder(name)
            last.meta["val"] = node.meta.get("val", tensor)
            constants[name] = (tensor, last)
        node.replace_all_uses_with(constants[name][1])
        program.graph.erase_node(node)
    program.recompile()
    return [tensor for tensor, _ in constants.values()]


__all__ = ["as_inductor_fuses", "inductor"]
