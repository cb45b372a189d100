"""A model that runs several times before a backward pass (siamese networks, contrastive and triplet losses).

Each run holds what it stored until its backward pass. A plan is of one run, so each gets a share of the budget. Let
P be the peak of a run's plan, and R what all runs have in common: weights, their gradients, the optimizer's state.
A run holds at most P - R, so n runs take at most n (P - R) + R. Where no plan has so small a peak, the leanest is
taken if it holds little: with H held from its forward to its backward part, n runs take (n - 1) H + P.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from monetlite.core.costs import without_costs
from monetlite.core.graph import OperatorGraph
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.profiling.step_additions import OPTIMIZERS
from monetlite.runtime.gradient_delivery import CapturedStep
from monetlite.runtime.serving import own_bytes


@dataclass
class OpenRuns:
    """The runs of captured steps whose backward pass is still to come.

    Attributes:
        counted: runs in a step that plans are made for; most: the most that there were at one time.
        least_bytes: the budget of the leanest plan of a run, where a share is too small for any; else None.
    """

    counted: int = 1
    most: int = 1
    least_bytes: int | None = None
    _steps: list[CapturedStep] = field(default_factory=list)

    def keep(self, step: CapturedStep) -> None:
        """Watch a step that was captured."""
        self._steps.append(step)

    def more(self) -> bool:
        """Note a run that is to begin; True if it is a step's first, and the last step had more than counted."""
        before = sum(step.open_runs() for step in self._steps)
        self.most = max(self.most, before + 1)
        return before == 0 and self.most > self.counted

    def forget(self) -> None:
        """Watch nothing that was captured before."""
        self._steps.clear()

    def share_bytes(self, budget_bytes: int, common_bytes: int) -> int:
        """The budget of one run, where all of them have so much in common."""
        return (budget_bytes + (self.counted - 1) * common_bytes) // self.counted


def held_bytes(graph: OperatorGraph, steps: Sequence[Step]) -> int:
    """Bytes that a run by these steps holds from its forward to its backward part, its inputs among them."""
    timeline, live = simulate(without_costs(graph), steps), set[int]()
    for writes, frees in zip(timeline.writes[: timeline.border], timeline.frees, strict=False):
        live = (live | set(writes)) - frees
    return graph.resident.inputs + sum(graph.values[index].size_bytes for index in live)


def common_bytes(model: nn.Module, optimizer: str | None) -> int:
    """Bytes that all runs of a model in a training step have in common."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (
        own_bytes([*model.parameters(), *model.buffers()])
        + sum(parameter.nbytes for parameter in trained)
        + _state_bytes(trained, optimizer)
    )


def _state_bytes(trained: Iterable[nn.Parameter], optimizer: str | None) -> int:
    if optimizer is None:
        return 0
    return sum(OPTIMIZERS[optimizer].state_bytes(item.nbytes, item.numel()) for item in trained)
