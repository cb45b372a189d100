"""The choice of the schedule that serves a training step, and what is known of a step before it runs."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from monetlite.core.announcing import warn
from monetlite.core.binding import autocast_problem, by_default
from monetlite.core.costs import without_costs
from monetlite.core.errors import ModelError
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import storage_key, stored
from monetlite.profiling.step_additions import with_additions
from monetlite.tracing.attention_masks import is_known

CONSTANTS = (bool, int, float, complex)
"""Types of arguments whose values a program is compiled for. Dynamo's guards notice a change of any other.

Texts are often names of samples, which nobody reads.
"""
PLAIN_SHARE = 0.8
"""Share of the budget that plain training may store, for inputs that no schedule can be applied to. The rest is for
workspace."""
ALIKE_SHARE = 0.5
"""Share of kinds of operators that a model on other inputs has in common with what a schedule was solved for."""


class TooLarge(ModelError):
    """A step that would take more memory than the budget of its schedule."""


def input_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shapes, strides, dtypes and devices of tensors, and the constants, that a program is compiled for.

    One item for each leaf, and then the structure.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    described = (
        (
            leaf.shape,
            leaf.stride() if leaf.layout is torch.strided else leaf.layout,
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
        )
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf) if isinstance(leaf, CONSTANTS) else "")
        for leaf in leaves
    )
    return (*described, str(structure))


def shapes_of(signature: Any) -> tuple[Any, ...]:
    """The part of a signature that tells shapes apart."""
    return tuple(item[0] for item in signature if isinstance(item, tuple) and isinstance(item[0], tuple))


def without_guards(graph: OperatorGraph, steps: tuple[Step, ...], operators: Collection[str]) -> tuple[Step, ...]:
    """The same steps, with the default implementation of some operators in place of a guarded one."""
    guarded = {
        at
        for at, (index, choice) in enumerate(steps)
        if graph.operators[index].name in operators
        and graph.operators[index].implementations[choice].guard is not None
    }
    return by_default(graph, steps, guarded)


def size_served(schedule: Schedule) -> tuple[int, int]:
    """Elements of the inputs; then the step's memory, which tells apart inputs inside of objects."""
    return sum(math.prod(spec.shape) for spec in schedule.inputs.values()), schedule.plain_peak_bytes


def serving_problem(
    schedule: Schedule, tensors: Sequence[torch.Tensor], autocast: str, names: Sequence[str] = ()
) -> str | None:
    """The reason why a schedule can't serve some inputs, whose arguments have these names; None if it can."""
    if schedule.autocast != autocast:
        return autocast_problem(schedule.autocast, autocast)
    expected = list(schedule.inputs.values())
    if len(tensors) != len(expected):
        given = f" ({', '.join(names)})" if names else ""
        leave_out = ""
        if len(tensors) > len(expected):
            masks = [name for name in names if name.endswith("mask")]
            same = f": an all-ones {masks[0]} changes nothing, one with padding does" if masks else ""
            leave_out = f"leave out what it was solved without{same}. Or "
        return (
            f"the schedule was solved for {len(expected)} input tensors, this call has {len(tensors)}{given}; "
            f"{leave_out}solve for these inputs: monetlite.within(model, "
            f'budget="{format_bytes(schedule.budget_bytes)}") does so at the first step, '
            "and monetlite.optimize makes a schedule to keep"
        )
    for number, (tensor, spec) in enumerate(zip(tensors, expected, strict=True)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype:
            return (
                f"input {number} is {dtype}, the schedule was solved for {spec.dtype}; "
                f"convert the input, or solve a schedule for {dtype}"
            )
        if tensor.requires_grad != spec.requires_grad:
            ways = [
                f"{'requires' if needs else 'does not require'} a gradient"
                for needs in (tensor.requires_grad, spec.requires_grad)
            ]
            return (
                f"input {number} {ways[0]}, the schedule was solved for one that {ways[1]}; "
                "solve with example inputs that have requires_grad as the step's do"
            )
        if is_known(spec) and not is_known(tensor):
            return (
                f"input {number} is an attention mask with padding, the schedule was solved for one of ones, which "
                "transformers leaves out; solve with padding in the example inputs, which serves any mask"
            )
        shape = tuple(tensor.shape)
        if len(shape) != len(spec.shape) or any(size > most for size, most in zip(shape, spec.shape, strict=True)):
            return (
                f"input {number} has shape {shape}, the schedule was solved for {spec.shape} and serves inputs "
                "that are no larger in any dimension; solve a schedule for this shape"
            )
    return None


def same_masks(schedule: Schedule, tensors: Sequence[torch.Tensor]) -> bool:
    """True if the same inputs are masks of ones as those that a schedule was solved for."""
    return [is_known(tensor) for tensor in tensors] == [is_known(spec) for spec in schedule.inputs.values()]


def plain_if_smaller(schedule: Schedule, graph: OperatorGraph) -> tuple[Step, ...] | None:
    """The steps of plain training, for inputs so small that torch runs other operators on them.

    A batch or a sequence of one is not always computed as several are. Nothing has to be recomputed for it, if its
    values take well less than the budget. A schedule of another model is none for smaller inputs.
    """
    found, expected = ([item.shape for item in of.inputs.values()] for of in (graph, schedule))
    theirs, ours = set(schedule.operator_digests), set(graph.operator_digests)  # a loop may have fewer rounds
    steps = plain_steps(graph)
    peak_bytes = simulate(without_costs(graph), steps).peak_bytes
    if found == expected or peak_bytes > PLAIN_SHARE * schedule.budget_bytes:
        return None
    if theirs and len(theirs & ours) < ALIKE_SHARE * len(theirs | ours):
        return None
    warn(
        f"for inputs of shapes {', '.join(map(str, found))} this model runs other operators than its schedule "
        f"is for (as for a batch or a sequence of one). They run as in plain training, which stores "
        f"{format_bytes(peak_bytes)} of the {format_bytes(schedule.budget_bytes)} budgeted"
    )
    return steps


def values_bytes(schedule: Schedule, graph: OperatorGraph, steps: Sequence[Step]) -> int:
    """The peak of values alone, with the optimizer and the earlier gradients that the schedule counts."""
    profile = with_additions(without_costs(graph), schedule)
    added = range(len(graph.operators), len(profile.graph.operators))
    steps = (*steps, *((index, 0) for index in added))
    return simulate(profile, steps).peak_bytes - graph.resident.total


def own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, without the rest of their storages: a batch may be part of a data set."""
    sizes: dict[int, tuple[int, int]] = {}
    for tensor in itertools.chain.from_iterable(map(stored, tensors)):
        key = storage_key(tensor)
        _, known = sizes.get(key, (0, 0))
        sizes[key] = tensor.untyped_storage().nbytes(), known + tensor.nbytes
    return sum(min(whole, parts) for whole, parts in sizes.values())
