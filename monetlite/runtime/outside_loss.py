"""The memory of a loss that the caller computes from a model's outputs, measured in some training steps.

Between the forward and the backward pass of a model runs code that nobody captured. What it takes at most, and what
it still has when the backward pass begins, is measured in the first steps and counted from then on. A loss may grow
later (a term that is switched on after a warm-up), so it is measured again, more and more rarely.
"""

import gc
from typing import Any

from monetlite.core.costs import Profile, without_costs
from monetlite.core.graph import OperatorGraph
from monetlite.core.schedule import Schedule
from monetlite.core.simulate import simulate
from monetlite.core.steps import Step
from monetlite.core.units import format_bytes
from monetlite.fx.torch_internals.torch_pytree import tensors_among
from monetlite.profiling.allocated import MAX_LATE, AllocatedGrowth
from monetlite.profiling.step_additions import LossMemory, with_outside_loss

FIRST_STEPS = 3
"""Steps in which the loss is measured, one after the other; the largest figures count. Then it is measured in steps
4, 8, 16, and so on, and in the next one where looks at the memory were late."""
NOISE_BYTES, NOISE_SHARE = 2**18, 0.01
"""Memory of Python objects and the like, which doesn't count: so much, or such a share of the outputs."""


class OutsideLoss:
    """The caller's loss.

    Attributes:
        memory: of the loss, as far as it is known.
    """

    def __init__(self) -> None:
        self.memory: LossMemory | None = None
        self._growth: AllocatedGrowth | None = None
        """Of the step that is measured, from the end of its forward pass on."""
        self._outputs_bytes = 0
        self._found: LossMemory | None = None
        """Memory of its loss, once its backward pass has begun, if that can be known."""
        self._steps = self._more_steps = 0
        self._planned: tuple[OperatorGraph, tuple[Step, ...]] | None = None
        self._captured = False

    def planned(self, graph: OperatorGraph, steps: tuple[Step, ...]) -> None:
        """Note the step that is being captured, and the plan that it begins with."""
        self._planned, self._captured = (graph, steps), True

    def forward_ends(self, output: Any, device: str, least_bytes: float) -> bool:
        """Begin to measure, in the steps in which that is done, unless the outputs are smaller than so much."""
        outputs_bytes = sum(item.nbytes for item in tensors_among(output) if item.requires_grad)
        if outputs_bytes < least_bytes:
            return False
        self._steps += 1
        if self._steps <= FIRST_STEPS or self._steps.bit_count() == 1:
            self._more_steps = MAX_LATE
        if not self._more_steps:
            return False
        if self._captured:
            gc.collect()  # so that what the capture leaves behind is not freed meanwhile
            self._captured = False
        self._growth, self._outputs_bytes, self._found = AllocatedGrowth(device), outputs_bytes, None
        return True

    def backward_begins(self) -> None:
        """Note that the loss has been computed."""
        ended = None if self._growth is None else self._growth.end()
        if ended is not None:
            # Beside the gradients of the outputs, which a plan counts.
            whole, (now, most) = self._outputs_bytes, ended
            kept_bytes = self._noteworthy(now - whole)
            taken_bytes = self._noteworthy(most - whole - kept_bytes)
            self._found = LossMemory(kept=kept_bytes / whole, taken=taken_bytes / whole)

    def _noteworthy(self, size_bytes: int) -> int:
        return size_bytes if size_bytes > max(NOISE_BYTES, NOISE_SHARE * self._outputs_bytes) else 0

    def measured(self) -> LossMemory | None:
        """The memory of the loss, if the last step showed that it takes any, or more than was known."""
        growth, self._growth = self._growth, None
        if growth is None:
            return None
        found, known = self._found, self.memory
        self._more_steps = self._more_steps - 1 if found is not None and growth.was_late else 0
        if found is not None and known is not None:
            found = LossMemory(kept=max(known.kept, found.kept), taken=max(known.taken, found.taken))
        if found is None or found == known:
            return None
        self.memory = found
        return found

    def counted(self, profile: Profile) -> Profile:
        """A profile with what the loss is known to take."""
        return profile if self.memory is None else with_outside_loss(profile, self.memory)

    def problem(self, schedule: Schedule) -> str:
        """The fault of a schedule, where the last step showed that the loss takes more than was known.

        Empty if the step that was captured last keeps to its budget with that. Workspaces of operators don't count.
        """
        if self.measured() is None:
            return ""
        assert self._planned is not None
        graph, steps = self._planned
        with_loss_bytes = simulate(self.counted(without_costs(graph)), steps).peak_bytes
        peak_bytes = max(with_loss_bytes, schedule.peak_bytes)
        if peak_bytes <= schedule.budget_bytes:
            return ""
        return (
            f"with the loss outside of the model, this step takes at least {format_bytes(peak_bytes)}, over the "
            f"budget of {format_bytes(schedule.budget_bytes)}"
        )
