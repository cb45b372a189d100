"""A captured step whose inputs vary in size: which sizes vary, and the step's graph at those it is planned for.

A plan for a size serves all smaller ones: no tensor of the step is larger there. So a step is planned at limits, a
few of them, and a step that comes runs by the plan for the smallest that are not below its sizes.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from monetlite.core.costs import Profile
from monetlite.core.graph import AS_TRACED, OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode
from monetlite.operators import cudnn
from monetlite.runtime.call_sizes import Dimensions
from monetlite.runtime.gradient_delivery import Version
from monetlite.tracing.capture import Joint
from monetlite.tracing.operator_graph import OF_ROWS, Traced
from monetlite.tracing.sized_graphs import Limits, SizedGraphs
from monetlite.tracing.step_inputs import Arguments

MAX_LIMITS = 4
"""Programs that are kept for one captured step, for inputs of different sizes."""
MAX_HEADROOM = 8.0
"""Sizes for which the first plan is, as a multiple of the step's, where plain training fits."""
PLAIN_SHARE = 0.9
"""Share of the budget for what plain training keeps; the rest is for workspaces, which are not known yet."""
SMALL_SHARE = 0.9
"""A step of a smaller share of a plan's sizes than this would do with another plan."""
_MAX_NOTED = 256
"""Steps whose sizes are remembered for the next plan."""


