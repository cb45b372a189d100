"""A plan for `torch.compile` in a file of its own: which costly results the backward program computes again.

The model is compiled by Inductor on fake tensors up to the question of its partitioner, and the answer is written
down: the nodes that it asks about, in order, and those to compute again. In training the file gives the same
answer.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from monetlite.core.errors import ModelError
from monetlite.core.graph import LOSS_ONLY
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes, format_ms
from monetlite.exporting.plan_file import module_text, told
from monetlite.fx.torch_internals.torch_dispatch import FakeTensorMode
from monetlite.fx.torch_internals.torch_inductor import inductor_backend
from monetlite.fx.torch_internals.torch_messages import messages_left_out
from monetlite.fx.torch_internals.torch_partitioner import partitioned_by
from monetlite.planning.compile_budget import UNASKED, PartitionSolver
from monetlite.tracing.capture import without_memory
from monetlite.tracing.refusals import explain, own_error
from monetlite.tracing.step_inputs import Inputs, split_inputs


@dataclass(frozen=True, kw_only=True)
class CompiledPlan:
    """An answer to torch's partitioner.

    Attributes:
        nodes: operators that it asks about, in the order of the joint graph. again: positions of those to compute
        again. peak_bytes: predicted. budget_bytes: that it was found for.
    """

    nodes: tuple[str, ...]
    again: tuple[int, ...]
    peak_bytes: int
    budget_bytes: int


class _Answered(Exception):
    """Ends a compilation as soon as the partitioner has its answer."""


def compile_plan(
    model: nn.Module,
    example_inputs: Inputs,
    budget_bytes: int,
    device: str,
    *,
    outputs: str = LOSS_ONLY,
) -> CompiledPlan:
    """Find what `torch.compile`'s partitioner should compute again within a budget.

    Args:
        model: in training mode; on the meta device it stands for one on `device`.
        example_inputs: as in `trace`. outputs: as in `compile_within`.

    Raises:
        InfeasibleBudget: no choice fits. TraceError: the model can't be captured as one graph.
        ModelError: this torch's partitioner takes no solver of others.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, args, kwargs = without_memory(model, split_inputs(example_inputs), mode, device)
    solver, found = PartitionSolver(budget_bytes, outputs), list[CompiledPlan]()
    compile_graph = inductor_backend()

    def choose(graph: fx.Graph, node_info: Any, nodes: Sequence[fx.Node]) -> list[int]:
        again = set(solver.choose(graph, node_info, nodes))
        order = {node: at for at, node in enumerate(graph.nodes)}
        ranked = sorted(range(len(nodes)), key=lambda at: order[nodes[at]])
        assert solver.peak_bytes is not None
        found.append(
            CompiledPlan(
                nodes=tuple(str(nodes[at].target) for at in ranked),
                again=tuple(rank for rank, at in enumerate(ranked) if at in again),
                peak_bytes=solver.peak_bytes,
                budget_bytes=budget_bytes,
            )
        )
        raise _Answered

    def within_budget(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        with partitioned_by(choose, solver.estimate_ms):
            compile_graph(graph, inputs)
        raise ModelError(f"{UNASKED}, and a plan could change nothing")

    handled = sys.exc_info()[1]
    try:
        with messages_left_out(), mode:
            torch.compile(model, backend=within_budget, dynamic=False, fullgraph=True)(*args, **kwargs)
    except Exception as error:
        if not found:
            raise own_error(error, handled) or explain(error) from error
    return found[0]


_CODE = '''
import logging

import torch
import torch._dynamo
from torch._functorch import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomKnapsackSolver

{data}

def compile(model, **options):
    """Compile a model in training mode, as planned; options are those of torch.compile."""
    for name in ("debug", "info", "warning", "warning_once", "error"):  # a message would take the graph apart
        if method := getattr(logging.Logger, name, None):
            torch._dynamo.config.ignore_logging_functions.add(method)
    return torch.compile(model, **{{"backend": backend, "dynamic": False, "fullgraph": True, **options}})


def backend(graph, inputs, compile_graph=compile_fx):
    settings = {{
        "activation_memory_budget": 1e-9,  # so that the solver is asked
        "activation_memory_budget_solver": _Solver(),
        "activation_memory_budget_runtime_estimator": "testing",  # times are not looked at
    }}
    with config.patch(**settings):
        return compile_graph(graph, inputs)


class _Solver(CustomKnapsackSolver):
    def __call__(self, memory, joint_graph, max_memory, node_info, nodes):
        order = {{node: at for at, node in enumerate(joint_graph.nodes)}}
        ranked = sorted(range(len(nodes)), key=lambda at: order[nodes[at]])
        if tuple(str(nodes[at].target) for at in ranked) != NODES:
            raise RuntimeError(
                "the plan was made for another graph: export it again for this model in training mode and this "
                "version of torch; evaluate under torch.no_grad()"
            )
        again = [ranked[at] for at in AGAIN]
        return sorted(set(range(len(nodes))) - set(again)), again

    def uuid(self):
        return {digest!r}
'''


def compiled_text(plan: CompiledPlan, schedule: Schedule, module: str = "plan") -> str:
    """The text of the file of a plan for `torch.compile`, which is imported as a module of that name."""
    head = [
        f"A plan of {told(schedule.name)} for torch.compile, with torch {torch.__version__}.",
        "Written by `monetlite export`; it needs torch alone.",
        "",
        f"budget      {format_bytes(plan.budget_bytes)}",
        f"this plan   {format_bytes(plan.peak_bytes)}: {len(plan.again)} of {len(plan.nodes)} results made again",
        f"schedule    {format_bytes(schedule.peak_bytes)}, {format_ms(schedule.latency_ms)}: run by monetlite",
        "Peak of weights, inputs, results, what is kept and gradients, predicted for programs that run operator by",
        "operator. Inductor fuses operators, which takes less; workspaces come on top.",
        "",
        f"    import {module}",
        f"    model = {module}.compile(model)",
        "",
        "The model has to be captured as one graph. torch's partitioner asks for this answer through an interface",
        "that is there from torch 2.13 on and may change. Dropout is as torch.compile has it.",
    ]
    constants = [
        ("Results that the partitioner asks about, in the order of its graph.", "NODES", plan.nodes),
        ("Those of them that the backward program computes again.", "AGAIN", plan.again),
        ("Bytes.", "PREDICTED", compiled_facts(plan)),
    ]
    digest = hashlib.sha256(repr((plan.nodes, plan.again)).encode()).hexdigest()
    return module_text(head, constants, _CODE, digest=digest)


def compiled_facts(plan: CompiledPlan) -> dict[str, int]:
    """Figures of a plan for `torch.compile`."""
    return {"budget_bytes": plan.budget_bytes, "peak_bytes": plan.peak_bytes}
