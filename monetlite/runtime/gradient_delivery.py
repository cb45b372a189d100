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

An output that the loss does not use gets no gradient, and neither do parameters that lead to it alone, as in plain
training. Autograd hands the program's node zeros for such an output, and a gradient computed from zeros is not None
but zero: an optimizer would move that parameter by its momentum and its weight decay. A hook on the node sees
which gradients came in, right before the node runs, on the thread that runs it.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import le, or_
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals.torch_aot import backward_node, boxed_function, descriptors, is_tangent
from monetlite.fx.varying_sizes import input_sizes
from monetlite.operators.program_calls import deliver
from monetlite.tracing.capture import Backend, Boxed, Compiler, Joint, Partition, aot_backend, boxed, flat_outputs

_RUN = "_monetlite_run"
"""Attribute of a stand-in: the function that runs a part of the backward program and returns its results."""
_RETURNED = (
    descriptors.InputMutationAOTOutput,
    descriptors.MetadataMutationAOTOutput,
    descriptors.PlainAOTOutput,
    descriptors.IntermediateBaseAOTOutput,
)
"""Kinds of forward results that AOTAutograd's node returns."""

_thread = threading.local()
Keeper: TypeAlias = "Callable[[CapturedStep], None]"


def delivering_backend(lower: Partition, compiler: Compiler = boxed, keep: "Keeper | None" = None) -> Backend:
    """A backend for `torch.compile` that runs the two programs of a joint graph and delivers gradients as marked.

    Args:
        lower: makes the forward and the backward program of a joint graph.
        compiler: makes a function of a program, or of one part of the backward program.
        keep: is called with each graph that is captured, whose programs it may exchange later.
    """

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        step = CapturedStep(lower, compiler)
        run = aot_backend(step.partition, forward=step.compile_forward, backward=step.compile_backward)(
            graph, inputs
        )
        if step.unused is None:
            return run
        watched = step.unused
        if keep is not None:
            keep(step)

        def call(*arguments: Any) -> Any:
            version = step.version_for(arguments)
            with version.in_use():
                outputs = run(*_through_chain(list(arguments), version.order))
            watched.watch(outputs)
            return outputs

        return call

    return backend


Order: TypeAlias = "tuple[tuple[int, Sequence[int]], ...]"
"""Numbers of deliveries, and the positions of the inputs whose gradients each delivers, the last one first."""


