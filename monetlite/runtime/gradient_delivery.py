"""Gradients reach autograd as they become ready, instead of all at the end of the backward program.

AOTAutograd runs a backward program as one autograd node, so every gradient would be in memory before the first
is accumulated, and DistributedDataParallel could reduce none while others are computed. Here the parameters pass
through a chain of autograd nodes on their way into the program, one for each delivery:

    parameters ─→ deliver 3 ─→ deliver 2 ─→ deliver 1 ─→ program ─→ outputs
                     └─ parameters of 3 ──────────────────↗

Going backward, autograd first reaches the program's node. It computes nothing yet, and returns stand-ins without
memory. Then come the nodes of the chain in order. Each runs one part of the program and returns the gradients of
that part. After each, autograd does what it always does with a finished gradient: hooks, accumulation, reduction.

Where a tensor that has a gradient is changed by the program or seen by one of its outputs, more is added to that
gradient outside of the chain. Then (`Joint.at_once`) there is no chain, and the program's node runs it whole.
"""

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import le
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from monetlite.core.errors import ModelError
from monetlite.core.schedule import Schedule
from monetlite.fx.torch_internals.torch_aot import boxed_function, is_tangent, without_autocast
from monetlite.fx.torch_internals.torch_dispatch import weak_storage, without_class
from monetlite.fx.varying_sizes import input_sizes
from monetlite.runtime.backward_parts import RUN, deferred, laid_out, results_by_part
from monetlite.runtime.double_backward import DoubleBackward, Order, RunAgain
from monetlite.runtime.lowering import WRITTEN_OVER
from monetlite.runtime.repeated_backward import run_backward
from monetlite.runtime.unused_outputs import UnusedOutputs
from monetlite.tracing.capture import Backend, Boxed, Compiler, Joint, Partition, aot_backend, flat_outputs

_thread = threading.local()


def delivering_backend(
    lower: Partition, compiler: Compiler, keep: "Callable[[CapturedStep], None]", *, holds_inputs: bool = True
) -> Backend:
    """A backend for `torch.compile` that runs the two programs of a joint graph and delivers gradients as marked.

    Args:
        lower: makes the forward and the backward program of a joint graph.
        compiler: makes a function of a program, or of one part of the backward program.
        keep: is called with each graph that is captured, whose programs it may exchange later.
        holds_inputs: whether inputs count until the backward pass, so that runs may hold them (`DoubleBackward`).
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        step = CapturedStep(lower, compiler)
        run = aot_backend(step.partition, forward=step.compile_forward, backward=step.compile_backward)(
            graph, inputs
        )
        if step.unused is None:
            return run
        assert step.joint is not None
        watched, again = step.unused, DoubleBackward(graph, step.joint, holds=holds_inputs)
        keep(step)

        def call(*arguments: Any) -> Any:
            if again.expected(arguments):
                return again.run_plainly(arguments)
            version, begun = step.version_for(arguments), again.begin(arguments)
            with version.in_use():
                outputs = run(*_through_chain(list(arguments), version.order))
            if (node := watched.watch(outputs)) is not None:
                again.watch(node, begun, watched.returned, version.order)
            return outputs

        return call

    return backend


class Version:
    """Two programs of a captured step.

    Attributes:
        number: among the versions of its step, which is saved for the backward pass.
        limits: the largest input sizes that it serves; empty if it serves all.
        schedule: by which it runs, if the step is a whole one.
        order: its chain, empty where the backward program runs as a whole.
        forward, backward: the programs as functions.
        written_over: positions of the arguments that the backward program writes over.
    """

    def __init__(self, number: int, order: Order) -> None:
        self.number, self.order = number, order
        self.limits: tuple[int, ...] = ()
        self.schedule: Schedule | None = None
        self.forward: Boxed | None = None
        self.backward: Boxed | None = None
        self.written_over: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Have this thread's steps run by this version, for the time of a block."""
        before, _thread.version = getattr(_thread, "version", None), self
        try:
            yield
        finally:
            _thread.version = before


