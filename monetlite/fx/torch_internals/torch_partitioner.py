"""The partitioner of `torch.compile`, which divides a joint graph into a forward and a backward program.

Imported where it is used: Inductor's part takes seconds.

| symbol | use, and what breaks when it changes |
| --- | --- |
| `CustomKnapsackSolver`, `CustomRuntimeEstimator` | base classes of what the partitioner asks; from torch 2.13 on |
| `activation_memory_budget`, `..._solver`, `..._runtime_estimator` | settings by which it asks them |
| `solve_min_cut`, `MinCutOptions` | what is kept for a choice of the solver's; predicted peaks would be wrong |
| `ban_recompute_reductions` | setting that the last choice of the partitioner keeps |
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from monetlite.core.errors import ModelError
from monetlite.fx.torch_internals.torch_aot import aot_settings

Choose = Callable[[fx.Graph, Any, Sequence[fx.Node]], list[int]]
"""From the joint graph, its `NodeInfo` and nodes to choose from to the positions of those to recompute."""
_SMALLEST_RATIO = 1e-9
"""Budget of torch's own at which it neither recomputes all nor takes a choice without asking the solver."""


def partitioned_by(choose: Choose, estimate_ms: Callable[[fx.Node], float]) -> AbstractContextManager[None]:
    """Have torch's partitioner ask these what to recompute, for the time of a block.

    Args:
        choose: what is recomputed. estimate_ms: time of a node. Both may answer otherwise the next time, so nothing
            is taken from torch's caches.

    Raises:
        ModelError: this torch has no such setting.
    """
    try:
        from torch._inductor.custom_graph_pass import CustomKnapsackSolver, CustomRuntimeEstimator
    except ImportError as error:
        raise ModelError(
            f"the partitioner of torch {torch.__version__} takes no solver of others; that of torch 2.13 does. "
            'torch.compile(model, backend="monetlite", options={"budget": ...}) works with this one'
        ) from error

    class Solver(CustomKnapsackSolver):
        def __call__(
            self, memory: Any, joint_graph: fx.Graph, max_memory: Any, node_info: Any, nodes: list[fx.Node]
        ) -> tuple[list[int], list[int]]:
            again = choose(joint_graph, node_info, nodes)
            return sorted(set(range(len(nodes))) - set(again)), again

        def uuid(self) -> str:
            return str(uuid.uuid4())

    class Estimator(CustomRuntimeEstimator):
        def __call__(self, node: fx.Node) -> float:
            return estimate_ms(node)

        def uuid(self) -> str:
            return str(uuid.uuid4())

    return aot_settings(
        activation_memory_budget=_SMALLEST_RATIO,
        activation_memory_budget_solver=Solver(),
        activation_memory_budget_runtime_estimator=Estimator(),
    )


def kept_nodes(joint_graph: fx.Graph, node_info: Any, recomputed: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that the partitioner keeps for the backward program, where it may recompute these."""
    from torch._functorch import config
    from torch._functorch.partitioners import MinCutOptions, solve_min_cut
    from torch.utils._ordered_set import OrderedSet

    options = MinCutOptions(
        ban_if_used_far_apart=False,
        ban_if_long_fusible_chains=False,
        ban_if_materialized_backward=False,
        ban_if_not_in_allowlist=False,
        ban_if_reduction=config.ban_recompute_reductions,
    )
    found: list[fx.Node] = solve_min_cut(joint_graph, node_info, options, OrderedSet(recomputed))[0]
    return found
