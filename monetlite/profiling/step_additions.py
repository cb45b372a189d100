"""Memory that a training step has beside the model's operators: optimizer, loss, and accumulated gradients."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from monetlite.core.costs import Cost, Profile
from monetlite.core.errors import ModelError
from monetlite.core.graph import (
    DELIVERY,
    LOSS,
    OPTIMIZER_STEP,
    Implementation,
    Operator,
    OperatorGraph,
    Phase,
    ValueKind,
)

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """An optimizer of torch.optim, and how many copies of the trained parameters it holds.

    Attributes:
        torch_name: its class. settings: those that are not the default.
        state: copies that it keeps between steps.
        foreach: copies that its multi-tensor step, the default on a GPU, holds while it runs. On a CPU it steps
            parameter by parameter, and the largest one counts that often.
    """

    torch_name: str
    settings: Mapping[str, float] = field(default_factory=dict)
    state: int
    foreach: int


OPTIMIZERS = {
    "sgd": OptimizerKind(torch_name="SGD", state=0, foreach=0),
    "momentum": OptimizerKind(torch_name="SGD", settings={"momentum": 0.9}, state=1, foreach=0),
    "adam": OptimizerKind(torch_name="Adam", state=2, foreach=1),
    "adamw": OptimizerKind(torch_name="AdamW", state=2, foreach=1),
}
"""State: the momentum buffer of SGD; exp_avg and exp_avg_sq of Adam and AdamW, whose step makes the square root of
the latter."""


def make_optimizer(
    name: str, parameters: "Iterable[nn.Parameter]", learning_rate: float
) -> "torch.optim.Optimizer":
    """One of torch's optimizers, by the name that commands know.

    Raises:
        ModelError: an unknown name.
    """
    import torch

    kind = _kind(name)
    made: torch.optim.Optimizer = getattr(torch.optim, kind.torch_name)(
        parameters, lr=learning_rate, **kind.settings
    )
    return made


def with_optimizer(profile: Profile, name: str) -> Profile:
    """Add an optimizer's state to a profile, and its step at the end.

    Raises:
        ModelError: an unknown name.
    """
    kind, graph = _kind(name), profile.graph
    gradients = [index for index, value in enumerate(graph.values) if value.kind is ValueKind.PARAM_GRAD]
    sizes = [graph.values[index].size_bytes for index in gradients]
    moment_bytes = sum(sizes) if profile.device != "cpu" else max(sizes, default=0)
    step = Operator(
        name="optimizer.step",
        family=OPTIMIZER_STEP,
        phase=Phase.BACKWARD,
        implementations=(Implementation(name="default", reads=tuple(gradients), writes=()),),
        rerunnable=False,
    )
    return replace(
        profile,
        graph=replace(
            graph,
            operators=(*graph.operators, step),
            resident=replace(graph.resident, optimizer=kind.state * sum(sizes)),
        ),
        costs=(*profile.costs, (Cost(latency_ms=0.0, workspace_bytes=kind.foreach * moment_bytes),)),
        optimizer=name,
    )


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """Memory of a loss that the caller computes, for each byte of the outputs that have a gradient.

    Attributes:
        kept: still in use when the backward pass begins, beside the gradients of the outputs.
        taken: in use at most before that, beside the former.
    """

    kept: float
    taken: float

    def of(self, graph: OperatorGraph) -> tuple[int, int]:
        """Bytes that are kept, and taken, in a step."""
        outputs_bytes = sum(value.size_bytes for value in graph.values if value.kind is ValueKind.TANGENT)
        return int(self.kept * outputs_bytes), int(self.taken * outputs_bytes)


def with_outside_loss(profile: Profile, memory: LossMemory) -> Profile:
    """Count what the caller's loss takes between forward and backward, and what it keeps all through the step."""
    graph = profile.graph
    kept_bytes, taken_bytes = memory.of(graph)
    costs = tuple(
        tuple(replace(cost, workspace_bytes=taken_bytes) for cost in of) if operator.family == LOSS else of
        for operator, of in zip(graph.operators, profile.costs, strict=True)
    )
    resident = replace(graph.resident, inputs=graph.resident.inputs + kept_bytes)
    return replace(profile, graph=replace(graph, resident=resident), costs=costs)


def with_accumulation(profile: Profile) -> Profile:
    """Count gradients of earlier batches, which are in memory all through the step.

    A step's own gradient is then there only from its computation until its delivery to autograd, which adds it up
    without a copy.
    """
    graph = profile.graph
    gradients = {index for index, value in enumerate(graph.values) if value.kind is ValueKind.PARAM_GRAD}
    copies = {value for operator in graph.operators if operator.family == DELIVERY for value in operator.writes}
    values = tuple(
        replace(value, kind=ValueKind.GRADIENT, size_bytes=0 if index in copies else value.size_bytes)
        if index in gradients
        else value
        for index, value in enumerate(graph.values)
    )
    operators = list(graph.operators)
    if operators[-1].family == OPTIMIZER_STEP:  # it reads those sums, and no gradient of this step
        (step,) = operators[-1].implementations
        operators[-1] = replace(operators[-1], implementations=(replace(step, reads=()),))
    kept_bytes = sum(graph.values[index].size_bytes for index in gradients)
    resident = replace(graph.resident, gradients=kept_bytes)
    graph = replace(graph, values=values, operators=tuple(operators), resident=resident)
    return replace(profile, graph=graph, accumulate=True)


def _kind(name: str) -> OptimizerKind:
    if name not in OPTIMIZERS:
        raise ModelError(f"optimizer {name!r} is unknown; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
