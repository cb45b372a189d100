"""Which schedule serves a call: one that was solved for inputs at least as large, or one that is solved now."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from monetlite.core.errors import ModelError
from monetlite.core.schedule import Schedule
from monetlite.tracing.signature import tensors_in_order

CONSTANTS = (bool, int, float, complex, str, bytes)
"""Types of arguments whose values a program is compiled for. Of others, Dynamo's guards tell what has changed."""

MOST_SOLVED = 8
"""How many schedules one wrapper solves by itself, before it asks for inputs that vary less."""

Layout: TypeAlias = tuple[Any, ...]
Solve: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any], Sequence[Schedule]], Schedule]
"""Solves for (positional, keyword) arguments, beginning from other schedules of the same model."""


def layout_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layout:
    """What a program is compiled for: the shapes, strides, dtypes and devices of tensors, numbers and strings."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    described = (
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf) if isinstance(leaf, CONSTANTS) else "")
        for leaf in leaves
    )
    return (*described, str(structure))


class Schedules:
    """The schedules of one model that a wrapper may run by.

    A schedule solved for some inputs also serves smaller ones: a smaller batch, a shorter sequence. Of those that
    serve a call, the one for the smallest inputs is taken. Where none does, `solve` makes one, if given.
    """

    def __init__(self, model: nn.Module, given: Sequence[Schedule], solve: Solve | None = None) -> None:
        self.all = sorted(given, key=_size)
        self._model = model
        self._solve = solve
        self._solved = 0

    def serving(self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str) -> list[Schedule]:
        """The schedules that can serve a call's inputs under an autocast, those for the smallest inputs first."""
        # Files written before inputs were put into the signature's order have them as they were passed.
        orders = [tensors_in_order(self._model, args, kwargs), _as_passed(args, kwargs)]
        return [
            schedule
            for schedule in self.all
            if any(_problem(schedule, tensors, autocast) is None for tensors in orders)
        ]

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str) -> Schedule:
        """The schedule for a call's inputs, and for what `torch.autocast` converts to around it.

        Raises:
            ModelError: none serves them, and none can be solved (any more).
            Those of `monetlite.optimize`.
        """
        serving = self.serving(args, kwargs, autocast)
        if serving:
            return serving[0]
        if self._solve is None:
            tensors = tensors_in_order(self._model, args, kwargs)
            raise ModelError(_problem(self.all[-1], tensors, autocast) or "")
        return self.solve(args, kwargs)

    def solve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """A schedule that is solved for a call's inputs, and for the model as it is.

        Raises:
            ModelError: too many have been solved.
            Those of `monetlite.optimize`.
        """
        assert self._solve is not None
        if self._solved >= MOST_SOLVED:
            raise ModelError(
                f"{MOST_SOLVED} schedules have been solved and none serves inputs of shapes "
                f"{', '.join(str(tuple(tensor.shape)) for tensor in _as_passed(args, kwargs))}; pad inputs to "
                "a few sizes (for sequences: pad_to_multiple_of in the collator), or begin with the largest"
            )
        solved = self._solve(args, kwargs, self.all)
        self._solved += 1
        self.all = sorted([solved, *self.all], key=_size)
        return solved


def _as_passed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]


def autocast_problem(solved: str, found: str) -> str:
    """What to say of a schedule that was solved under another `torch.autocast`."""
    ways = [f"under torch.autocast to {dtype}" if dtype else "without torch.autocast" for dtype in (solved, found)]
    return (
        f"the schedule was solved for steps {ways[0]}, this one runs {ways[1]}; solve it where the step runs: "
        "with torch.autocast(...): schedule = monetlite.optimize(...), or --autocast on the command line"
    )


def _size(schedule: Schedule) -> tuple[int, int]:
    """How large the inputs are; where they don't show it (tensors inside of objects), the step."""
    return sum(math.prod(spec.shape) for spec in schedule.inputs.values()), schedule.plain_peak_bytes


def _problem(schedule: Schedule, tensors: Sequence[torch.Tensor], autocast: str) -> str | None:
    """Why a schedule can't serve some inputs; None where it can."""
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
                f"input {number} has shape {shape}, the schedule was solved for {spec.shape} and serves what is no "
                "larger in any dimension; solve a schedule for this shape"
            )
    return None
