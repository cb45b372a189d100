"""Memory that checking a schedule takes, known before the model is built with its weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import nn

from monetlite.core.errors import MonetliteError
from monetlite.core.schedule import Schedule
from monetlite.core.units import format_bytes
from monetlite.profiling.memory_use import available_bytes
from monetlite.profiling.step_additions import optimizer_kind

LIBRARIES_BYTES = 3 * 10**8
"""Memory that tracing, compilers and profilers take besides: 0.25 to 0.35 GB, measured on a CPU."""


@dataclass(frozen=True, kw_only=True)
class CheckMemory:
    """Memory of a check at its largest, by purpose, in bytes. Fields are named as people read them."""

    weights: int
    gradients: int
    optimizer_state: int
    activations: int
    results_to_compare: int
    libraries: int = LIBRARIES_BYTES

    @property
    def on_device(self) -> int:
        """Memory of the training step itself."""
        return self.weights + self.gradients + self.optimizer_state + self.activations

    @property
    def in_all(self) -> int:
        return self.on_device + self.results_to_compare + self.libraries

    def __str__(self) -> str:
        sizes = ((item.name.replace("_", " "), getattr(self, item.name)) for item in fields(self))
        return ", ".join(f"{format_bytes(size)} {name}" for name, size in sizes if size)


def needed_memory(
    model: nn.Module, inputs: Iterable[torch.Tensor], schedule: Schedule, *, on_gpu: bool, by_operator: bool = False
) -> CheckMemory:
    """Memory that `verify_own` takes for a model, which may be on the meta device.

    Plain training's step counts, whose activations are those that the schedule's file tells, at the inputs' sizes.
    Gradients of one step are kept beside those of the next, and values of all operators where they are compared.
    """
    own = {id(item): item for item in (*model.parameters(), *model.buffers())}
    weights = sum(item.nbytes for item in own.values())
    trained = {id(item): item for item in model.parameters() if item.requires_grad}
    gradients = sum(item.nbytes for item in trained.values())
    copies = state = 0
    if schedule.optimizer is not None:
        kind = optimizer_kind(schedule.optimizer)
        state = sum(kind.state_bytes(item.nbytes, item.numel()) for item in trained.values())
        # The optimizer's step copies weights on a GPU alone.
        copies = kind.foreach * gradients if schedule.device != "cpu" and not on_gpu else 0
    solved = sum(math.prod(spec.shape) for spec in schedule.inputs.values())
    share = sum(item.numel() for item in inputs) / solved if solved else 1.0
    activations = int(share * max(0, schedule.plain_peak_bytes - weights - state - gradients - copies))
    # Weights are kept beside those that are off by the schedule's tolerance.
    kept = gradients + (weights if schedule.tolerance > 0 else 0) + (activations if by_operator else 0)
    return CheckMemory(
        weights=weights,
        gradients=gradients,
        optimizer_state=state,
        activations=activations,
        results_to_compare=kept,
    )


def refuse_too_large(needed: CheckMemory, *, held_bytes: int, on_gpu: bool) -> None:
    """Refuse a check that the memory here does not suffice for. `held_bytes` of main memory are held already.

    Raises:
        MonetliteError: with the numbers, and what to do.
    """
    places = [("main memory", needed.in_all - held_bytes, available_bytes())]
    if on_gpu:
        free_bytes, _ = torch.cuda.mem_get_info()
        places = [
            ("GPU memory", needed.on_device, free_bytes),
            ("main memory", needed.results_to_compare + needed.libraries, available_bytes()),
        ]
    for place, needed_bytes, there in places:
        if there is not None and needed_bytes > there:
            raise MonetliteError(
                f"this check needs about {format_bytes(needed_bytes)} of {place} ({needed}), and "
                f"{format_bytes(there)} is available. Check at a smaller size (--batch, --sequence-length, "
                "--input-size), on a larger machine, or a smaller model of the same family"
            )
