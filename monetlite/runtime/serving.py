"""The choice of the schedule that serves a training step: one for inputs at least as large, or one solved for now.

A schedule also serves other sizes than it was solved for, and its structure says nothing of sizes: a number that
the forward pass reads, an attribute, or tensors inside of an object can make a step larger though no input is. So
the peak of every captured step is predicted and compared with the budget.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from monetlite.core.binding import autocast_problem, bind, by_default, lacking
from monetlite.core.costs import without_costs
from monetlite.core.errors import ModelError
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step, plain_steps
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import storage_key
from monetlite.operators.cudnn import with_named_plans
from monetlite.profiling.step_additions import with_accumulation, with_optimizer
from monetlite.runtime.reserved_memory import warn_if_unlimited
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.step_inputs import tensors_in_order

CONSTANTS = (bool, int, float, complex, str, bytes)
"""Types of arguments whose values a program is compiled for. Dynamo's guards notice a change of any other."""
MAX_SOLVED = 8
"""Schedules that one wrapper solves by itself, before it asks for inputs that vary less."""
PLAIN_SHARE = 0.8
"""Share of the budget that plain training may store, for inputs that no schedule can be applied to. The rest is for
workspace."""

Solve: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Sequence[Schedule]], Schedule]
"""Solves for (positional, keyword) arguments, beginning from other schedules of the same model."""


class TooLarge(ModelError):
    """A step that would take more memory than the budget of its schedule."""


def input_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shapes, strides, dtypes and devices of tensors, and the constants, that a program is compiled for."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    described = (
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf) if isinstance(leaf, CONSTANTS) else "")
        for leaf in leaves
    )
    return (*described, str(structure))


class ScheduleSet:
    """The schedules of one model.

    A schedule solved for some inputs also serves smaller ones: a smaller batch, a shorter sequence. Of those that
    serve a call, the one for the smallest inputs is taken. If none does, `solve` makes one, if given.

    Workspace of a captured graph is not known. Once the graph that a schedule was solved for has been captured, its
    workspace there is assumed for other sizes too; before, none is counted.
    """

    def __init__(self, model: nn.Module, given: Sequence[Schedule], solve: Solve | None = None) -> None:
        self.all = sorted(given, key=_size)
        self._model = model
        self._solve = solve
        self._solved = 0
        self._workspace_bytes: dict[tuple[str, int], int] = {}

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str) -> Schedule:
        """The schedule for a call's inputs under an autocast dtype, solved for now if there is none.

        Raises:
            ModelError: none serves them, and none can be solved (any more).
            Those of `monetlite.optimize`.
        """
        serving = self._serving(args, kwargs, autocast)
        if serving:
            return serving[0]
        if self._solve is None:
            tensors = tensors_in_order(self._model, args, kwargs)
            raise ModelError(_problem(self.all[-1], tensors, autocast) or "")
        return self.solve(args, kwargs)

    def solve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """Solve for a call's inputs and the model as it is.

        Raises:
            ModelError: too many have been solved.
            Those of `monetlite.optimize`.
        """
        assert self._solve is not None
        if self._solved >= MAX_SOLVED:
            raise ModelError(
                f"{MAX_SOLVED} schedules have been solved and none serves inputs of shapes "
                f"{', '.join(str(tuple(tensor.shape)) for tensor in _as_passed(args, kwargs))}; pad inputs to "
                "a few sizes (for sequences: pad_to_multiple_of in the collator), or begin with the largest"
            )
        solved = self._solve(args, kwargs, self.all)
        self._solved += 1
        self.all = sorted([solved, *self.all], key=_size)
        return solved

    def plan(
        self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any], found: Schedule
    ) -> tuple[Schedule, Traced, tuple[Step, ...]]:
        """The first schedule for a captured step that keeps to its budget, and the steps to run of the step.

        Args:
            traced: the captured step.
            args, kwargs: inputs of the call.
            found: the schedule that `find` or `solve` returned for them.

        Raises:
            TooLarge: every schedule for this graph would exceed its budget.
            ScheduleMismatch: all are for other graphs.
        """
        inputs, refusal = tensors_in_order(self._model, args, kwargs), None
        for schedule in self._serving(args, kwargs, traced.graph.autocast):
            if schedule.structure == traced.graph.structure:
                try:
                    return schedule, *self.fit(traced, schedule, inputs)
                except TooLarge as error:
                    refusal = refusal or error
        if refusal is not None:
            raise refusal
        if plain := _plain_if_smaller(found, traced.graph):
            return found, traced, plain
        return found, *self.fit(traced, found, inputs)

    def fit(
        self, traced: Traced, schedule: Schedule, inputs: Iterable[torch.Tensor]
    ) -> tuple[Traced, tuple[Step, ...]]:
        """The steps of a schedule on a captured step, by implementations that exist on this device.

        Args:
            traced: the captured step.
            schedule: for its graph.
            inputs: tensors that the step is called with.

        Raises:
            ScheduleMismatch: the schedule is for another graph, or not legal on this one.
            TooLarge: the steps would exceed its budget.
        """
        if schedule.structure == traced.graph.structure:
            # Skips implementations whose tolerance is wider than the schedule's.
            allowed = traced.graph.available(traced.graph.device).restricted(
                lambda item: item.tolerance <= schedule.tolerance
            )
            graph, choices = with_named_plans(allowed, schedule.choices)
            traced, schedule = replace(traced, graph=graph), replace(schedule, choices=choices)
        graph = traced.graph
        warn_if_unlimited(schedule, graph.device)
        steps = bind(schedule, graph)
        key = (schedule.fingerprint, schedule.peak_bytes)
        resident = [*self._model.parameters(), *self._model.buffers(), *inputs]
        peak_bytes = _values_bytes(schedule, graph, steps) + _own_bytes(resident)
        if graph.fingerprint == schedule.fingerprint:
            self._workspace_bytes[key] = max(0, schedule.peak_bytes - peak_bytes)
            return traced, steps
        peak_bytes += self._workspace_bytes.get(key, 0)
        # `bind` has warned of steps that run by default because this device lacks implementations.
        if peak_bytes <= schedule.peak_bytes or lacking(schedule, graph):
            return traced, steps
        problem = (
            f"by the schedule of {schedule.name} this step takes at least {format_bytes(peak_bytes)} "
            f"({peak_bytes} bytes), where {format_bytes(schedule.peak_bytes)} were predicted and "
            f"{format_bytes(schedule.budget_bytes)} ({schedule.budget_bytes} bytes) are the budget. It was solved "
            "for other sizes than the model has with these inputs: a number or flag that the forward pass reads, "
            "tensors inside of objects, or an attribute or a layer of the model"
        )
        if peak_bytes > schedule.budget_bytes:
            raise TooLarge(f"{problem}. Solve a schedule for these inputs and the model as it is, or give a budget")
        warnings.warn(problem, stacklevel=2)
        return traced, steps

    def _serving(self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str) -> list[Schedule]:
        """The schedules that can serve a call's inputs, those for the smallest inputs first."""
        # Files written before inputs were put into the signature's order have them as they were passed.
        orders = [tensors_in_order(self._model, args, kwargs), _as_passed(args, kwargs)]
        return [
            schedule
            for schedule in self.all
            if any(_problem(schedule, tensors, autocast) is None for tensors in orders)
        ]


