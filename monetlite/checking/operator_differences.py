"""Operators that write other numbers than in plain training, and the first of them.

Two steps run through `MONeTWrapper`, but node by node. First the captured graph runs as plain training runs it, and
all its results are kept in main memory. Then the schedule runs with the same inputs, generator and gradients of the
outputs, and each result is compared with plain training's. An operator *introduces* the difference that it makes
from plain training's operands; the rest is *propagated*.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn

from monetlite.checking.step_differences import difference, negligible
from monetlite.checking.trainee import on_cpu
from monetlite.core.graph import AS_TRACED, DELIVERY, OperatorGraph, Phase
from monetlite.core.schedule import Schedule
from monetlite.core.steps import Step, plain_steps
from monetlite.fx.torch_internals.torch_aot import boxed_function, is_tangent
from monetlite.operators.random import drawing_from, rng_state
from monetlite.runtime.lowering import CAPTURED, RUN, OperatorRun
from monetlite.runtime.scheduled_training import ScheduledTraining
from monetlite.runtime.wrapper import MONeTWrapper
from monetlite.tracing.capture import Boxed, Compiler, Joint
from monetlite.tracing.operator_graph import Traced


@dataclass(frozen=True, kw_only=True)
class OperatorDifference:
    """A run of an operator whose results are not those of plain training, or not those of its own first run.

    Attributes:
        operator, implementation: their names. number: 0 for the operator's first run, 1 for the next.
        phase: the operator's phase.
        difference: of its results from plain training's, the largest absolute one over the largest magnitude.
        introduced: the same from plain training's operands: the operator's own share.
        repeated: the difference of a later run's results from the first run's.
        tolerance: the implementation's; 0 promises the same bits.
        broken: True if it introduces a difference although its implementation promises the same bits.
    """

    operator: str
    implementation: str
    number: int
    phase: Phase
    difference: float
    introduced: float
    repeated: float
    tolerance: float
    broken: bool


@dataclass(frozen=True, kw_only=True)
class OperatorComparison:
    """Result of a comparison operator by operator.

    Attributes:
        runs: number of runs that were compared. again: number of re-runs among them.
        differing: the runs that differ, the largest difference first.
        captured: difference that capturing the model makes by itself: the largest of the loss, a gradient or a
            buffer between the captured graph, run as plain training runs it, and the model.
    """

    runs: int
    again: int
    differing: tuple[OperatorDifference, ...]
    captured: float

    @property
    def introducing(self) -> tuple[OperatorDifference, ...]:
        """The runs that introduce a difference, the largest first."""
        own = [item for item in self.differing if item.introduced > 0]
        return tuple(sorted(own, key=lambda item: -item.introduced))

    @property
    def unrepeated(self) -> tuple[OperatorDifference, ...]:
        """The runs whose results are not those of the first run, the largest difference first."""
        others = [item for item in self.differing if item.repeated > 0]
        return tuple(sorted(others, key=lambda item: -item.repeated))


class PlainStep:
    """The results of a plain step, by their names in the captured graph, in main memory.

    `ScheduledStep` adds those that only the schedule makes, computed from plain training's.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._given: set[str] = set()

    def begin(self, traced: Traced) -> None:
        self.tensors.clear()
        self._given = {node.name for node in traced.joint.graph.graph.nodes if node.op == "placeholder"}

    def receive(self, node: fx.Node, tensor: torch.Tensor) -> torch.Tensor:
        if node.meta[CAPTURED] in self._given:
            # A parameter does not change until the optimizer steps, so it need not be copied; a buffer does.
            self.tensors[node.meta[CAPTURED]] = tensor.detach() if tensor.requires_grad else on_cpu(tensor)
        return tensor

    def run_node(self, node: fx.Node, run: Callable[[], Any], _: Mapping[fx.Node, Any]) -> Any:
        result = run()
        for name, tensor in _results(node, result):
            self.tensors[name] = on_cpu(tensor)
        return result


