"""The steps to run of a captured step by a schedule: those that this device can run, within the budget."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from monetlite.core.announcing import warn
from monetlite.core.binding import bind, lacking
from monetlite.core.errors import CudnnError
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes
from monetlite.operators.cudnn import is_plan, with_named_plans
from monetlite.runtime.reserved_memory import warn_if_unlimited
from monetlite.runtime.serving import TooLarge, values_bytes, without_guards
from monetlite.tracing.operator_graph import Traced

Fitted: TypeAlias = tuple[Traced, tuple[Step, ...]]
"""A captured step, and the steps to run of it."""


class Fitting:
    """Fits schedules to captured steps of one model.

    Workspace of a captured graph is not known. Once the graph that a schedule was solved for has been captured, its
    workspace there is assumed for other sizes too; before, none is counted.

    Attributes:
        avoided: operators whose guarded implementations are not used.
    """

    def __init__(self) -> None:
        self.avoided: set[str] = set()
        self._workspace_bytes: dict[tuple[str, int], int] = {}

    def avoid(self, operators: Sequence[str]) -> None:
        """Use the guarded implementations of these operators no more, and warn of that."""
        self.avoided.update(operators)
        listed = ", ".join(operators[:3]) + (f" and {len(operators) - 3} more" if len(operators) > 3 else "")
        warn(
            f"the weights of {listed} are zero, or too small beside their biases, to take the gradient of the "
            "normalisation from its output as the schedule says; it is taken from the input from here on, which "
            "is kept for that: the peak may be higher than predicted by its size. To hold the budget, solve "
            "again with a tolerance below 1e-4"
        )

    def fit(self, traced: Traced, schedule: Schedule, resident_bytes: int) -> Fitted:
        """The steps of a schedule on a captured step, by implementations that exist on this device.

        Args:
            traced: the captured step.
            schedule: for its graph.
            resident_bytes: of the model's tensors, and of those that the step is called with.

        Raises:
            ScheduleMismatch: the schedule is for another graph, or not legal on this one.
            TooLarge: the steps would exceed its budget.
            CudnnError: cuDNN would choose a kernel anew for a re-run.
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
        _refuse_tuning(graph, steps)
        key = (schedule.fingerprint, schedule.peak_bytes)
        peak_bytes = values_bytes(schedule, graph, steps) + resident_bytes
        if graph.fingerprint == schedule.fingerprint:
            self._workspace_bytes[key] = max(0, schedule.peak_bytes - peak_bytes)
            return traced, without_guards(graph, steps, self.avoided)
        if graph.device != schedule.device and graph.inputs == schedule.inputs:
            # The same step on another device, if it is the first.
            self._workspace_bytes.setdefault(key, max(0, schedule.peak_bytes - peak_bytes))
        peak_bytes += self._workspace_bytes.get(key, 0)
        # Kernels of the device that the schedule was solved for may leave no notes, or other ones.
        notes_bytes = sum(value.size_bytes for value in graph.values if value.note)
        # `bind` has warned of steps that run by default because this device lacks implementations.
        if peak_bytes - notes_bytes <= schedule.peak_bytes or lacking(schedule, graph):
            return traced, without_guards(graph, steps, self.avoided)
        problem = (
            f"by the schedule of {schedule.name} this step takes at least {format_bytes(peak_bytes)} "
            f"({peak_bytes} bytes), where {format_bytes(schedule.peak_bytes)} were predicted and "
            f"{format_bytes(schedule.budget_bytes)} ({schedule.budget_bytes} bytes) are the budget. It was solved "
            "for other sizes than the model has with these inputs: a number or flag that the forward pass reads, "
            "tensors inside of objects, or an attribute or a layer of the model"
        )
        if peak_bytes > schedule.budget_bytes:
            raise TooLarge(f"{problem}. Solve a schedule for these inputs and the model as it is, or give a budget")
        warn(problem)
        return traced, without_guards(graph, steps, self.avoided)


def _refuse_tuning(graph: OperatorGraph, steps: Sequence[Step]) -> None:
    """Refuse to re-run convolutions that cuDNN is tuned for, by each thread for itself.

    Autograd's thread makes re-runs. It would try every kernel again, in more memory than planned, and may choose
    one that rounds otherwise than the first run's. By name, a plan is the same everywhere.

    Raises:
        CudnnError: names the first.
    """
    if graph.device != "cuda" or not torch.backends.cudnn.benchmark:
        return
    ran: set[int] = set()
    for index, choice in steps:
        operator = graph.operators[index]
        if index in ran and operator.family == "convolution" and not is_plan(operator.implementations[choice].name):
            raise CudnnError(
                f"the schedule re-runs {operator.name} in the backward pass, where torch.backends.cudnn.benchmark "
                "would have cuDNN tuned once more: beyond the budget, and maybe to a kernel that rounds otherwise. "
                "Set torch.backends.cudnn.benchmark = False before the first step, and measure costs without it"
            )
        ran.add(index)
