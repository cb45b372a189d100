"""What an optimizer adds to a step: its state, all the time, and what its own step holds for a moment."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from monetlite.core.costs import Cost, Profile
from monetlite.core.errors import ModelError
from monetlite.core.graph import OPTIMIZER_STEP, Implementation, Operator, Phase, ValueKind

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Copies of the trained parameters that an optimizer of torch.optim holds, with its default settings.

    `state` counts what it keeps between steps; `foreach` what its multi-tensor step, the default on a GPU,
    holds for a moment; elsewhere it goes parameter by parameter, and the largest one counts that often.
    """

    state: int
    foreach: int


OPTIMIZERS = {
    "sgd": Optimizer(state=0, foreach=0),
    "momentum": Optimizer(state=1, foreach=0),
    "adam": Optimizer(state=2, foreach=1),
    "adamw": Optimizer(state=2, foreach=1),
}
"""State: the momentum buffer of SGD; exp_avg and exp_avg_sq of Adam and AdamW. For a moment: the square root
of exp_avg_sq."""


def make_optimizer(
    name: str, parameters: "Iterable[nn.Parameter]", learning_rate: float
) -> "torch.optim.Optimizer":
    """One of torch's optimizers, by the name that commands know, with its default settings otherwise.

    Raises:
        ModelError: an unknown name.
    """
    import torch

    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=learning_rate)
        case "momentum":
            return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, lr=learning_rate)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=learning_rate)
    raise unknown(name)


def unknown(name: str) -> ModelError:
    return ModelError(f"unknown optimizer {name!r}; known are {', '.join(OPTIMIZERS)}")


def with_optimizer(profile: Profile, name: str) -> Profile:
    """Add an optimizer's state to a profile, and its step at the end.

    Raises:
        ModelError: an optimizer that is not known.
    """
    optimizer = OPTIMIZERS.get(name)
    if optimizer is None:
        raise unknown(name)
    graph = profile.graph
    gradients = [index for index, value in enumerate(graph.values) if value.kind is ValueKind.PARAM_GRAD]
    sizes = [graph.values[index].size_bytes for index in gradients]
    moment = sum(sizes) if profile.device != "cpu" else max(sizes, default=0)
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
            resident=replace(graph.resident, optimizer=optimizer.state * sum(sizes)),
        ),
        costs=(*profile.costs, (Cost(latency_ms=0.0, workspace_bytes=optimizer.foreach * moment),)),
        optimizer=name,
    )
