"""Memory that a training step has beside the model's operators: optimizer, loss, and accumulated gradients."""

import importlib
import math
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
    """An optimizer, and how many copies of the trained parameters it holds.

    Attributes:
        made_by: its class, by its full name. settings: those that are not the default.
        state: copies that it keeps between steps.
        foreach: copies that its multi-tensor step, the default on a GPU, holds while it runs. On a CPU it steps
            parameter by parameter, and the largest one counts that often.
        eight_bit: the copies have 8 bits and a float32 for each block of a copy, but for small parameters.
    """

    made_by: str
    settings: Mapping[str, float] = field(default_factory=dict)
    state: int
    foreach: int
    eight_bit: bool = False

    def state_bytes(self, size_bytes: int, elements: int) -> int:
        """Bytes that it keeps of a parameter between steps."""
        if not self.eight_bit:
            return self.state * size_bytes
        if elements < EIGHT_BIT_ELEMENTS:
            return self.state * 4 * elements
        return self.state * (elements + 4 * math.ceil(elements / EIGHT_BIT_BLOCK))


EIGHT_BIT_ELEMENTS, EIGHT_BIT_BLOCK = 4096, 256
"""bitsandbytes' layout: parameters with fewer elements have a state in float32; elements that share a scale.
Versions before 0.44 shared one among 2048."""


OPTIMIZERS = {
    "sgd": OptimizerKind(made_by="torch.optim.SGD", state=0, foreach=0),
    "momentum": OptimizerKind(made_by="torch.optim.SGD", settings={"momentum": 0.9}, state=1, foreach=0),
    "adam": OptimizerKind(made_by="torch.optim.Adam", state=2, foreach=1),
    "adamw": OptimizerKind(made_by="torch.optim.AdamW", state=2, foreach=1),
    "adamw8bit": OptimizerKind(made_by="bitsandbytes.optim.AdamW8bit", state=2, foreach=0, eight_bit=True),
}
"""State: the momentum buffer of SGD; exp_avg and exp_avg_sq of Adam and AdamW, whose step makes the square root of
the latter. 8-bit AdamW steps in place."""


def make_optimizer(
    name: str, parameters: "Iterable[nn.Parameter]", learning_rate: float
) -> "torch.optim.Optimizer":
    """An optimizer, by the name that commands know.

    Raises:
        ModelError: an unknown name, or one of a library that is not installed.
    """
    kind = _kind(name)
    module, _, class_name = kind.made_by.rpartition(".")
    try:
        optimizer_class = getattr(importlib.import_module(module), class_name)
    except ImportError as error:
        library = module.partition(".")[0]
        raise ModelError(
            f"optimizer {name!r} is {kind.made_by}, and {library} can't be imported here ({error}). Its state "
            f"can be counted without; to take its step: pip install {library}"
        ) from error
    made: torch.optim.Optimizer = optimizer_class(parameters, lr=learning_rate, **kind.settings)
    return made


def with_optimizer(profile: Profile, name: str) -> Profile:
    """Add an optimizer's state to a profile, and its step at the end.

    Raises:
        ModelError: an unknown name.
    """
    kind, graph = _kind(name), profile.graph
    gradients = [index for index, value in enumerate(graph.values) if value.kind is ValueKind.PARAM_GRAD]
    sizes = [graph.values[index].size_bytes for index in gradients]
    elements = [math.prod(graph.values[index].shape) for index in gradients]
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
            resident=replace(graph.resident, optimizer=sum(map(kind.state_bytes, sizes, elements))),
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
