"""A budget in bytes for `torch.compile`'s own partitioner.

The partitioner divides a step into a forward and a backward program, and asks a solver which costly nodes the
backward program computes again. Here the solver has choices on the front of bytes and time, by measured times, and
takes the first whose step fits, from the fastest on. The choices and their order are the same for every budget.
What a smaller budget had no room for has a higher peak, so peaks rise with budgets, and step times fall.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.announcing import warn
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.graph import LOSS_ONLY, Call, Implementation, Operator, OperatorGraph, Phase, Resident
from monetlite.core.options import PricingOptions
from monetlite.core.units import format_bytes, parse_budget
from monetlite.fx import storages
from monetlite.fx.call_encoding import encode_arguments
from monetlite.fx.torch_internals.torch_dispatch import without_modes
from monetlite.fx.torch_internals.torch_inductor import inductor_backend
from monetlite.fx.torch_internals.torch_messages import leave_messages_out
from monetlite.fx.torch_internals.torch_partitioner import kept_nodes, partitioned_by
from monetlite.operators.implementations import target_of
from monetlite.planning.partitioned_step import PartitionedStep, stored_bytes
from monetlite.planning.pipeline import price
from monetlite.solving.sum_fronts import Choice, front_of_sums
from monetlite.tracing.step_inputs import on_its_gpu, require_module

MAX_CHOICES = 32
"""Choices on the front that are looked at for a graph."""
DISTANCES = (1, 2, 4)
"""Distances in layers at which results are kept."""
UNASKED = (
    "torch's partitioner has nothing to choose in this step, whose results take little memory beside what it reads"
)
_times_ms: dict[tuple[str, str], float] = {}
"""Measured times by device and call: the same for every budget of a process."""
Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Any]


def compile_within(
    model: nn.Module,
    budget: str | int,
    *,
    outputs: str = LOSS_ONLY,
    backend: Backend | None = None,
    **options: Any,
) -> nn.Module:
    """Compile a model by `torch.compile` so that its training step stays within a budget.

    What the backward program computes again is chosen for the budget; all else is torch's. A function and not a
    context: `torch.compile` compiles at the first call, when a context would have ended.

    Args:
        model: in training mode, and captured as one graph.
        budget: `"6GB"`, `"6GiB"` or bytes: peak of weights, inputs, results, what is kept and gradients.
        outputs: those that the caller holds during the backward pass, of a model that returns its loss: `"loss"`
            for results of up to two dimensions, as trainers do, or `"all"`.
        backend: a function that compiles by torch's partitioner; by default Inductor, whose workspaces come on
            top.
        options: of `torch.compile`; by default `fullgraph` is True, as the budget holds in each graph, and
            `dynamic` is False.

    Raises:
        ModelError: this torch's partitioner takes no solver of others, or unknown outputs.
        BudgetError: the budget can't be read.
        InfeasibleBudget: when it is compiled, if no choice fits, inside of torch's BackendCompilerFailed; says the
            smallest peak of one.
    """
    require_module(model)
    budget_bytes = parse_budget(budget)
    PricingOptions(outputs=outputs)  # refuses unknown ones
    compile_graph = backend or inductor_backend()

    def within_budget(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        solver = PartitionSolver(budget_bytes, outputs)
        with on_its_gpu(graph, inputs), partitioned_by(solver.choose, solver.estimate_ms):
            compiled = compile_graph(graph, inputs)
        trained = torch.is_grad_enabled() and any(getattr(item, "requires_grad", False) for item in inputs)
        if trained and solver.peak_bytes is None:
            warn(f"{UNASKED}: its peak may be over {format_bytes(budget_bytes)}")
        return compiled

    with partitioned_by(lambda *_: [], lambda _: 0.0):
        pass  # refuses at once what this torch lacks
    leave_messages_out()  # each message would take the model's graph apart
    compiled: Any = torch.compile(model, backend=within_budget, **{"dynamic": False, "fullgraph": True, **options})
    return compiled  # type: ignore[no-any-return]  # a module, or a function of one


class PartitionSolver:
    """The choice of what a backward program computes again.

    Attributes:
        peak_bytes: predicted for the choice.
    """

    def __init__(self, budget_bytes: int, outputs: str = LOSS_ONLY) -> None:
        self.budget_bytes, self.outputs = budget_bytes, outputs
        self.peak_bytes: int | None = None
        self._order: dict[fx.Node, int] = {}

    def estimate_ms(self, node: fx.Node) -> float:
        """Measured time of a node; of one of several results, that of making them all; of a view, nothing."""
        if storages.is_item(node):
            node = node.all_input_nodes[0]
        return _measured_ms(node) if storages.is_kernel(node) else 0.0

    def choose(self, joint_graph: fx.Graph, node_info: Any, nodes: Sequence[fx.Node]) -> list[int]:
        """Positions of the nodes that are computed again: of the fastest choice within the budget.

        Raises:
            InfeasibleBudget: no choice fits.
        """
        self._order = {node: at for at, node in enumerate(joint_graph.nodes)}
        peaks = []
        for choice in self._choices(nodes):
            again = [at for at in range(len(nodes)) if at not in choice.kept]
            given = kept_nodes(joint_graph, node_info, [nodes[at] for at in again])
            peaks.append(PartitionedStep(joint_graph=joint_graph, kept=given, outputs=self.outputs).peak_bytes())
            if peaks[-1] <= self.budget_bytes:
                self.peak_bytes = peaks[-1]
                return again
        smallest = min(peaks)
        raise InfeasibleBudget(
            f"torch.compile's partitioner can't keep a step within {format_bytes(self.budget_bytes)} "
            f"({self.budget_bytes} bytes): the smallest peak of {len(peaks)} choices is {format_bytes(smallest)} "
            f"({smallest} bytes). Raise the budget, or use monetlite's own backend, which has more to choose from",
            budget_bytes=self.budget_bytes,
            proven_bytes=0,
            reached_bytes=smallest,
        )

    def _choices(self, nodes: Sequence[fx.Node]) -> list[Choice]:
        """Nodes to keep, the fastest choice first: the front of bytes and time, and small nodes alone.

        Nodes of a kind are equal, as layers have them: all are kept, some at equal distances, or none. The smallest
        kinds keep little, and spare the backward program from computing far back.
        """
        alike: dict[tuple[str, int, float], list[int]] = defaultdict(list)
        for at, node in enumerate(nodes):
            key = str(node.target), stored_bytes(node), self.estimate_ms(node)
            alike[key].append(at)
        groups = []
        for (_, size, ms), places in alike.items():
            ordered = sorted(places, key=lambda at: self._order[nodes[at]])
            options = dict.fromkeys(frozenset(ordered[::distance]) for distance in DISTANCES)
            groups.append([Choice(size * len(some), ms * len(some), some) for some in options])
        found = {choice.kept: choice for options in groups for choice in options}
        small = Choice(0, 0.0, frozenset())
        for whole, *_ in sorted(groups, key=lambda options: options[0].size_bytes):
            small += whole
            found[small.kept] = small
        found |= {choice.kept: choice for choice in front_of_sums(groups, MAX_CHOICES)}
        return sorted(found.values(), key=attrgetter("rank"))


def _measured_ms(node: fx.Node) -> float:
    results = storages.results(node)
    call = Call(
        target=target_of(node),
        args=encode_arguments(node.args, lambda _: None),
        kwargs=tuple((name, encode_arguments(value, lambda _: None)) for name, value in node.kwargs.items()),
        outputs=tuple(None if item is None else item.name for item in results),
    )
    device = next(item.meta["val"].device.type for item in results if item is not None)
    key = device, call.signature
    if key not in _times_ms:
        way = Implementation(name="default", reads=(), writes=(), call=call)
        operator = Operator(name=node.name, family=target_of(node), phase=Phase.FORWARD, implementations=(way,))
        graph = OperatorGraph(name=node.name, operators=(operator,), values=(), resident=Resident(), device=device)
        with without_modes():
            ((cost,),) = price(graph, PricingOptions()).costs
        _times_ms[key] = cost.latency_ms
    return _times_ms[key]