class ScheduledStep:
    """A step by a schedule, each result compared with that of a plain step.

    If the schedule has a tolerance, negligible results are compared on the scale of larger ones, as in `verify`:
    gradients of parameters on that of `gradients`, plain training's.
    """

    def __init__(self, plain: PlainStep, tolerance: float, gradients: Iterable[torch.Tensor]) -> None:
        self.differing: list[OperatorDifference] = []
        self.runs = self.again = 0
        self._plain, self._tolerance = plain.tensors, tolerance
        self._least = negligible(gradients, tolerance)
        self._gradients: set[str] = set()
        self._notes: set[str] = set()
        self._graph: OperatorGraph
        self._first: dict[str, torch.Tensor] = {}
        """Results of operators' first runs, in main memory."""

    def begin(self, traced: Traced) -> None:
        graph = self._graph = traced.graph
        delivered = {
            value
            for operator in graph.operators
            if operator.family == DELIVERY
            for value in operator.implementations[0].reads
        }
        written = {
            name: value
            for operator in graph.operators
            if (call := operator.implementations[0].call) is not None and call.outputs
            for name, value in zip(filter(None, call.outputs), operator.writes, strict=True)
        }
        self._gradients = {name for name, value in written.items() if value in delivered}
        self._notes = {name for name, value in written.items() if graph.values[value].note}

    def receive(self, node: fx.Node, tensor: torch.Tensor) -> torch.Tensor:
        return self._operand(node).to(tensor.device) if is_tangent(node) else tensor

    def run_node(self, node: fx.Node, run: Callable[[], Any], values: Mapping[fx.Node, Any]) -> Any:
        if RUN in node.meta:
            return self._run_and_compare(node, run, values)
        result = run()
        name = node.meta.get(CAPTURED)
        if name is not None and name not in self._plain:
            # A view: of plain training's tensor, as this one is of ours.
            self._plain[name] = result if node.op == "get_attr" else _call(node, self._operand)
        return result

    def _run_and_compare(self, node: fx.Node, run: Callable[[], Any], values: Mapping[fx.Node, Any]) -> Any:
        device = self._graph.device
        state = rng_state(device)
        result = run()
        results = dict(_results(node, result))
        if not results:
            return result

        def like_ours(item: fx.Node) -> torch.Tensor:
            return _laid_out_as(values[item], self._operand(item))

        @cache
        def alone() -> dict[str, torch.Tensor]:
            """Results of the operator from plain training's operands."""
            with drawing_from(state, device):
                return dict(_results(node, _call(node, like_ours)))

        for name in results:
            if name not in self._plain:
                # Plain training has no need of it: a packed mask, images in another layout.
                self._plain[name] = on_cpu(alone()[name])
        # A note of a kernel to its own gradient may be memory that was never written.
        results = {name: tensor for name, tensor in results.items() if name not in self._notes}
        if not results:
            return result
        difference = self._from_plain(results)
        introduced = self._from_plain({name: alone()[name] for name in results}) if difference > 0 else 0.0
        self._note(node.meta[RUN], results, difference, introduced)
        return result

    def _from_plain(self, results: Mapping[str, torch.Tensor]) -> float:
        """The largest difference of results from those of plain training.

        A result that cancels to nothing beside the operator's others (the mean of what a normalisation has centred)
        is rounding in plain training too.
        """
        expected = {name: self._plain[name] for name in results}
        least = negligible(expected.values(), self._tolerance)
        return max(
            _difference(expected[name], tensor, max(least, self._least if name in self._gradients else 0.0))
            for name, tensor in results.items()
        )

    def _note(
        self, run: OperatorRun, results: Mapping[str, torch.Tensor], difference: float, introduced: float
    ) -> None:
        """Count a run, and record its differences."""
        index, choice = run.step
        operator = self._graph.operators[index]
        implementation = operator.implementations[choice]
        repeated = 0.0
        self.runs += 1
        if run.number:
            self.again += 1
            again = ((self._first[name], tensor) for name, tensor in results.items() if name in self._first)
            repeated = max((_difference(*pair) for pair in again), default=0.0)
        else:
            self._first.update(
                (name, on_cpu(tensor) if difference > 0 else self._plain[name]) for name, tensor in results.items()
            )
        if difference == repeated == 0:
            return
        # Sums come in another order in another layout. And where a kernel adds up in no fixed order, plain training
        # differs from itself: its own run, by the same implementation, breaks no promise.
        of_its_own = choice == 0 and run.number == 0
        promised = implementation.tolerance == 0 and self._graph.layout == AS_TRACED and not of_its_own
        self.differing.append(
            OperatorDifference(
                operator=operator.name,
                implementation=implementation.name,
                number=run.number,
                phase=operator.phase,
                difference=difference,
                introduced=introduced,
                repeated=repeated,
                tolerance=implementation.tolerance,
                broken=promised and introduced > 0,
            )
        )

    def _operand(self, node: fx.Node) -> Any:
        """Plain training's tensor for one of a program."""
        return self._plain[node.meta[CAPTURED]]


