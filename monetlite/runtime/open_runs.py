"""A model that runs several times before a backward pass (siamese networks, contrastive and triplet losses).

Each run holds what it stored until its backward pass. A plan is of one run, so each gets a share of the budget. Let
P be the peak of a run's plan, and R what all runs have in common: weights, their gradients, the optimizer's state.
A run holds at most P - R, so runs that count n times as much as the largest take at most n (P - R) + R together.
A run counts by the bytes of its inputs, and by a part that all have.

Runs count when a backward pass begins: one whose loss is left out (`if not loss.isfinite(): continue`) may still be
there when the next one begins, and is gone by then. One that is there, and has no backward pass (its step was
interrupted, and a traceback holds its output), counts where two steps in turn have such runs.

A budget in percent needs no share: plain training runs as often.
"""

import math

from torch import nn

from monetlite.core.announcing import tell, warn
from monetlite.core.errors import InfeasibleBudget
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes, is_percentage, parse_budget
from monetlite.runtime.gradient_delivery import CapturedStep
from monetlite.runtime.measured_peak import state_bytes
from monetlite.runtime.serving import own_bytes

EVERY_RUN = 0.1
"""Part by which every run counts, of what the largest one's inputs do."""


class OpenRuns:
    """The runs of a model whose backward pass is still to come, and the budget of each.

    Args:
        model, budget: as for `ModelSchedules`; no model where runs are only counted.
        optimizer: whose state is counted, if any.

    Attributes:
        most: the most runs that count in a step.
        alone: True if no other run was there when the last one began, nor ever when a backward pass did.
    """

    def __init__(self, model: nn.Module | None, budget: str | int | float | None, optimizer: str | None) -> None:
        self._model, self._whole, self._optimizer = model, budget, optimizer
        self._counted, self._weight = 1, 1.0
        """Runs of a step that plans are made for, and how many of the largest one they count as."""
        self._planned_weight = 1.0  # the same for the run that is being planned
        self._steps: list[CapturedStep] = []
        self._sizes: list[int] = []
        """Bytes of the inputs of the last runs, in order."""
        self._held_sizes: list[int] = []
        """The same of the most runs with which a backward pass of the present step began."""
        self._begun = self._differentiated = 0  # runs of the present step, and their backward parts
        self._begun_before = 0
        """Runs of the step before that were there when a backward pass began."""
        self._largest_bytes = 0
        self.most, self._most_weight = 1, 1.0
        self.alone = True

    def budget_of(self, size_bytes: int) -> str | int | float | None:
        """The budget of one run, by the bytes of its inputs: all of it, or a share."""
        if (shared_bytes := self._shared_bytes()) is None:
            return self._whole
        self._planned_weight = self._weight / self._count_of(size_bytes, self._largest_bytes)
        return self._share_bytes(shared_bytes, self._planned_weight)

    def _shared_bytes(self) -> int | None:
        """The budget, in bytes, if several runs share it."""
        if self._whole is None or is_percentage(self._whole) or self._counted == 1:
            return None
        return parse_budget(self._whole)

    def _count_of(self, size_bytes: int, largest_bytes: int) -> float:
        """The part of the largest run that another counts as."""
        return EVERY_RUN + (1 - EVERY_RUN) * min(1.0, size_bytes / max(1, largest_bytes))

    def keep(self, step: CapturedStep) -> None:
        """Note a step that was captured."""
        self._steps.append(step)

    def _open(self) -> int:
        return sum(len(step.open_runs()) for step in self._steps)

    def backward_begins(self) -> None:
        """Note the runs that a backward pass begins with."""
        self._differentiated += 1
        if (runs := self._open()) > len(self._held_sizes):
            self._held_sizes = self._sizes[-runs:]

    def _count_step(self) -> None:
        """Count the runs of the step that has ended."""
        held = len(self._held_sizes)
        begun = min(held, self._begun)
        runs = max(min(held, self._differentiated), min(begun, self._begun_before))
        self.most = max(self.most, runs)
        if runs > 1:
            sizes = self._held_sizes[-runs:]
            self._most_weight = max(self._most_weight, sum(self._count_of(size, max(sizes)) for size in sizes))
        self._held_sizes, self._begun, self._differentiated, self._begun_before = [], 0, 0, begun

    def forget(self) -> None:
        """Count no runs of what was captured before."""
        self._steps.clear()

    def begin(self, schedule: Schedule | None, size_bytes: int) -> bool:
        """Note a run that is to begin; True if plans are to be made anew, each for a smaller budget.

        That is so for a step's first run, if the last step's runs took more than those that were counted.

        Args:
            schedule: the one of the last run.
            size_bytes: of its inputs.
        """
        before = self._open()
        if self._differentiated:
            self._count_step()
        self._begun += 1
        self.alone = before == 0 and self.most == 1
        self._sizes = [*self._sizes[-before:], size_bytes] if before else [size_bytes]
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if before > 0 or (self.most == self._counted and self._most_weight <= self._weight):
            return False
        # Where sizes vary from step to step, all runs soon count as the largest one, so that plans are made twice.
        rounded = math.ceil(4 * self._most_weight) / 4
        self._weight = float(self.most) if self.most == self._counted else min(rounded, float(self.most))
        self._counted = self.most
        several, shared_bytes = self._several(), self._shared_bytes()
        if shared_bytes is not None:
            share_bytes = self._share_bytes(shared_bytes, self._weight)
            tell(f"{several}; planning again, within {format_bytes(share_bytes)} for the largest run")
        elif self._whole is None and schedule is not None:
            share_bytes = self._share_bytes(schedule.budget_bytes, self._weight)
            if schedule.peak_bytes > share_bytes:
                warn(
                    f"{several}, and the schedule's budget of {format_bytes(schedule.budget_bytes)} is of one run. "
                    f"Solve for {format_bytes(share_bytes)}, or run its inputs as one batch"
                )
        return shared_bytes is not None

    def of_share(self, error: InfeasibleBudget) -> InfeasibleBudget:
        """The error of a share of the budget that is too small, which says so; any other is the same."""
        if (whole := self._shared_bytes()) is None:
            return error
        share = format_bytes(error.budget_bytes)
        proven_bytes = self._whole_bytes(error.proven_bytes)
        reached_bytes = None if error.reached_bytes is None else self._whole_bytes(error.reached_bytes)
        enough = "" if reached_bytes is None else f" to {format_bytes(reached_bytes)} ({reached_bytes} bytes)"
        return InfeasibleBudget(
            f"{self._several()}, so this one gets {share} of {format_bytes(whole)}. Run its inputs as one batch, "
            f"which is planned as a whole, or raise the budget{enough}. Of one run: {error}",
            budget_bytes=whole,
            proven_bytes=proven_bytes,
            reached_bytes=reached_bytes,
        )

    def _several(self) -> str:
        return f"the model runs {self._counted} times before a backward pass"

    def _share_bytes(self, budget_bytes: int, weight: float) -> int:
        """The share of one run, where all count as so many times that one."""
        return int((budget_bytes + (weight - 1) * self._common_bytes()) / weight)

    def _whole_bytes(self, share_bytes: int) -> int:
        """The budget of which the run that is planned gets such a share."""
        weight = self._planned_weight
        return math.ceil(weight * share_bytes - (weight - 1) * self._common_bytes())

    def _common_bytes(self) -> int:
        """Bytes that all runs have in common."""
        assert self._model is not None
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        held_bytes = own_bytes([*self._model.parameters(), *self._model.buffers()])
        gradient_bytes = sum(parameter.nbytes for parameter in trained)
        sizes = [(parameter.nbytes, parameter.numel()) for parameter in trained]
        return held_bytes + gradient_bytes + state_bytes(sizes, self._optimizer)