class Unplanned(Exception):
    """A captured step has no programs for inputs of these sizes. Nothing of the step has run."""

    def __init__(self, step: "CapturedStep", sizes: tuple[int, ...]) -> None:
        super().__init__(f"no programs for sizes {sizes}")
        self.step, self.sizes = step, sizes


class CapturedStep:
    """A captured graph, whose two programs other programs of the same graph may replace between two steps.

    AOTAutograd holds on to two functions. They run the programs of the version in use, and save its number for the
    backward pass: so a step that began by one version ends by it. What is saved may differ from version to version.

    Where sizes of inputs vary, each version serves those up to its limits. The sizes are saved with the version's
    number.

    Attributes:
        versions: those by which the steps to come run. The first that serves a step's sizes is taken.
        run_begins: called with the step, the version and the sizes of each run.
        watch: called when a backward part begins, with False, and when it ends, with True.
        joint, unused: None for a graph in which nothing is differentiated.
    """

    def __init__(self, lower: Partition, compiler: Compiler) -> None:
        self._lower: Partition | None = lower
        self._compiler = compiler
        self._by_number: dict[int, Version] = {}
        self._numbers = itertools.count()
        self.versions: list[Version] = []
        self._sizes_at: list[int] = []  # positions of the inputs that are sizes
        self.run_begins: Callable[[CapturedStep, Version, tuple[int, ...]], None] = lambda *_: None
        self.watch: Callable[[bool], None] = lambda _: None
        self.joint: Joint | None = None
        self._tangents = 0
        self.unused: UnusedOutputs | None = None
        self._runs: list[Any] = []  # what each run saved of its version, weakly

    def partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The first two programs of the graph, as AOTAutograd asks for them."""
        self.joint, self.unused = joint, UnusedOutputs(joint)
        self._tangents = sum(map(is_tangent, joint.graph.graph.nodes))
        inputs = joint.graph.graph.find_nodes(op="placeholder")
        self._sizes_at = list(map(inputs.index, input_sizes(joint.graph.graph).values()))
        assert self._lower is not None
        forward, backward = self._lower(joint)
        self._lower = None  # which may hold the tensors that the graph was captured with
        self.versions = [self._version(backward)]
        return forward, backward

    def _version(self, backward: fx.GraphModule) -> Version:
        """A version of a number of its own, though threads may make some at once."""
        assert self.joint is not None
        version = Version(next(self._numbers), _order(self.joint, backward))
        self._by_number[version.number] = version
        return version

    def open_runs(self) -> list[Any]:
        """Runs whose backward pass is still to come, or may come again: what each has saved, weakly."""
        return [run for run in self._runs if not run.expired()]

    def sizes(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of these inputs that vary."""
        return tuple(arguments[at] for at in self._sizes_at)

    def version_for(self, arguments: Sequence[Any]) -> Version:
        """The version that serves these inputs.

        Raises:
            Unplanned: none does.
        """
        sizes = self.sizes(arguments)
        for version in self.versions:
            if all(map(le, sizes, version.limits)):
                self.run_begins(self, version, sizes)
                return version
        raise Unplanned(self, sizes)

    def compile_forward(self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
        if self.joint is None:  # nothing is differentiated
            return self._compiler(program, inputs, internal)
        self._by_number[0].forward = self._compiler(program, inputs, internal)

        def run(arguments: list[Any]) -> Any:
            version: Version = _thread.version
            assert version.forward is not None
            saved = torch.tensor([version.number, *self.sizes(arguments)], device="cpu")
            self._runs = [*self.open_runs(), weak_storage(saved)]
            arguments[:] = map(without_class, arguments)
            return (*version.forward(arguments), saved)

        return boxed_function(run)

    def compile_backward(self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
        self._by_number[0].backward = self._compiled_backward(program, inputs, internal, self._by_number[0])

        def run(arguments: list[Any]) -> Any:
            self.watch(False)  # while the run is open
            number, *sizes = arguments.pop(-1 - self._tangents).tolist()
            version = self._by_number[number]
            assert version.backward is not None
            arguments[:0] = sizes
            with without_autocast():
                results = run_backward(version.backward, arguments, self._tangents, version.written_over)
            if not version.order:
                self.watch(True)
            return results

        return boxed_function(run)

    def exchange(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        limits: tuple[int, ...] = (),
        schedule: Schedule | None = None,
    ) -> Version:
        """Run the steps to come, of sizes up to limits, by other programs; those that have begun end by theirs."""
        assert self.joint is not None
        version = self._version(backward)
        results, given = flat_outputs(forward), forward.graph.find_nodes(op="placeholder")
        saved = range(self.joint.forward_outputs, len(results))
        version.forward = self._compiler(forward, _captured(given), saved)
        inputs = laid_out(version.forward, _captured(results))[self.joint.forward_outputs :]
        taken = _captured(backward.graph.find_nodes(op="placeholder"))
        sizes = len(self._sizes_at)
        taken[sizes : sizes + len(inputs)] = inputs
        version.backward = self._compiled_backward(backward, taken, (), version)
        version.limits, version.schedule = limits, schedule
        others = [known for known in self.versions if known.limits != limits]
        self.versions = sorted([*others, version], key=lambda known: math.prod(known.limits))
        return version

    def _compiled_backward(
        self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int], version: Version
    ) -> Boxed:
        assert self.unused is not None
        taken = program.graph.find_nodes(op="placeholder")
        version.written_over = frozenset(at for at, node in enumerate(taken) if WRITTEN_OVER in node.meta)
        self.unused.without_nan(program)
        if not version.order:
            return self.unused.without(self._compiler(program, inputs, internal))
        return deferred(program, inputs, self._compiler, self.unused, lambda: self.watch(True))


def _order(joint: Joint, backward: fx.GraphModule) -> Order:
    """The chain of a backward program; empty if all gradients come at once."""
    deliveries = [] if joint.at_once else results_by_part(backward)
    return tuple(reversed(list(enumerate(deliveries)))) if len(deliveries) > 1 else ()


def _captured(nodes: Iterable[fx.Node | None]) -> list[Any]:
    return [None if node is None else node.meta.get("val") for node in nodes]


def _through_chain(arguments: list[Any], order: Order) -> list[Any]:
    """The arguments of a program, those with a gradient passed through the chain."""
    token = torch.empty(0, device="cpu")
    for number, positions in order:
        token, *passed = _Deliver.apply(number, token, *[arguments[position] for position in positions])  # type: ignore[no-untyped-call]  # torch has no types for it
        for position, tensor in zip(positions, passed, strict=True):
            arguments[position] = tensor
    return arguments


class _Deliver(torch.autograd.Function):
    """One link of the chain: does nothing going forward, and runs one part of the backward program going backward.

    The token orders the chain: each node's comes from the node that runs after it.
    """

    @staticmethod
    def forward(ctx: Any, number: int, token: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.number = number
        ctx.set_materialize_grads(False)
        return token.detach(), *(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, _token: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        runs = {id(run): run for item in gradients if item is not None if (run := getattr(item, RUN, None))}
        if len(runs) != 1 or not all(hasattr(item, RUN) for item in gradients if item is not None):
            raise ModelError(
                f"delivery {ctx.number} of the backward pass got a gradient that is not the compiled step's, so "
                "gradients would be lost. Please report this with the model; until then pass the model copies of "
                "the tensors that it changes or returns, or return copies of them (.clone())"
            )
        (run,) = runs.values()
        if isinstance(run, RunAgain):
            return None, None, *run(ctx.number)
        results: tuple[Any, ...] = _once(ctx, run, *gradients)
        return results


@once_differentiable
def _once(ctx: Any, run: Callable[[int], Sequence[Any]], *_gradients: torch.Tensor | None) -> tuple[Any, ...]:
    """Deliver the results of a part of the backward program, which can't be differentiated."""
    return None, None, *run(ctx.number)