@dataclass
class Waste:
    """Time lost by running small inputs by a plan for larger ones.

    Attributes:
        seconds: lost so far.
        sizes: of the steps that lost it.
    """

    seconds: float = 0.0
    sizes: list[Limits] = field(default_factory=list)

    def typical(self) -> Limits:
        """Sizes that half of those steps keep to."""
        half = sorted(self.sizes, key=math.prod)[: len(self.sizes) // 2 + 1]
        return tuple(map(max, zip(*half, strict=True)))


class VaryingStep:
    """The graph of a captured step at the sizes that it is planned for.

    Args:
        joint: as captured.
        call: the captured call.
        shapes: as captured, by the ids of tensors; sizes that vary are symbols.
        varying: dimensions of its leaves that may vary.
        build: makes the operator graph of a joint graph, for a call's inputs, in a layout.

    Attributes:
        captured: the sizes of the captured call.

    Raises:
        TraceError: the step can't be planned for several sizes.
    """

    def __init__(
        self,
        joint: Joint,
        call: Arguments,
        shapes: Mapping[int, Sequence[Any]],
        varying: Dimensions,
        build: Callable[[Joint, Arguments, str], Traced],
    ) -> None:
        self._graphs = SizedGraphs(joint, lambda own, sizes, layout: build(own, self.example_at(sizes), layout))
        self.captured = self._graphs.captured
        leaves, self._structure = pytree.tree_flatten((call.args, call.kwargs))
        self._symbol_of = {
            (at, number): symbol
            for at, numbers in varying.items()
            for number in numbers
            if (symbol := self._symbol(leaves[at], number, shapes)) is not None
        }
        alike = {id(leaf): _without_memory(leaf) for leaf in leaves}
        self._leaves = [alike[id(leaf)] for leaf in leaves]
        self._not_plain: Limits | None = None  # plain training exceeds the budget at larger sizes
        self._planning_seconds = 0.0
        self._waste: dict[Limits, Waste] = {}

    def _symbol(self, leaf: torch.Tensor, number: int, shapes: Mapping[int, Sequence[Any]]) -> int | None:
        """The place of a size among those that vary. A tensor that the step doesn't read varies like another."""
        if id(leaf) in shapes:
            return self._graphs.symbol_of(shapes[id(leaf)][number])
        size = leaf.shape[number]
        return self.captured.index(size) if size in self.captured else None

    def in_layouts(self, limits: Limits, layouts: Sequence[str]) -> dict[str, Traced]:
        """The step at these sizes in those of the layouts that differ, and that images have no part in."""
        graph = self._graphs.joint.graph.graph
        differing = [layout for layout in layouts if layout in OF_ROWS and OF_ROWS[layout](graph)]
        return {layout: self.traced_at(limits, layout) for layout in (AS_TRACED, *differing)}

    def traced_at(self, limits: Limits, layout: str = AS_TRACED) -> Traced:
        """The step at these sizes, with implementations that serve others, too.

        Raises:
            TraceError: it is not the same step there.
        """
        traced = self._graphs.traced_at(limits, layout)
        return replace(traced, graph=of_any_size(traced.graph))

    def example_at(self, sizes: Limits) -> Arguments:
        """A call like the captured one, at these sizes, with tensors that have no memory."""
        shapes: dict[int, list[int]] = {}
        for (at, number), symbol in self._symbol_of.items():
            leaf: Any = self._leaves[at]
            shapes.setdefault(id(leaf), list(leaf.shape))[number] = sizes[symbol]
        resized = {id(leaf): _without_memory(leaf, shapes[id(leaf)]) for leaf in self._leaves if id(leaf) in shapes}
        leaves = [resized.get(id(leaf), leaf) for leaf in self._leaves]
        return Arguments(*pytree.tree_unflatten(leaves, self._structure))

    def roomy(self, sizes: Limits) -> Limits:
        """Sizes with room for larger ones, as far as the captured graph holds: the next powers of two.

        People cut texts at such lengths, so the largest step of a run often is of one.
        """
        wanted = (1 << (size - 1).bit_length() for size in sizes)
        return tuple(
            size if most is None else min(size, most) for size, most in zip(wanted, self._graphs.most, strict=True)
        )

    def plain_limits(self, sizes: Limits, budget_bytes: int, peak_bytes: Callable[[OperatorGraph], int]) -> Limits:
        """About the largest sizes at which plain training keeps to a budget; those given if it keeps to it at none.

        The peak is taken to be a polynomial of second degree in the sizes, through the graphs at none, at these and
        at a third size.

        Args:
            sizes: of a step; all grow together.
            budget_bytes: of the step.
            peak_bytes: the peak of plain training by its graph.
        """
        if self._not_plain is not None and all(map(operator.gt, sizes, self._not_plain)):
            return sizes
        graph, budget_bytes = self._graphs.graph_at(sizes), int(PLAIN_SHARE * budget_bytes)
        least_bytes, own_bytes = graph.resident.total + graph.resident.parameters, peak_bytes(graph)
        slope, limits = own_bytes - least_bytes, sizes
        if own_bytes < budget_bytes and slope > 0:
            limits = self._times(sizes, min(MAX_HEADROOM, (budget_bytes - least_bytes) / slope))
            factor = math.prod(limits) ** (1 / len(limits)) / math.prod(sizes) ** (1 / len(sizes))
            if factor > 1 and (larger_bytes := peak_bytes(self._graphs.graph_at(limits))) > budget_bytes:
                curve = (larger_bytes - least_bytes - slope * factor) / (factor * (factor - 1))
                linear = slope - curve
                root = math.sqrt(linear**2 + 4 * curve * (budget_bytes - least_bytes))
                limits = self._times(sizes, max(1.0, min(factor, (root - linear) / (2 * curve))))
        self._not_plain = limits
        return limits

    def _times(self, sizes: Limits, factor: float) -> Limits:
        """Sizes so many times as large, as far as the captured graph holds."""
        return tuple(
            max(size, min(int(factor * size), size * 2**20 if most is None else most))
            for size, most in zip(sizes, self._graphs.most, strict=True)
        )

    def limits_of(self, schedule: Schedule, call: Arguments, order: Sequence[torch.Tensor]) -> Limits:
        """The sizes that a schedule was solved for.

        Args:
            schedule: serves the call.
            call: of this step, at any sizes.
            order: the call's tensors as the schedule has them.
        """
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        specs = dict(zip(map(id, order), schedule.inputs.values(), strict=True))
        limits: dict[int, int] = {}
        for (at, number), symbol in self._symbol_of.items():
            size = specs[id(leaves[at])].shape[number]
            limits[symbol] = min(size, limits.get(symbol, size))
        return tuple(limits.get(symbol, size) for symbol, size in enumerate(self.captured))

    def planned(self, seconds: float) -> None:
        """Note that planning took so long."""
        self._planning_seconds, self._waste = seconds, {}

    def note(self, sizes: Limits, version: Version, seconds: float) -> None:
        """Note a step that ran by a plan for larger sizes."""
        assert version.schedule is not None
        overhead = version.schedule.overhead
        if overhead > 0 and math.prod(sizes) < SMALL_SHARE * math.prod(version.limits):
            waste = self._waste.setdefault(version.limits, Waste())
            waste.seconds += seconds * overhead / (1 + overhead)
            waste.sizes = [*waste.sizes[-_MAX_NOTED:], sizes]

    def worth_planning(self, versions: Sequence[Version]) -> tuple[Limits, int] | None:
        """Sizes for which a plan would have paid, and the budget, in bytes, of the plan that ran instead."""
        for version in versions if len(versions) < MAX_LIMITS else ():
            waste = self._waste.get(version.limits, Waste())
            if waste.seconds > self._planning_seconds and version.schedule is not None:
                return waste.typical(), version.schedule.budget_bytes
        return None


ItemT = TypeVar("ItemT", OperatorGraph, Profile)


def of_any_size(item: ItemT) -> ItemT:
    """A graph or profile without cuDNN's plans, each of which is for one size."""
    return item.restricted(lambda implementation: not cudnn.is_plan(implementation.name))


def is_of_any_size(schedule: Schedule) -> bool:
    """True if a schedule names none of cuDNN's plans."""
    choices = schedule.choices
    runs = [*choices.implementations.items(), *(run for runs in choices.before.values() for run in runs)]
    return not any(cudnn.is_plan(name) for _, name in runs)


def _without_memory(leaf: Any, shape: Sequence[int] | None = None) -> Any:
    """A tensor like another, of another shape if one is given, without memory; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with FakeTensorMode():
        if shape is None:
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        else:
            made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)
