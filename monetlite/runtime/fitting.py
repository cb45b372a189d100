"""Whether the steps of a schedule keep to its budget on the graph that was captured.

A schedule serves other sizes than it was solved for, and its structure says nothing of sizes: a number that the
forward pass reads, an attribute, or tensors inside of an object can make a step larger though no input is.
"""

from collections.abc import Iterable, Sequence

import torch

from monetlite.core.costs import without_costs
from monetlite.core.errors import ModelError
from monetlite.core.graph import OperatorGraph
from monetlite.core.porting import lacking
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes
from monetlite.profiling.step_additions import with_accumulation, with_optimizer


class TooLarge(ModelError):
    """A step that would take more memory than the budget of its schedule."""


class Fitting:
    """The peaks that schedules reach on the graphs that are captured.

    What operators need beside their values (workspace) is not known of a captured graph. Once the one that a
    schedule was solved for has been seen, it is taken to be what it is there; before, none is counted.
    """

    def __init__(self) -> None:
        self._beside: dict[tuple[str, int], int] = {}

    def peak_bytes(
        self, schedule: Schedule, graph: OperatorGraph, steps: Sequence[Step], resident: Iterable[torch.Tensor]
    ) -> int:
        """The peak of a schedule's steps on a graph, resident tensors included."""
        key = (schedule.fingerprint, schedule.peak_bytes)
        peak_bytes = _values_bytes(schedule, graph, steps) + _own_bytes(resident)
        if graph.fingerprint == schedule.fingerprint:
            self._beside[key] = max(0, schedule.peak_bytes - peak_bytes)
            return schedule.peak_bytes
        return peak_bytes + self._beside.get(key, 0)

    def problem(
        self, schedule: Schedule, graph: OperatorGraph, steps: Sequence[Step], resident: Iterable[torch.Tensor]
    ) -> str | None:
        """What to say where a schedule's steps take more than was predicted; None where they don't.

        Steps that are not quite the schedule's, because this device lacks implementations, have been warned of.

        Raises:
            TooLarge: they take more than its budget.
        """
        peak_bytes = self.peak_bytes(schedule, graph, steps, resident)
        if peak_bytes <= schedule.peak_bytes or lacking(schedule, graph):
            return None
        found = (
            f"by the schedule of {schedule.name} this step takes at least {format_bytes(peak_bytes)} "
            f"({peak_bytes} bytes), where {format_bytes(schedule.peak_bytes)} were predicted and "
            f"{format_bytes(schedule.budget_bytes)} ({schedule.budget_bytes} bytes) are the budget. It was solved "
            "for other sizes than the model has with these inputs: a number or flag that the forward pass reads, "
            "tensors inside of objects, or an attribute or a layer of the model"
        )
        if peak_bytes > schedule.budget_bytes:
            raise TooLarge(f"{found}. Solve a schedule for these inputs and the model as it is, or give a budget")
        return found


def _values_bytes(schedule: Schedule, graph: OperatorGraph, steps: Sequence[Step]) -> int:
    """The most that values take, with what the schedule counts of an optimizer and of earlier gradients."""
    profile = without_costs(graph)
    if schedule.optimizer is not None:
        profile, steps = with_optimizer(profile, schedule.optimizer), (*steps, (len(graph.operators), 0))
    if schedule.accumulate:
        profile = with_accumulation(profile)
    return simulate(profile, steps).peak_bytes - graph.resident.total


def _own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What tensors take, without what else is in their storages: a batch may be part of a data set."""
    sizes: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        _, known = sizes.get(storage._cdata, (0, 0))
        sizes[storage._cdata] = storage.nbytes(), known + tensor.nbytes
    return sum(min(whole, parts) for whole, parts in sizes.values())


__all__ = ["Fitting", "TooLarge"]