class Version:
    """Two programs of a captured step.

    Attributes:
        number: among the versions of its step, in a tensor that is saved for the backward pass.
        limits: the largest input sizes that it serves, where they vary.
        order: its chain, empty where the backward program runs as a whole.
        forward, backward: the programs as functions.
    """

    def __init__(self, number: int, order: Order) -> None:
        self.number = number
        self.limits: tuple[int, ...] = ()
        self.order = order
        self.saved = torch.tensor([number])
        self.forward: Boxed | None = None
        self.backward: Boxed | None = None

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

    Where sizes of inputs vary, each version serves those up to its limits, and the smallest that serves is taken.
    The sizes are saved with the version's number.

    Attributes:
        current: the version by which the steps to come run, where sizes don't vary.
        by_size: the versions by which they run where sizes do, by their limits.
        last_sizes: of the last step.
        watch: called with "begin" and "end" of each backward part, if there is one.
        unused: None for a graph in which nothing is differentiated.
    """

    def __init__(self, lower: Partition, compiler: Compiler) -> None:
        self._lower, self._compiler = lower, compiler
        self._versions: list[Version] = []
        self.current: Version
        self.by_size: dict[tuple[int, ...], Version] = {}
        self.last_sizes: tuple[int, ...] = ()
        self._sizes_at: list[int] = []  # positions of the inputs that are sizes
        self.watch: Callable[[str], None] | None = None
        self._joint: Joint | None = None
        self._tangents = 0
        self.unused: UnusedOutputs | None = None

    def partition(self, joint: Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The first two programs of the graph, as AOTAutograd asks for them."""
        self._joint, self.unused = joint, UnusedOutputs(joint)
        self._tangents = sum(map(is_tangent, joint.graph.graph.nodes))
        inputs = joint.graph.graph.find_nodes(op="placeholder")
        self._sizes_at = list(map(inputs.index, input_sizes(joint.graph.graph).values()))
        forward, backward = self._lower(joint)
        self.current = Version(0, _order(joint, backward))
        self._versions.append(self.current)
        return forward, backward

    def version_for(self, arguments: Sequence[Any]) -> Version:
        """The version that serves these inputs.

        Raises:
            Unplanned: none does.
        """
        if not self._sizes_at:
            return self.current
        sizes = tuple(arguments[at] for at in self._sizes_at)
        version = self.by_size[self.limits_for(sizes)]
        self.last_sizes = sizes
        return version

    def limits_for(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The limits of the version that serves these sizes.

        Raises:
            Unplanned: none does.
        """
        for limits in self.by_size:
            if all(map(le, sizes, limits)):
                return limits
        raise Unplanned(self, sizes)

    def serve(self, version: Version, limits: tuple[int, ...]) -> None:
        """Have a version serve sizes up to these."""
        version.limits = limits
        self.by_size = dict(sorted({**self.by_size, limits: version}.items(), key=lambda item: math.prod(item[0])))

    def compile_forward(self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
        if self._joint is None:  # nothing is differentiated
            return self._compiler(program, inputs, internal)
        self._versions[0].forward = self._compiler(program, inputs, internal)

        def run(arguments: list[Any]) -> Any:
            version: Version = _thread.version
            assert version.forward is not None
            saved = version.saved
            if self._sizes_at:
                saved = torch.tensor([version.number, *(arguments[at] for at in self._sizes_at)])
            return (*version.forward(arguments), saved)

        return boxed_function(run)

    def compile_backward(self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int]) -> Boxed:
        self._versions[0].backward = self._compiled_backward(program, inputs, internal, self._versions[0])

        def run(arguments: list[Any]) -> Any:
            number, *sizes = arguments.pop(-1 - self._tangents).tolist()
            version = self._versions[number]
            assert version.backward is not None
            arguments[:0] = sizes
            self._tell("begin")
            results = version.backward(arguments)
            if not version.order:
                self._tell("end")
            return results

        return boxed_function(run)

    def exchange(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Version:
        """Run the steps to come by other programs; those that have begun end by theirs."""
        assert self._joint is not None
        version = Version(len(self._versions), _order(self._joint, backward))
        results, given = flat_outputs(forward), forward.graph.find_nodes(op="placeholder")
        saved = range(self._joint.forward_outputs, len(results))
        version.forward = self._compiler(forward, _captured(given), saved)
        inputs = _laid_out(version.forward, _captured(results))[self._joint.forward_outputs :]
        taken = _captured(backward.graph.find_nodes(op="placeholder"))
        sizes = len(self._sizes_at)
        taken[sizes : sizes + len(inputs)] = inputs
        version.backward = self._compiled_backward(backward, taken, (), version)
        self._versions.append(version)
        self.current = version
        return version

    def _tell(self, what: str) -> None:
        if self.watch is not None:
            self.watch(what)

    def _compiled_backward(
        self, program: fx.GraphModule, inputs: Sequence[Any], internal: Collection[int], version: Version
    ) -> Boxed:
        assert self.unused is not None
        if not version.order:
            return self.unused.without(self._compiler(program, inputs, internal))
        return _deferred(program, inputs, self._compiler, self.unused, lambda: self._tell("end"))


def _order(joint: Joint, backward: fx.GraphModule) -> Order:
    """The chain of a backward program; empty if all gradients come at once."""
    deliveries = [] if joint.at_once else _results_by_part(backward)
    return tuple(reversed(list(enumerate(deliveries)))) if len(deliveries) > 1 else ()


def _captured(nodes: Iterable[fx.Node | None]) -> list[Any]:
    return [None if node is None else node.meta.get("val") for node in nodes]


def _through_chain(arguments: list[Any], order: Order) -> list[Any]:
    """The arguments of a program, those with a gradient passed through the chain."""
    token = torch.empty(0)
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
    @once_differentiable
    def backward(ctx: Any, _token: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        runs = {id(run): run for item in gradients if item is not None if (run := getattr(item, _RUN, None))}
        if len(runs) != 1 or not all(hasattr(item, _RUN) for item in gradients if item is not None):
            raise ModelError(
                f"delivery {ctx.number} of the backward pass got a gradient that is not the compiled step's, so "
                "gradients would be lost. Please report this with the model; until then pass the model copies of "
                "the tensors that it changes or returns, or return copies of them (.clone())"
            )
        (run,) = runs.values()
        return None, None, *run(ctx.number)


@dataclass(frozen=True, kw_only=True)
class BackwardPart:
    """A part of a backward program: the calls up to a delivery.

    Attributes:
        run: takes the tensors named by `takes`; returns those named by `gives`, then its results.
        takes: names of tensors; `lets_go` are those that no later part reads.
        gives: names of tensors that later parts read.
        results: positions, in the whole program, of the results it computes.
    """

    run: Boxed
    takes: tuple[str, ...]
    lets_go: frozenset[str]
    gives: tuple[str, ...]
    results: tuple[int, ...]


def _deferred(
    program: fx.GraphModule,
    inputs: Sequence[Any],
    compiler: Compiler,
    unused: "UnusedOutputs",
    ended: Callable[[], None],
) -> Boxed:
    """A backward program that returns a stand-in for one result of each part; the parts run later, in order.

    `ended` is called after the last.

    Parts hand tensors on by name. A tensor that no later part reads is given away, so it is freed inside the part
    exactly where it would be in the whole program.
    """
    parts = _split(program, inputs, compiler)
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    results = flat_outputs(program)
    first = {part.results[0]: results[part.results[0]] for part in parts if part.results}
    specs = {
        at: (node.meta["val"].shape, node.meta["val"].dtype, node.meta["val"].device)
        for at, node in first.items()
        if node is not None
    }

    def call(arguments: list[Any]) -> list[torch.Tensor | None]:
        tensors, left_out = dict(zip(names, arguments, strict=True)), unused.left_out()
        arguments.clear()

        def run(number: int) -> list[Any]:
            part = parts[number]
            taken = [tensors.pop(name) if name in part.lets_go else tensors[name] for name in part.takes]
            made = list(part.run(taken))
            tensors.update(zip(part.gives, made, strict=False))
            made_results = zip(part.results, made[len(part.gives) :], strict=True)
            if number == len(parts) - 1:
                ended()
            return [None if at in left_out else result for at, result in made_results]

        stand_ins: list[torch.Tensor | None] = [None] * len(results)
        for at, (shape, dtype, device) in specs.items():
            stand_in = torch.empty((), dtype=dtype, device=device).expand(shape)
            setattr(stand_in, _RUN, run)
            stand_ins[at] = stand_in
        return stand_ins

    return boxed_function(call)


def _results_by_part(program: fx.GraphModule) -> list[list[int]]:
    """For each part of a program, the positions of the results that it delivers; the last delivers the rest."""
    outputs = flat_outputs(program)
    parts = [
        [at for at, node in enumerate(outputs) if node is not None and node in mark.args]
        for mark in program.graph.nodes
        if mark.target is deliver
    ]
    delivered = {at for part in parts for at in part}
    rest = [at for at, node in enumerate(outputs) if node is not None and at not in delivered]
    return [*parts, rest] if rest or not parts else parts


def _split(program: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> list[BackwardPart]:
    """Cut a program after each `deliver` and compile each part for these inputs (fake tensors)."""
    results, outputs = _results_by_part(program), flat_outputs(program)
    bodies: list[list[fx.Node]] = [[] for _ in results]
    number = 0
    for node in program.graph.nodes:
        if node.target is deliver:
            number = min(number + 1, len(results) - 1)
        elif node.op not in ("placeholder", "output"):
            bodies[number].append(node)
    delivered = [[node for at in positions if (node := outputs[at]) is not None] for positions in results]
    reads = [
        [*(read for node in body for read in node.all_input_nodes), *made]
        for body, made in zip(bodies, delivered, strict=True)
    ]
    last_read = {node: number for number, read in enumerate(reads) for node in read}
    values = dict(zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True))
    parts = []
    for number, (body, made) in enumerate(zip(bodies, delivered, strict=True)):
        inside = set(body)
        takes = list(dict.fromkeys(node for node in reads[number] if node not in inside))
        gives = [node for node in body if last_read.get(node, 0) > number]
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in takes:
            new[node] = graph.placeholder(node.name)
            new[node].meta.update(node.meta)
        for node in body:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in (*gives, *made)))
        run = compiler(fx.GraphModule(program, graph), [values[node] for node in takes], range(len(gives)))
        values.update(zip(gives, _laid_out(run, [node.meta.get("val") for node in gives]), strict=True))
        parts.append(
            BackwardPart(
                run=run,
                takes=tuple(node.name for node in takes),
                lets_go=frozenset(node.name for node in takes if last_read[node] == number),
                gives=tuple(node.name for node in gives),
                results=tuple(results[number]),
            )
        )
    return parts


def _laid_out(run: Boxed, captured: Sequence[Any]) -> list[Any]:
    """The first results of a compiled program, as captured, with the strides that its compiler chose."""
    chosen: Sequence[tuple[int, ...] | None] = getattr(run, "output_strides", None) or [None] * len(captured)
    return [
        value.new_empty_strided(value.shape, strides)
        if strides is not None and isinstance(value, torch.Tensor) and strides != value.stride()
        else value
        for value, strides in zip(captured, chosen, strict=False)
    ]


class UnusedOutputs:
    """The outputs of a step that the loss does not use, and the gradients that only they reach."""

    def __init__(self, joint: Joint) -> None:
        graph = joint.graph.graph
        output = graph.output_node()
        tangents = [node for node in graph.nodes if is_tangent(node)]
        descriptions = [node.meta["desc"] for node in tangents]
        self._outputs = [item.output for item in descriptions if isinstance(item, descriptors.TangentAOTInput)]
        returned = [item for item in output.meta["desc"][: joint.forward_outputs] if isinstance(item, _RETURNED)]
        self._returned = len(returned)
        self._positions = [returned.index(item) for item in self._outputs if item in returned]
        self._several = len(tangents) > 1 and len(self._positions) == len(tangents)
        self._reached = _reached(graph, tangents)[joint.forward_outputs :]

    def watch(self, outputs: Sequence[Any]) -> None:
        """Have the node that made these outputs note which gradients it gets."""
        node = self._node(outputs) if self._several else None
        if node is not None:
            node.register_prehook(self._note)

    def _node(self, outputs: Sequence[Any]) -> Any:
        """AOTAutograd's node behind an output, or behind the tensor that an output is a view of."""
        for item in self._outputs:
            output = item.base_of if isinstance(item, descriptors.IntermediateBaseAOTOutput) else item
            if isinstance(output, descriptors.PlainAOTOutput):
                return backward_node(outputs[output.idx])
        return None

    def _note(self, gradients: Sequence[Any]) -> None:
        if len(gradients) != self._returned:
            raise ModelError(
                f"the compiled step got gradients of {len(gradients)} outputs and has {self._returned}, so those "
                "that the loss does not use can't be told; please report this with the model and torch's version"
            )
        given = (1 << number for number, at in enumerate(self._positions) if gradients[at] is not None)
        _thread.noted = (self, reduce(or_, given, 0))

    def left_out(self) -> frozenset[int]:
        """Positions of the gradients, of the program about to run, that no incoming gradient reaches."""
        noted, _thread.noted = getattr(_thread, "noted", None), None
        if noted is None or noted[0] is not self:
            return frozenset()
        given = noted[1]
        return frozenset(at for at, reached in enumerate(self._reached) if reached and not reached & given)

    def without(self, run: Boxed) -> Boxed:
        """A backward program without the gradients that are left out."""
        if not self._several:
            return run

        def call(arguments: list[Any]) -> list[Any]:
            left_out = self.left_out()
            return [None if at in left_out else result for at, result in enumerate(run(arguments))]

        return boxed_function(call)


def _reached(graph: fx.Graph, tangents: Sequence[fx.Node]) -> list[int]:
    """For each result, a bit for each incoming gradient that it depends on."""
    bits = {node: 1 << number for number, node in enumerate(tangents)}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            bits[node] = reduce(or_, (bits.get(read, 0) for read in node.all_input_nodes), 0)
    results: Any = graph.output_node().args[0]
    return [bits.get(item, 0) if isinstance(item, fx.Node) else 0 for item in results]
