"""Memory that a training step has beside the model's operators: optimizer, loss, and accumulated gradients."""

import importlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

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
    Resident,
    Value,
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
        foreach: copies that its multi-tensor step, torch's default on a GPU, holds while it runs.
        looped: copies of one parameter that its step holds on a CPU, where torch goes parameter by parameter.
        left: copies of the parameter before it that are still there.
        eight_bit: the copies have 8 bits and a float32 for each block of a copy, but for small parameters.
    """

    made_by: str
    settings: Mapping[str, float] = field(default_factory=dict)
    state: int
    foreach: int
    looped: int
    left: int = 0
    eight_bit: bool = False

    def step_bytes(self, device: str, sizes: Iterable[int]) -> int:
        """Bytes that its step on a device holds for parameters of some sizes."""
        if device != "cpu":
            return self.foreach * sum(sizes)
        largest, second, *_ = *sorted(sizes, reverse=True), 0, 0
        return self.looped * largest + self.left * second

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
    "sgd": OptimizerKind(made_by="torch.optim.SGD", state=0, foreach=1, looped=1),
    "momentum": OptimizerKind(made_by="torch.optim.SGD", settings={"momentum": 0.9}, state=1, foreach=1, looped=1),
    "adam": OptimizerKind(made_by="torch.optim.Adam", state=2, foreach=1, looped=3, left=1),
    "adamw": OptimizerKind(made_by="torch.optim.AdamW", state=2, foreach=1, looped=2, left=1),
    "adamw8bit": OptimizerKind(
        made_by="bitsandbytes.optim.AdamW8bit", state=2, foreach=0, looped=0, eight_bit=True
    ),
}
"""State: the momentum buffer of SGD; exp_avg and exp_avg_sq of Adam and AdamW, whose step makes the square root of
the latter, and on a CPU a quotient of it, which stays until the next one. Weight decay counts: SGD and Adam add it
to a copy of the gradients. 8-bit AdamW steps in place."""


def make_optimizer(
    name: str, parameters: "Iterable[nn.Parameter]", learning_rate: float
) -> "torch.optim.Optimizer":
    """An optimizer, by the name that commands know.

    Raises:
        ModelError: an unknown name, or one of a library that is not installed.
    """
    kind = optimizer_kind(name)
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


class Counted(Protocol):
    """Anything that says what is counted beside the model's operators: options, or a schedule."""

    @property
    def optimizer(self) -> str | None: ...
    @property
    def accumulate(self) -> bool: ...
    @property
    def step_in_backward(self) -> bool: ...


def with_additions(profile: Profile, counted: Counted) -> Profile:
    """Add to a profile what is counted beside the model's operators."""
    if counted.optimizer is not None:
        add = with_step_in_backward if counted.step_in_backward else with_optimizer
        profile = add(profile, counted.optimizer)
    return with_accumulation(profile) if counted.accumulate else profile


def with_optimizer(profile: Profile, name: str) -> Profile:
    """Add an optimizer's state to a profile, and its step at the end.

    Raises:
        ModelError: an unknown name.
    """
    kind, graph = optimizer_kind(name), profile.graph
    gradients = _gradients(graph)
    sizes = [value.size_bytes for value in _trained(graph)]
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
            resident=_with_state(graph, kind),
        ),
        costs=(
            *profile.costs,
            (Cost(latency_ms=0.0, workspace_bytes=kind.step_bytes(profile.device, sizes)),),
        ),
        optimizer=name,
    )


def with_step_in_backward(profile: Profile, name: str) -> Profile:
    """Add an optimizer's state to a profile, and its steps where gradients are delivered.

    A parameter is updated as soon as autograd has its gradient, which is freed then: a gradient is in memory from
    its making to its delivery. Those of one delivery are there together, with the workspace for one of them.

    Raises:
        ModelError: an unknown name; a gradient that no optimizer takes, or that has to be scaled.
    """
    kind, graph = optimizer_kind(name), profile.graph
    if graph.autocast == "float16":
        raise ModelError(
            "autocast to float16 needs GradScaler, which looks at all gradients before any parameter is updated, "
            "so step_in_backward can't be used; autocast to bfloat16 needs no scaling"
        )
    if any(spec.requires_grad for spec in graph.inputs.values()):
        raise ModelError(
            "an input requires a gradient, which stays in memory; step_in_backward counts gradients as freed at "
            "once. Leave it out, or detach the input"
        )
    gradients = set(_gradients(graph))

    def step_bytes(operator: Operator) -> int:
        (delivery,) = operator.implementations
        updated = gradients.intersection((*delivery.reads, *delivery.writes))
        largest = max((graph.values[index].size_bytes for index in updated), default=0)
        return kind.step_bytes(profile.device, [largest])

    costs = tuple(
        (Cost(latency_ms=0.0, workspace_bytes=step_bytes(operator)),) if operator.family == DELIVERY else of
        for operator, of in zip(graph.operators, profile.costs, strict=True)
    )
    values = tuple(
        replace(value, kind=ValueKind.GRADIENT) if index in gradients else value
        for index, value in enumerate(graph.values)
    )
    graph = replace(graph, values=values, resident=_with_state(graph, kind))
    return replace(profile, graph=graph, costs=costs, optimizer=name, step_in_backward=True)


def _gradients(graph: OperatorGraph) -> list[int]:
    """The gradients that autograd keeps, one for each trained parameter and each input that requires one."""
    return [index for index, value in enumerate(graph.values) if value.kind is ValueKind.PARAM_GRAD]


def _trained(graph: OperatorGraph) -> list[Value]:
    """The gradients of trained parameters: those that are kept, without as many as inputs have of their sizes."""
    of_inputs = Counter((spec.dtype, math.prod(spec.shape)) for spec in graph.inputs.values() if spec.requires_grad)
    found = []
    for index in _gradients(graph):
        value = graph.values[index]
        key = value.dtype, math.prod(value.shape)
        if of_inputs[key]:
            of_inputs[key] -= 1
        else:
            found.append(value)
    return found


def _with_state(graph: OperatorGraph, kind: OptimizerKind) -> Resident:
    """Resident bytes of a step, an optimizer's state among them."""
    state_bytes = sum(kind.state_bytes(value.size_bytes, math.prod(value.shape)) for value in _trained(graph))
    return replace(graph.resident, optimizer=state_bytes)


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
        return int(self.kept * graph.outputs_bytes), int(self.taken * graph.outputs_bytes)


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
    gradients = set(_gradients(graph))
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
    resident = replace(graph.resident, gradients=graph.resident.gradients + kept_bytes)
    graph = replace(graph, values=values, operators=tuple(operators), resident=resident)
    return replace(profile, graph=graph, accumulate=True)


def optimizer_kind(name: str) -> OptimizerKind:
    """Look up an optimizer.

    Raises:
        ModelError: an unknown name, as a file may have.
    """
    if name not in OPTIMIZERS:
        raise ModelError(f"optimizer {name!r} is unknown; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