class WatchedWrapper(MONeTWrapper):
    """A wrapper whose programs run node by node, watched by a step.

    It runs the captured graph as plain training does, or by the schedule.
    """

    def __init__(self, model: nn.Module, schedule: Schedule, watcher: PlainStep | ScheduledStep) -> None:
        super().__init__(model, schedule)
        self.__dict__["_training"] = _WatchedTraining(model, schedule, watcher)


class _WatchedTraining(ScheduledTraining):
    def __init__(self, model: nn.Module, schedule: Schedule, watcher: PlainStep | ScheduledStep) -> None:
        super().__init__(model, schedule)
        self._watcher = watcher

    def plan(self, joint: Joint) -> tuple[Traced, tuple[Step, ...]]:
        if isinstance(self._watcher, PlainStep):
            traced = self.plans.build(joint, self.plans.asked(), AS_TRACED)
            steps = plain_steps(traced.graph)
        else:
            traced, steps = super().plan(joint)
        self._watcher.begin(traced)
        return traced, steps

    def compiler(self) -> Compiler:
        watcher = self._watcher

        def watched(program: fx.GraphModule, *_: object) -> Boxed:
            return boxed_function(lambda arguments: _WatchedProgram(program, watcher).call(arguments))

        return watched


class _WatchedProgram(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, watcher: PlainStep | ScheduledStep) -> None:
        super().__init__(program)
        self.extra_traceback = False
        self._watcher = watcher

    def call(self, arguments: list[Any]) -> Any:
        inputs = self.graph.find_nodes(op="placeholder")
        values = {node: self._watcher.receive(node, item) for node, item in zip(inputs, arguments, strict=True)}
        arguments.clear()
        return self.run(initial_env=values)

    def run_node(self, n: fx.Node) -> Any:
        return self._watcher.run_node(n, partial(super().run_node, n), self.env)


def _results(node: fx.Node, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The results of an operator's run that are read, by name."""
    if RUN in node.meta:
        made = (result,) if isinstance(result, torch.Tensor) else result or ()
        for name, tensor in zip(node.meta[RUN].call.outputs, made, strict=False):
            if name is not None:
                yield name, tensor


def _call(node: fx.Node, operand: Callable[[fx.Node], Any]) -> Any:
    """Call what a node calls, with other operands."""
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
    return node.target(*args, **kwargs)


def _laid_out_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Another tensor's numbers in a tensor's layout, free to be overwritten."""
    if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return other.to(tensor.device)  # expanded, so nothing overwrites it
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(other)


def _difference(expected: torch.Tensor, found: torch.Tensor, least: float = 0.0) -> float:
    return difference(expected.to(found.device), found, least)