def without_guards(graph: OperatorGraph, steps: tuple[Step, ...], operators: Collection[str]) -> tuple[Step, ...]:
    """The same steps, with the default implementation of some operators in place of a guarded one."""
    guarded = {
        at
        for at, (index, choice) in enumerate(steps)
        if graph.operators[index].name in operators
        and graph.operators[index].implementations[choice].guard is not None
    }
    return by_default(graph, steps, guarded)


def _as_passed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]


def _size(schedule: Schedule) -> tuple[int, int]:
    """Elements of the inputs; then the step's memory, which tells apart inputs inside of objects."""
    return sum(math.prod(spec.shape) for spec in schedule.inputs.values()), schedule.plain_peak_bytes


def _problem(schedule: Schedule, tensors: Sequence[torch.Tensor], autocast: str) -> str | None:
    """The reason why a schedule can't serve some inputs; None if it can."""
    if schedule.autocast != autocast:
        return autocast_problem(schedule.autocast, autocast)
    expected = list(schedule.inputs.values())
    if len(tensors) != len(expected):
        return (
            f"the schedule was solved for {len(expected)} input tensors, this call has {len(tensors)}; "
            "solve a schedule for these inputs"
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
        shape = tuple(tensor.shape)
        if len(shape) != len(spec.shape) or any(size > most for size, most in zip(shape, spec.shape, strict=True)):
            return (
                f"input {number} has shape {shape}, the schedule was solved for {spec.shape} and serves inputs "
                "that are no larger in any dimension; solve a schedule for this shape"
            )
    return None


def _plain_if_smaller(schedule: Schedule, graph: OperatorGraph) -> tuple[Step, ...] | None:
    """The steps of plain training, for inputs so small that torch runs other operators on them.

    A batch or a sequence of one is not always computed as several are. Nothing has to be recomputed for it, if its
    values take well less than the budget.
    """
    found, expected = ([item.shape for item in of.inputs.values()] for of in (graph, schedule))
    steps = plain_steps(graph)
    peak_bytes = simulate(without_costs(graph), steps).peak_bytes
    if found == expected or peak_bytes > PLAIN_SHARE * schedule.budget_bytes:
        return None
    warnings.warn(
        f"for inputs of shapes {', '.join(map(str, found))} this model runs other operators than its schedule "
        f"is for (as for a batch or a sequence of one). They run as in plain training, which stores "
        f"{format_bytes(peak_bytes)} of the {format_bytes(schedule.budget_bytes)} budgeted",
        stacklevel=2,
    )
    return steps


def _values_bytes(schedule: Schedule, graph: OperatorGraph, steps: Sequence[Step]) -> int:
    """The peak of values alone, with the optimizer and the earlier gradients that the schedule counts."""
    profile = without_costs(graph)
    if schedule.optimizer is not None:
        profile, steps = with_optimizer(profile, schedule.optimizer), (*steps, (len(graph.operators), 0))
    if schedule.accumulate:
        profile = with_accumulation(profile)
    return simulate(profile, steps).peak_bytes - graph.resident.total


def _own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, without the rest of their storages: a batch may be part of a data set."""
    sizes: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        key = storage_key(tensor)
        _, known = sizes.get(key, (0, 0))
        sizes[key] = tensor.untyped_storage().nbytes(), known + tensor.nbytes
    return sum(min(whole, parts) for whole, parts in sizes.values())
