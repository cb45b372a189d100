"""The schedules of one model: those that serve a call's inputs, and new ones that are solved for."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from monetlite.core.errors import ModelError
from monetlite.core.options import split_options
from monetlite.core.schedule import Schedule
from monetlite.core.units import is_percentage
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.runtime.fitting import Fitted
from monetlite.runtime.open_runs import OpenRuns
from monetlite.runtime.schedule_search import PlannedStep, ScheduleSearch
from monetlite.runtime.serving import own_bytes, same_masks, serving_problem, size_served
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.sized_graphs import Limits
from monetlite.tracing.step_inputs import (
    Arguments,
    autocast_dtype,
    bucket_bytes,
    device_of,
    tensor_arguments,
    tensors_in_order,
)


class ModelSchedules:
    """Schedules for the training steps of one model.

    Args:
        model: the module.
        given: schedules to begin with.
        budget: of schedules that have to be solved for; None if none may be.
        options: of solving.
        wait: whether a step waits for the best schedule.

    Attributes:
        known: all of them, those for the smallest inputs first.
        current: the one in use; None before the first is solved.
        solved: the number of schedules that were solved for at training time.
        search: for schedules.
        runs: of the model whose backward pass is still to come, which share the budget.
        autocast: dtype of the step that is being planned.
        planned: the step that is being planned; None where its programs can't be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Sequence[Schedule],
        *,
        budget: str | int | float | None,
        options: Mapping[str, Any],
        wait: bool,
    ) -> None:
        self.model, self.budget, self.options, self.wait = model, budget, options, wait
        self.known = sorted(given, key=size_served)
        self.current = given[0] if given else None
        self.solved = 0
        self.search = ScheduleSearch(*split_options(options))
        self.runs = OpenRuns(model, budget, self.search.pricing.optimizer)
        self.autocast = ""
        self.planned: PlannedStep | None = None

    @property
    def updates_in_backward(self) -> bool:
        """True if the plans count parameters as updated in the backward pass."""
        return self.search.pricing.step_in_backward or any(item.step_in_backward for item in self.known)

    @property
    def before_bytes(self) -> int:
        """The most bytes that a share of plain training's peak was so far; 0 for a budget in bytes."""
        of_share = self.budget is not None and is_percentage(self.budget)
        return max((schedule.budget_bytes for schedule in self.known), default=0) if of_share else 0

    def drop(self) -> None:
        """Plan anew: what is known fits no more."""
        self.known = []
        self.search.stop()

    def look_at(self, call: Arguments) -> None:
        """Note the settings of a call that is to be planned."""
        self.autocast = autocast_dtype(self.device_of(call))

    def device_of(self, call: Arguments) -> str:
        return device_of(self.model, tuple(call))

    def budget_of(self, call: Arguments) -> str | int | float | None:
        """The budget of a run with a call's inputs."""
        return self.runs.budget_of(own_bytes(tensors_among(call)))

    def serving(self, call: Arguments) -> list[Schedule]:
        """The schedules that can serve a call's inputs, those for the smallest inputs first."""
        ordered = [(schedule, self.order(schedule, call)) for schedule in self.known]
        return [
            schedule
            for schedule, tensors in ordered
            if serving_problem(schedule, tensors, self.autocast) is None
            and (self.budget is None or same_masks(schedule, tensors))
        ]

    def order(self, schedule: Schedule, call: Arguments) -> list[torch.Tensor]:
        """A call's tensors in the order in which a schedule has them.

        Files written before inputs were put into the signature's order have them as they were passed.
        """
        tensors = tensors_in_order(self.model, *call)
        return tensors if serving_problem(schedule, tensors, schedule.autocast) is None else tensors_among(call)

    def unserved(self, call: Arguments) -> ModelError:
        """The error of a call that no schedule serves."""
        tensors, names = tensors_in_order(self.model, *call), tensor_arguments(self.model, *call)
        return ModelError(serving_problem(self.known[-1], tensors, self.autocast, names) or "")

    def solve(
        self,
        traced: Mapping[str, Traced],
        call: Arguments,
        budget: str | int | float,
        limits: Limits = (),
        *,
        settle: bool = True,
    ) -> Fitted:
        """A step, and the steps to run of it by a schedule found within seconds, or by the best with `wait`.

        Args:
            traced: the step in each layout.
            call: for which it is planned.
            budget: of the step.
            limits: the sizes that the plan serves, where they vary.
            settle: whether to take all the time that is needed if nothing is found within seconds.
        """
        schedule = self.search.find(
            traced,
            budget,
            self.device_of(call),
            known=self.known,
            limits=limits,
            best=self.wait,
            settle=settle,
        )
        self.solved += 1
        self.known = sorted([schedule, *self.known], key=size_served)
        return self.use(schedule, traced, call, limits)

    def use(self, schedule: Schedule, traced: Mapping[str, Traced], call: Arguments, limits: Limits = ()) -> Fitted:
        """A step that is being planned, and the steps to run of it by a schedule, which is in use from here on.

        Args:
            schedule: the schedule.
            traced: the step in each layout that a better schedule may have.
            call: for which it is planned.
            limits: the sizes that the plan serves, where they vary.

        Raises:
            Those of `Fitting.fit`.
        """
        resident_bytes = self.resident_bytes(call)
        fitted = self.search.fitting.fit(traced[schedule.layout], schedule, resident_bytes)
        self.current, self.planned = schedule, PlannedStep(traced, schedule, resident_bytes, limits)
        return fitted

    def resident_bytes(self, call: Arguments) -> int:
        """Bytes of the model's tensors and of a call's; and of buckets, which no schedule counts that was given."""
        parameters = list(self.model.parameters())
        buckets_bytes = 0 if self.budget is None else bucket_bytes(parameters)
        return own_bytes([*parameters, *self.model.buffers(), *tensors_among(call)]) + buckets_bytes

    def look_on(self, seconds: float) -> None:
        """Look for a better schedule after a step of so many seconds, and have it in the place of the first."""
        taken = self.search.advance(seconds, device_of(self.model, ()))
        if taken is not None:
            before, better = taken
            self.known = [better if item is before else item for item in self.known]
            self.current = better if self.current is before else self.current
