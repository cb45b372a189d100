"""A captured step whose inputs vary in size: which sizes vary, and the step's graph at those it is planned for.

A plan for a size serves all smaller ones: no tensor of the step is larger there. So a step is planned at limits, a
few of them, and a step that comes runs by the plan for the smallest that are not below its sizes.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from monetlite.core.costs import Profile
from monetlite.core.errors import TraceError
from monetlite.core.graph import AS_TRACED, TILED_LOSS, OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.fx.storages import Reachability
from monetlite.fx.torch_internals import torch_pytree as pytree
from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode, without_modes
from monetlite.fx.torch_internals.torch_symbols import captured_value, largest
from monetlite.fx.varying_sizes import SIZES, agreeing, graph_at, input_sizes
from monetlite.operators import cudnn
from monetlite.operators.head_and_loss import has_loss_of_rows
from monetlite.runtime.call_sizes import Dimensions
from monetlite.tracing.capture import Joint
from monetlite.tracing.operator_graph import Traced
from monetlite.tracing.step_inputs import Arguments

MAX_LIMITS = 4
"""Programs that are kept for one captured step, for inputs of different sizes."""
HEADROOM = 1.5
"""A step that is larger than any before is planned for sizes so many times as large, if the budget allows it."""
SMALL_SHARE = 0.9
"""A step of a smaller share of a plan's sizes than this would do with another plan."""
_MAX_NOTED = 256
"""Steps whose sizes are remembered for the next plan."""
Limits: TypeAlias = tuple[int, ...]


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
        varying: dimensions of its leaves that may vary.
        build: makes the operator graph of a joint graph, for a call's inputs, in a layout.

    Attributes:
        captured: the sizes of the captured call.
        schedules: by the sizes that they were solved for.

    Raises:
        TraceError: the step can't be planned for several sizes.
    """

    def __init__(
        self,
        joint: Joint,
        call: Arguments,
        varying: Dimensions,
        build: Callable[[Joint, Arguments, str], Traced],
    ) -> None:
        self._joint, self._build = joint, build
        reach = Reachability(joint.graph.graph, joint.forward_outputs)
        if not reach.takes_arguments:
            raise TraceError("inputs that share memory are changed")
        symbols = input_sizes(joint.graph.graph)
        sizes = [node.meta["val"] for node in symbols.values()]
        self._symbols = list(symbols)
        self.captured: Limits = tuple(captured_value(size) or 0 for size in sizes)
        self._most = [largest(size) for size in sizes]
        leaves, self._structure = pytree.tree_flatten((call.args, call.kwargs))
        self._symbol_of = {
            (at, number): self.captured.index(size)
            for at, numbers in varying.items()
            for number in numbers
            if (size := leaves[at].shape[number]) in self.captured
        }
        alike = {id(leaf): _without_memory(leaf) for leaf in leaves}
        self._leaves = [alike[id(leaf)] for leaf in leaves]
        self._references: dict[str, OperatorGraph] = {}
        self.schedules: dict[Limits, Schedule] = {}
        self._planning_seconds = 0.0
        self._waste: dict[Limits, Waste] = {}

    def in_layouts(self, limits: Limits, layouts: Sequence[str]) -> dict[str, Traced]:
        """The step at these sizes in those of the layouts that differ, and that images have no part in."""
        tiled = TILED_LOSS in layouts and has_loss_of_rows(self._joint.graph.graph)
        return {layout: self.traced_at(limits, layout) for layout in (AS_TRACED, *([TILED_LOSS] if tiled else []))}

    def traced_at(self, limits: Limits, layout: str = AS_TRACED) -> Traced:
        """The step at these sizes, with implementations that serve others, too.

        Raises:
            TraceError: it is not the same step there.
        """
        with without_modes():  # of the capture, whose tensors have other sizes
            traced = self._traced(limits, layout)
            if layout not in self._references:
                other = self.captured if self.captured != limits else tuple(size - 1 for size in limits)
                self._references[layout] = self._traced(other, layout).graph
        return replace(traced, graph=of_any_size(agreeing(traced.graph, self._references[layout])))

    def _traced(self, sizes: Limits, layout: str) -> Traced:
        graph = graph_at(self._joint.graph, dict(zip(self._symbols, sizes, strict=True)))
        gradients = graph.graph.output_node().args[0][self._joint.forward_outputs :]  # type: ignore[index]
        if any(hasattr(node.meta["val"], SIZES) for node in gradients if node is not None):  # type: ignore[union-attr]
            raise TraceError("an input that varies in size has a gradient")
        return self._build(replace(self._joint, graph=graph), self.example_at(sizes), layout)

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
        """Sizes with room for larger ones, as far as the captured graph holds."""
        wanted = (math.ceil(HEADROOM * size) for size in sizes)
        return tuple(
            size if most is None else min(size, most) for size, most in zip(wanted, self._most, strict=True)
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

    def planned(self, seconds: float, kept: Collection[Limits]) -> None:
        """Note that planning took so long, and which plans are in use from here on."""
        self._planning_seconds, self._waste = seconds, {}
        self.schedules = {limits: self.schedules[limits] for limits in kept}

    def note(self, sizes: Limits, limits: Limits, seconds: float) -> None:
        """Note a step that ran by a plan for larger sizes."""
        overhead = self.schedules[limits].overhead
        if overhead > 0 and math.prod(sizes) < SMALL_SHARE * math.prod(limits):
            waste = self._waste.setdefault(limits, Waste())
            waste.seconds += seconds * overhead / (1 + overhead)
            waste.sizes = [*waste.sizes[-_MAX_NOTED:], sizes]

    def worth_planning(self) -> tuple[Limits, int] | None:
        """Sizes for which a plan would have paid, and the budget, in bytes, of the plan that ran instead."""
        for limits, waste in self._waste.items():
            if waste.seconds > self._planning_seconds and len(self.schedules) < MAX_LIMITS:
                return waste.typical(), self.schedules[limits].budget_bytes
        return None


ItemT = TypeVar("ItemT", OperatorGraph, Profile)


def of_any_size(item: ItemT) -> ItemT:
    """A graph or profile without cuDNN's plans, each of which is for one size."""
    return item.restricted(lambda implementation: not implementation.name.startswith(cudnn.PREFIX))


def is_of_any_size(schedule: Schedule) -> bool:
    """True if a schedule names none of cuDNN's plans."""
    choices = schedule.choices
    runs = [*choices.implementations.items(), *(run for runs in choices.before.values() for run in runs)]
    return not any(name.startswith(cudnn.PREFIX) for _, name in runs)


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
